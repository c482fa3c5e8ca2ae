# Replaces the interpreter: see tests/warm. Imports only what loads in milliseconds: the modules
# signal and socket take 12 ms more.
import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import os
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Request a fork that runs this process's program, and exit with the fork's exit code."""
    arguments = sys.argv[1:]
    interpreter = os.environ["HVDTRAIN_TEST_PYTHON"]
    words = arguments[1:] if arguments[:1] == ["-P"] else arguments
    if words[:2] not in (["-m", "hvdtrain"], ["-m", "pytest"]) and words[:1] != ["-c"]:
        os.execv(interpreter, [interpreter, *arguments])
    framework = os.environ.get("HVDTRAIN_TEST_FRAMEWORK") or framework_of(arguments)
    address = f"{os.environ['HVDTRAIN_TEST_WARM']}/{framework}"
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
    except FileNotFoundError:  # that server was not started
        os.execv(interpreter, [interpreter, *arguments])
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until the job is sent
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: pass_on(server, number))
    mask = os.umask(0)
    os.umask(mask)
    cores = " ".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    facts = [cores, str(mask), str(len(arguments)), *arguments, *environment]
    job = b"\0".join(os.fsencode(fact) for fact in facts)
    files = [0, 1, 2, os.open(".", os.O_RDONLY)]
    sent = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)
    server.sendmsg([len(job).to_bytes(8, "little")], [rights])
    server.sendall(job)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    end(int.from_bytes(server.recv(8), "little", signed=True))


def pass_on(server: socket.socket, number: int) -> None:
    """Send a signal to the fork, unless it has just ended: its exit code is then on the way."""
    try:
        server.send(bytes([number]))
    except OSError:
        return  # contextlib would take milliseconds to load


def framework_of(arguments: list[str]) -> str:
    """Return the framework that `hvdtrain ARGUMENTS` will load, by its option or its file."""
    words = list(arguments)
    if "--config" in arguments[:-1]:
        try:
            with open(arguments[arguments.index("--config") + 1]) as file:  # noqa: PTH123
                words += file.read().split()
        except (OSError, UnicodeError):
            pass  # the program reports what is wrong with the file
    return "tensorflow" if "tensorflow" in words else "torch"


def end(status: int) -> None:
    """Exit with a status, or die by a signal."""
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
