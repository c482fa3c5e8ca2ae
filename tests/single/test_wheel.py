"""The wheel that users install holds the package and nothing else, and can be imported."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.conftest import ROOT

COPIED = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "constraints.txt")
FOLDERS = ("hvdtrain", "tests", "tools", "examples")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the tree, so that no files are left in the tree itself."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in COPIED:
        shutil.copy(ROOT / name, tree)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.proves(
    "The wheel holds the package alone and can be imported where nothing else is installed."
)
def test_it_holds_every_module_and_nothing_but_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hvdtrain").rglob("*.py")}
    assert modules <= names
    assert "hvdtrain/py.typed" in names
    beside = {name for name in names if not name.startswith("hvdtrain/")}
    assert {name.split("/")[0].rpartition(".")[2] for name in beside} == {"dist-info"}


def test_it_says_what_it_is_needs_and_starts(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        described = {Path(name).name: name for name in archive.namelist() if "dist-info" in name}
        written = archive.read(described["METADATA"]).decode()
        scripts = archive.read(described["entry_points.txt"]).decode()
    head, _, text = written.partition("\n\n")
    assert "Requires-Python: >=3.11" in head
    assert "Requires-Dist: torch<3,>=2.10" in head
    assert "Description-Content-Type: text/markdown" in head
    assert text.startswith("# hvdtrain")
    assert "hvdtrain = hvdtrain.cli:main" in scripts
    assert "LICENSE" in described


def test_it_is_imported_where_nothing_else_is_installed(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    python = tmp_path / "empty" / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, *install, "--quiet", str(wheel)], check=True, timeout=600)
    program = (
        "import importlib.util as it\n"
        "assert not any(map(it.find_spec, ['torch', 'numpy', 'h5py', 'jsonargparse']))\n"
        "import hvdtrain, hvdtrain.config, hvdtrain.data, hvdtrain.models, hvdtrain.world\n"
        "hvdtrain.config.TrainConfig(model='cnn', data='d').check()\n"
        "hvdtrain.models.check_name(hvdtrain.models.MODEL_NAMES[0])\n"
        "print(hvdtrain.__version__, hvdtrain.__file__)"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), "-c", program], cwd=tmp_path, env=kept, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    version, place = done.stdout.split()
    assert version == wheel.name.split("-")[1]
    assert place.startswith(str(tmp_path / "empty"))
    assert (tmp_path / "empty" / "bin" / "hvdtrain").exists()


def test_every_tested_version_is_for_the_oldest_python_too() -> None:
    """A Debian 12 has Python 3.11.2, which a package may refuse although it takes 3.11.7."""
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pinned) > 50
    needs = {}
    for name in pinned:
        with suppress(PackageNotFoundError):  # some are for other systems
            needs[name] = metadata(name)["Requires-Python"] or ""
    assert len(needs) > 50
    refusing = {name: need for name, need in needs.items() if "3.11.0" not in SpecifierSet(need)}
    assert not refusing, "set a version in constraints.txt that takes Python 3.11.0"
