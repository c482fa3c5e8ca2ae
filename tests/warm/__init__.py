"""Programs that start with their libraries loaded, as forks of a process that has loaded them.

A cold start of `hvdtrain train` takes 3 to 6 CPU seconds of imports on each rank, and the tests
start it hundreds of times. `python()` replaces the interpreter: it requests a fork from a server
(server.py; one per framework for the whole test run), sends it its own arguments, environment,
working directory, cores and standard streams, forwards signals to it, and exits with its exit
code. Ranks under mpirun are such forks too, since sys.executable of a fork is that `python`.

A fork runs the same code as a cold start, except for the imports, its parent process, and the
teardown of modules at the end. Tests of these use `cold=True`, and `make proof` starts more tests
cold.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

FOLDER = "HVDTRAIN_TEST_WARM"  # the environment variable that names the folder of the servers
PACKAGE = Path(__file__).parent


def open_folder() -> None:
    """Make the folder of this test run's servers, for this process and its children."""
    if FOLDER in os.environ:
        return  # this is a rank that runs tests itself
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    client = (PACKAGE / "client.py").read_text()
    program = folder / "python"
    program.write_text(f"#!{sys.executable} -IS\n{client}")
    program.chmod(0o755)
    (folder / "owner").write_text(str(os.getpid()))
    os.environ |= {FOLDER: str(folder), "HVDTRAIN_TEST_PYTHON": sys.executable}


def close_folder() -> None:
    """Remove the folder; its servers end with the process that made it."""
    folder = Path(os.environ[FOLDER])
    if (folder / "owner").read_text() == str(os.getpid()):
        shutil.rmtree(folder, ignore_errors=True)


def python(framework: str = "torch") -> str:
    """Return the program that replaces the interpreter, and start its server if needed."""
    folder = Path(os.environ[FOLDER])
    with _locked(folder / "lock"):
        if not (folder / framework).exists():
            _start(folder, framework)
    return str(folder / "python")


def fork_of(process: psutil.Process) -> psutil.Process:
    """Return the fork that runs for this process if it is a client, else the process itself."""
    try:
        number = Path(os.environ[FOLDER], f"fork-of-{process.pid}").read_text()
    except FileNotFoundError:  # not a client, or one that has ended
        return process
    return psutil.Process(int(number))


def _start(folder: Path, framework: str) -> None:
    """Start a server, and return as soon as it listens."""
    owner = (folder / "owner").read_text()
    ready, writes = os.pipe()
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent.parent)}
    with (folder / f"{framework}.log").open("wb") as log:
        subprocess.Popen(
            [sys.executable, "-m", "tests.warm.server", framework, folder, owner, str(writes)],
            env={**os.environ, **settings},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[writes],
            start_new_session=True,
        )
    os.close(writes)
    with os.fdopen(ready, "rb") as pipe:
        status = pipe.read()
    assert status == b"ready", (folder / f"{framework}.log").read_text()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
