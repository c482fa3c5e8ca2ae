"""Fixtures of several test folders: small data sets, and the program as a user starts it."""

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from hvdtrain import data, launch
from hvdtrain.host import files
from tests import durations, warm

ROOT = Path(__file__).parent.parent
Program = Callable[..., subprocess.CompletedProcess[str]]

# One thread per process, for tests in this process too: beside other tests, threads of OpenMP wait
# for each other in busy loops, and a test of 8 s took 200 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The session folder of tests that start mpirun themselves, separate from tests that kill it.
_open = ExitStack()
atexit.register(_open.close)
os.environ[launch.SESSIONS[0]] = str(_open.enter_context(files.temporary_folder()))

# Failing examples of property tests are kept in the project's cache. In continuous integration,
# for which Hypothesis loads its own profile, nothing is kept and runs are deterministic.
_examples = DirectoryBasedExampleDatabase(ROOT / ".venv" / "cache" / "hypothesis")
_kept = (
    {"derandomize": True} if "CI" in os.environ else {"database": _examples, "derandomize": False}
)
settings.register_profile("here", deadline=None, **_kept)  # no deadline: the machine may be busy
settings.load_profile("here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--save-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's `&` and nohup leave these ignored, and processes started by tests inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if hasattr(config, "workerinput"):
        return
    warm.open_folder()
    if config.getoption("--save-durations"):
        config.pluginmanager.register(durations.Recorder())


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        warm.close_folder()


# [mark, start of a name] of tests that take long.
LATER = [
    line.split(" ", 1)
    for line in (ROOT / "tests" / "later.txt").read_text().splitlines()
    if not line.startswith("#")
]


def pytest_itemcollected(item: pytest.Item) -> None:
    mark = next((mark for mark, start in LATER if item.nodeid.startswith(start)), None)
    if mark is not None:
        item.own_markers[:] = [
            marker for marker in item.own_markers if marker.name not in ("proof", "weekly")
        ]
        item.add_marker(mark)


@pytest.hookimpl(trylast=True)  # after the selection by -m and -k
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = [(str(item.path), item.nodeid) for item in items]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = [items[place] for place in durations.in_order(tests, durations.read(), workers)]


@pytest.fixture(scope="session")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set of 601 training images (an uneven tail) and test images, of 5 classes."""
    folder = tmp_path_factory.mktemp("data") / "small"
    data.synth(folder, 601, 5, size=16, seed=1)
    return folder


@pytest.fixture(scope="session")
def hvdtrain() -> Program:
    """Return a function that runs the program in a separate process and returns its result."""
    return run_program


def run_program(
    *arguments: object,
    launcher: Sequence[str] = (),
    timeout: float = 300,  # parallel jobs sometimes starve each other
    cwd: Path | None = None,
    cold: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run the program until it ends, from a warm interpreter unless `cold` (see tests/warm)."""
    return subprocess.run(
        [*launcher, *program(*arguments, cold=cold)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        cwd=cwd,
        env=program_environment() | environment,
    )


def program(*arguments: object, cold: bool = False) -> list[str]:
    """Return the command that runs `hvdtrain ARGUMENTS`."""
    words = [str(argument) for argument in arguments]
    framework = "tensorflow" if "tensorflow" in words else "torch"
    return [sys.executable if cold else warm.python(framework), "-m", "hvdtrain", *words]


def program_environment() -> dict[str, str]:
    """Return an environment with one thread per process, this Python's PATH and root allowed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **settings, **root}
