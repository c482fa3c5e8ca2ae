"""A server with loaded libraries that forks for each program of a test: see tests/warm."""

import atexit
import ctypes
import gc
import importlib
import io
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The modules that a run loads besides hvdtrain's own, measured by sys.modules at its end. MPI and
# Horovod are not among them, because loading them starts them.
LIBRARIES = {
    "torch": (
        *("torch", "torch._dynamo", "torch._inductor", "torch._subclasses.fake_tensor", "sympy"),
        *("torch.fx.experimental.symbolic_shapes", "torch.optim", "torch.utils.checkpoint"),
    ),
    "tensorflow": ("tensorflow", "keras"),
}
COMMON = (
    *("numpy", "h5py", "psutil", "yaml", "jsonargparse", "rich.console", "rich.progress"),
    *("safetensors.numpy", "ml_dtypes", "tensorboard.summary.writer.event_file_writer"),
    *("attrs", "hvdtrain.cli", "hvdtrain.training.loop"),
)
OF_TENSORFLOW = ("hvdtrain.keras.", "hvdtrain.backends.tensorflow.")
NOT_LOADED = ("hvdtrain.__main__", "hvdtrain.doctor", "hvdtrain.tf")
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """The program that a client was started for, with its environment and streams."""

    cores: list[int]
    umask: int
    arguments: list[str]
    environment: dict[str, str]
    streams: list[int]
    folder: int


def main() -> None:
    """Load the libraries, listen, and run the program of a client in each fork."""
    framework, folder, owner, ready = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    load(framework)
    os.chdir("/")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / framework))
    listener.listen(64)
    owners = os.pidfd_open(owner)
    os.write(int(ready), b"ready")
    os.close(int(ready))
    job = Server(listener, owners, folder).serve()
    if job is not None:
        become(job, str(folder / "python"))


def load(framework: str) -> None:
    """Import the modules that programs need, without starting threads, which forks would lack."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    package = Path(__file__).parents[2] / "hvdtrain"
    with warnings.catch_warnings(action="ignore"):
        for name in (*LIBRARIES[framework], *COMMON):
            importlib.import_module(name)
        for path in sorted(package.rglob("*.py")):
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            is_of_tensorflow = name.startswith(OF_TENSORFLOW)
            if is_of_tensorflow == (framework == "tensorflow") and not name.startswith(NOT_LOADED):
                importlib.import_module(name.removesuffix(".__init__"))
    assert not {"torch", "tensorflow"} - {framework} & sys.modules.keys()
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    # PyTorch's finalizers unregister its operators, which takes each fork 0.06 s at its end.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # memory that the collector does not touch stays shared with the forks


class Server:
    """A server that waits for clients, for their signals, and for the ends of their forks."""

    def __init__(self, listener: socket.socket, owner: int, folder: Path) -> None:
        self.listener, self.owner, self.folder = listener, owner, folder
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, ("client", 0))
        self.selector.register(owner, selectors.EVENT_READ, ("owner", 0))
        self.clients: dict[int, socket.socket] = {}
        self.ends: dict[int, int] = {}
        self.notes: dict[int, Path] = {}

    def serve(self) -> Job | None:
        """Return the job in each fork that must run it; None when the test run is over."""
        while True:
            for key, _ in self.selector.select():
                kind, pid = key.data
                if kind == "owner":
                    for child in self.clients:
                        os.kill(child, signal.SIGKILL)
                    return None
                if kind == "client":
                    job = self.accept()
                    if job is not None:
                        return job
                elif pid in self.clients and kind == "word":
                    self.pass_on(pid)
                elif pid in self.clients and kind == "end":
                    self.finish(pid)

    def accept(self) -> Job | None:
        """Fork for a new client, and return the job in the fork, None in the server."""
        client, _ = self.listener.accept()
        files: list[int] = []
        try:
            head, files, _, _ = socket.recv_fds(client, 8, 4)
            if len(head) < 8 or len(files) < 4:
                raise ConnectionError
            size = int.from_bytes(head, "little")
            text = b""
            while len(text) < size:
                part = client.recv(size - len(text))
                if not part:
                    raise ConnectionError
                text += part
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except ConnectionError:  # the client was killed
            for file in files:
                os.close(file)
            client.close()
            return None
        note = self.folder / f"fork-of-{int.from_bytes(credentials[:4], 'little')}"
        child = os.fork()
        if child == 0:
            # Written here, since a test may look for it as soon as this process prints something.
            unfinished = self.folder / f"unfinished-{os.getpid()}"
            unfinished.write_text(str(os.getpid()))
            unfinished.replace(note)  # readers see the whole file or none
            for other in (self.listener, client, *self.clients.values()):
                other.close()
            self.selector.close()
            for number in (self.owner, *self.ends.values()):
                os.close(number)
            return parse(text, files)
        for file in files:
            os.close(file)
        self.notes[child] = note
        self.clients[child], self.ends[child] = client, os.pidfd_open(child)
        self.selector.register(client, selectors.EVENT_READ, ("word", child))
        self.selector.register(self.ends[child], selectors.EVENT_READ, ("end", child))
        return None

    def pass_on(self, child: int) -> None:
        """Forward a client's signals to its fork, which is killed if the client is gone."""
        try:
            numbers = self.clients[child].recv(64)
        except ConnectionError:
            numbers = b""
        if not numbers:
            self.selector.unregister(self.clients[child])
        for number in numbers or [signal.SIGKILL]:
            os.kill(child, number)

    def finish(self, child: int) -> None:
        """Send a client the exit code of its fork."""
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        client = self.clients.pop(child)
        self.notes.pop(child).unlink(missing_ok=True)
        with suppress(OSError):
            client.sendall(code.to_bytes(8, "little", signed=True))
        end = self.ends.pop(child)
        self.selector.unregister(end)
        os.close(end)
        with suppress(KeyError):
            self.selector.unregister(client)
        client.close()


def parse(text: bytes, files: list[int]) -> Job:
    """Return the job that a client has sent."""
    cores, umask, count, *rest = (os.fsdecode(part) for part in text.split(b"\0"))
    arguments, environment = rest[: int(count)], rest[int(count) :]
    pairs = (setting.partition("=") for setting in environment)
    return Job(
        cores=[int(core) for core in cores.split()],
        umask=int(umask),
        arguments=arguments,
        environment={name: value for name, _, value in pairs},
        streams=files[:3],
        folder=files[3],
    )


def become(job: Job, python: str) -> None:
    """Run `python -m MODULE ...` or `python -c PROGRAM ...` in place of the client, and exit."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, stream in enumerate(job.streams):
        os.dup2(stream, number, inheritable=True)
        os.close(stream)
    os.fchdir(job.folder)
    os.close(job.folder)
    os.umask(job.umask)
    os.sched_setaffinity(0, job.cores)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), errors="backslashreplace", write_through=True
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.executable = python
    tempfile.tempdir = None  # the server may have cached it
    is_safe = job.arguments[0] == "-P"
    how, what, *arguments = job.arguments[is_safe:]
    sys.path[:1] = [] if is_safe else [str(Path.cwd()) if how == "-m" else ""]
    sys.modules["numpy"].random.seed()  # forks must not draw the same numbers
    sys.argv = [what if how == "-m" else how, *arguments]
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        leave(end.code)
    leave(None)


def leave(code: Any) -> None:
    """Exit as Python does, but without the teardown of modules: it takes 0.35 s with PyTorch."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # as mpi4py does when the interpreter has ended
    os._exit(code & 0xFF if code else 0)


if __name__ == "__main__":
    main()
