"""The steps of a set-up: the MPI, mpi4py and Horovod, from the network or from a bundle."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from hvdtrain.errors import HvdtrainError, Interrupted, UsageError
from hvdtrain.setup import build, bundle, environment, mpi, offline, source, toolchain
from hvdtrain.setup.build import Built
from hvdtrain.setup.environment import Pip
from hvdtrain.setup.options import SetupOptions


def set_up(options: SetupOptions) -> str:
    """Set this environment up, and return what it has now and what to do next.

    Raises:
        UsageError: a requirement is missing.
        HvdtrainError: a download or a build failed.
        Interrupted: Ctrl-C, or a signal to stop.
    """
    with one_line_errors():
        environment.check()
        cache = options.cache_folder
        with pip_of(options, cache) as pip:
            if options.offline is not None:
                built = offline.install(Path(options.offline), options, cache, pip)
                return next_steps(built)
            built = _install(options, cache, pip)
            if options.bundle is None:
                return next_steps(built)
            bundle.write(Path(options.bundle), built, cache, pip)
            return next_steps(built) + bundle_steps(Path(options.bundle))


def wheel(options: SetupOptions) -> Path:
    """Return the wheel of Horovod for this environment as it is; install nothing.

    Raises:
        UsageError, HvdtrainError, Interrupted: as in `set_up`.
    """
    with one_line_errors():
        cache = options.cache_folder
        compiler = toolchain.find_compiler()
        request = options.request(mpi.choose(options.mpi))
        library = toolchain.find_mpi(request.mpi)
        parts = toolchain.ingredients(request, library, compiler)
        with pip_of(options, cache) as pip:
            return build.make(parts, library, cache / "wheels", pip)


def _install(options: SetupOptions, cache: Path, pip: Pip) -> Built:
    """Install mpi4py and Horovod, with what the network or the cache has."""
    toolchain.torch_version()
    kind = mpi.choose(options.mpi)
    request = options.request(kind)
    if (tensorflow := toolchain.tensorflow_version()) and not toolchain.supported_tensorflow():
        oldest = ".".join(map(str, toolchain.TENSORFLOW_OLDEST))
        print(f"{tensorflow} is older than {oldest}: building for PyTorch alone", file=sys.stderr)
    library = mpi.prepare(kind, cache, pip)  # first: MPI sums gradients without Horovod
    parts = toolchain.ingredients(request, library, toolchain.find_compiler())
    horovod = build.make(parts, library, cache / "wheels", pip)
    build.install(horovod, pip)
    return Built(horovod, parts, library)


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
    with build.log_kept_on_failure(log):
        yield Pip(log, constraint)


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


def next_steps(built: Built) -> str:
    """Return what is installed, and the next command."""
    frameworks = f"PyTorch {built.parts['torch']}"
    if built.parts["tensorflow"] != "none":
        frameworks += f" and {built.parts['tensorflow']}"
    program = Path(sys.prefix, "bin", "hvdtrain")
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if str(program.parent) in folders:
        command = "hvdtrain doctor"
    elif program.with_name("activate").is_file():
        command = f"source {program.with_name('activate')} && hvdtrain doctor"
    else:
        command = f"{program} doctor"
    return (
        f"Horovod {source.VERSION} is set up for {frameworks}, with {built.mpi.version} "
        f"({built.mpi.kind}).\nNext: {command}"
    )


def bundle_steps(path: Path) -> str:
    """Return the commands that install a bundle on another machine."""
    return (
        f"\nBundle: {path} ({path.stat().st_size >> 20:,} MB). Copy it to the other machine, and "
        f"run in a new environment there:\n  tar -xf {path.name} {bundle.own_wheel_name()}\n"
        f"  python -m pip install --no-deps --no-index {bundle.own_wheel_name()}\n"
        f"  python -m hvdtrain.setup --offline {path.name}"
    )
