"""Import rules: the package is cheap to import, and its parts import in one direction only."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

SLOW = {"torch", "numpy", "h5py", "mpi4py", "horovod", "tensorflow", "keras"}
BUDGET_SECONDS = 0.3

# The rooms of the package, highest first: a module imports from its own room or a lower one.
ROOMS = (
    *("__main__", "cli", "commands", "jobs", "use", "study", "api", "bench"),
    *("training", "torch", "check", "backends", "tf", "keras", "doctor", "notebook"),
    *("health", "checkpoint", "emulate", "engine", "planner", "parallel", "sync", "models"),
    *("plan", "precision", "configfile", "device", "launch", "setup", "config", "world", "gloo"),
    *("data", "options", "transfer", "host", "__version__", "errors"),
)
# The modules that may import a library which is slow, missing on some machines, or conflicting.
OWNERS = {
    "horovod": {"world"},
    "mpi4py": {
        "world",
        "transfer",
        "doctor",
        "parallel.exchange",
        "sync.collectives",
        "sync.server",
    },
    "h5py": {"data"},
    "tensorflow": {"doctor", "keras", "backends.tensorflow", "study.fits"},
    "keras": {"doctor", "keras", "backends.tensorflow", "study.fits"},
    "submitit": {"jobs.slurm"},
}


@pytest.mark.proves("`import hvdtrain` loads no library, and imports point one way.")
def test_importing_the_package_takes_no_time_and_loads_nothing_slow() -> None:
    program = (
        "import json, sys, time\n"
        "start = time.perf_counter()\n"
        "import hvdtrain\n"
        "seconds = time.perf_counter() - start\n"
        "print(json.dumps([seconds, sorted(sys.modules)]))"
    )
    times = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
        )
        seconds, loaded = json.loads(done.stdout)
        assert not SLOW & set(loaded)
        times.append(seconds)
        if seconds < BUDGET_SECONDS:
            break
    assert min(times) < BUDGET_SECONDS, times


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["--version"], "hvdtrain "),
        (["--help"], "usage: hvdtrain COMMAND"),
        (["train", "--help"], "usage: hvdtrain train --model NAME --data DIR [options]"),
    ],
)
def test_version_and_help_are_shown_without_loading_anything_slow(
    words: list[str], start: str
) -> None:
    program = (
        "import sys\n"
        "from hvdtrain import cli\n"
        f"try:\n    cli.run({words})\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(start)
    assert not SLOW & set(done.stdout.splitlines()[-1].split())


def test_the_launcher_of_ranks_loads_nothing_slow() -> None:
    program = (
        "import sys\n"
        "from hvdtrain import commands\n"
        "from hvdtrain.training import starts\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not (SLOW | {"tensorboard", "rich", "psutil", "submitit"}) & set(done.stdout.split())


def test_imports_point_one_way() -> None:
    assert imports_that_point_up(ROOT / "hvdtrain") == []


def test_no_module_imports_itself_around_a_corner() -> None:
    assert cycle(ROOT / "hvdtrain") == []


def test_each_library_is_imported_by_its_owner_alone() -> None:
    assert foreign_imports(ROOT / "hvdtrain") == []


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Make a package that breaks each rule once."""
    files = {
        "__init__.py": "",
        "world.py": "def f():\n    from hvdtrain.training import loop\n",
        "data/__init__.py": "from hvdtrain.data import a\n",
        "data/a.py": "import hvdtrain.data.b\n",
        "data/b.py": "from hvdtrain.data.a import x\nimport h5py\n",
        "training/__init__.py": "",
        "training/loop.py": "def f():\n    import h5py, horovod.torch as h\n",
    }
    for name, text in files.items():
        path = tmp_path / "hvdtrain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "hvdtrain"


def test_a_package_that_breaks_the_rules_is_found_out(house: Path) -> None:
    assert imports_that_point_up(house) == ["world imports training.loop"]
    assert {"data.a", "data.b"} <= set(cycle(house))
    assert foreign_imports(house) == [
        "training.loop imports h5py",
        "training.loop imports horovod",
    ]


def imports_that_point_up(package: Path) -> list[str]:
    """Return imports from a lower room to a higher one, anywhere in a file."""
    return [
        f"{module} imports {target}"
        for module, targets in inside(package).items()
        for target in targets
        if ROOMS.index(room(target)) < ROOMS.index(room(module))
    ]


def cycle(package: Path) -> list[str]:
    """Return the modules of one import cycle, empty if there is none."""
    try:
        TopologicalSorter(inside(package)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def foreign_imports(package: Path) -> list[str]:
    """Return imports of a library in OWNERS by a module that does not own it."""
    return [
        f"{module} imports {library}"
        for module, path in modules(package).items()
        for library in sorted({name.split(".")[0] for name, _ in imported(path)} & OWNERS.keys())
        if not any(module == owner or module.startswith(f"{owner}.") for owner in OWNERS[library])
    ]


def room(module: str) -> str:
    """Return the folder or module below the package that holds a module."""
    return module.split(".")[0]


def modules(package: Path) -> dict[str, Path]:
    """Return the path of every module and subpackage in a package, by its relative name."""
    paths = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            paths[name] = path
    return paths


def inside(package: Path) -> dict[str, list[str]]:
    """Return the modules of the package that each of its modules imports, lazily or not."""
    known = modules(package)
    graph = {}
    for module, path in known.items():
        targets = []
        for name, member in imported(path):
            if name.split(".")[0] == package.name:
                base = name.partition(".")[2]
                full = f"{base}.{member}".strip(".")
                targets.append(full if full in known or not base else base)
        graph[module] = [target for target in dict.fromkeys(targets) if target]
    return graph


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each import of a file: the module's name, and the imported member or ''."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            yield from ((node.module or "", alias.name) for alias in node.names)
