"""A fork of a server with loaded libraries behaves as the process that its client requested."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.conftest import program_environment

SHOW = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ["MINE"], "CIFAR_DIR" in os.environ,
                  sorted(os.sched_getaffinity(0)), os.umask(0), "torch" in sys.modules,
                  sys.executable]))
print("and an error", file=sys.stderr)
sys.exit(3)
"""


def start(code: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [warm.python(), "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=program_environment() | environment,
    )


def test_it_has_the_arguments_environment_folder_cores_and_streams_of_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CIFAR_DIR", raising=False)
    cores = sorted(os.sched_getaffinity(0))
    mask = os.umask(0o27)
    try:
        os.sched_setaffinity(0, cores[:1])
        process = start(SHOW, "one", "two words", MINE="a\nb")
    finally:
        os.sched_setaffinity(0, cores)
        os.umask(mask)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (3, "and an error\n")
    expected = [["-c", "one", "two words"], str(tmp_path), "a\nb", False, cores[:1], 0o27, True]
    assert json.loads(out) == [*expected, warm.python()]


ENDING = """
import atexit, sys, threading, time
atexit.register(print, "handler")
threading.Timer(0.1, print, ["thread"]).start()
print("last", end="\\n")
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(7)", "sys.exit('words')", "1 / 0"])
def test_it_ends_as_a_cold_start_does(end: str) -> None:
    """A fork waits for threads, runs exit handlers, flushes its output, and has the same code."""
    warm_one = start(ENDING.format(end=end))
    outcome = (*warm_one.communicate(timeout=600), warm_one.returncode)
    cold = subprocess.run(
        [sys.executable, "-c", ENDING.format(end=end)],
        capture_output=True,
        text=True,
        env=program_environment(),
    )
    if end == "1 / 0":  # the traceback of a fork starts in the server
        outcome = (outcome[0], outcome[1][-40:], outcome[2])
        assert outcome == (cold.stdout, cold.stderr[-40:], 1)
    else:
        assert outcome == (cold.stdout, cold.stderr, cold.returncode)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_it_ends_by_a_signal_as_its_client_does(number: signal.Signals) -> None:
    process = start(f"import os; os.kill(os.getpid(), {int(number)})")
    process.communicate(timeout=600)
    assert process.returncode == -number


def test_signals_reach_it_through_its_client() -> None:
    process = start(
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "print('ready', flush=True)\nprint(int(signal.sigwait([signal.SIGUSR1])))\n"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=600)
    assert (process.returncode, out) == (0, f"{int(signal.SIGUSR1)}\n")


def test_it_does_not_outlive_a_client_that_is_killed() -> None:
    process = start("import time; print('ready', flush=True); time.sleep(600)")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    fork = warm.fork_of(psutil.Process(process.pid))
    assert fork.pid != process.pid
    process.kill()
    process.communicate(timeout=600)
    until = time.monotonic() + 60
    while fork.is_running() and fork.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("sent", [b"", b"\x0a", bytes(8), (5).to_bytes(8, "little") + b"abc"])
def test_a_client_that_breaks_off_does_not_harm_the_others(sent: bytes) -> None:
    """Such a client is killed, or receives a signal, before it has sent its job."""
    address = str(Path(warm.python()).with_name("torch"))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        client.sendall(sent)
    process = start("print('still there')")
    assert process.communicate(timeout=600)[0] == "still there\n"
