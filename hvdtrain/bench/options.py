"""Options of `hvdtrain bench` as dataclasses, like the configuration of a run."""

from dataclasses import dataclass, field, fields
from typing import Literal

from hvdtrain.config import TrainConfig, field_of_train
from hvdtrain.errors import UsageError
from hvdtrain.host.launchers import ALGORITHMS
from hvdtrain.options.sections import Device, Precision, Seam, about

LARGEST_MESSAGE = 2**30


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Options of `bench step`, which has no run folder; names and values are those of `train`."""

    model: str = field_of_train("model")
    data: str | None = field(
        default=None,
        metadata=about("folder of a packed data set", metavar="DIR", default="random images"),
    )
    plan: str | None = field_of_train("plan")
    ranks: int | None = field_of_train("ranks")
    batch_size: int = field_of_train("batch_size")
    microbatches: int | None = field_of_train("microbatches")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] | None = field_of_train("schedule")
    precision: Precision = field_of_train("precision")
    optimizer: Seam = field_of_train("optimizer")
    batch_norm: Literal["local", "sync"] = field_of_train("batch_norm")
    recompute: str | None = field_of_train("recompute")
    loss: Seam = field_of_train("loss")
    clip_norm: float | None = field_of_train("clip_norm")
    augment: Seam = field_of_train("augment")
    compile: bool = field_of_train("compile")
    image_size: int | None = field(
        default=None,
        metadata=about("height and width of the images", default="as in the data, else 32"),
    )
    classes: int | None = field(
        default=None, metadata=about("classes of the random images", default="10")
    )
    patch_size: int | None = field_of_train("patch_size")
    device: Device | None = field_of_train("device")
    threads: int | None = field_of_train("threads")
    allreduce: Literal["ring", "auto"] = field_of_train("allreduce")
    steps: int = field(default=30, metadata=about("steps that are timed"))
    json: bool = field(default=False, metadata=about("print one JSON object"))

    def training(self, data: str) -> TrainConfig:
        """Return the configuration of the training run whose steps are timed.

        Raises:
            UsageError: if a value is out of range.
        """
        if self.data is not None and self.classes is not None:
            raise UsageError("--data defines the classes: leave out --classes or --data")
        for name in ("steps", "classes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} must be above 0, not {value}")
        shared = {item.name for item in fields(TrainConfig)} - {"data"}
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        kept = {name: value for name, value in values.items() if name in shared}
        return TrainConfig(data=data, **kept).check()


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Options of `bench loader`."""

    data: str = field(metadata=about("folder of a packed data set", metavar="DIR"))
    batch_size: int = field_of_train("batch_size")
    augment: Seam = field(
        default="crop-flip", metadata=about("none, crop-flip or resized-crop-flip")
    )
    memory_mb: int = field(
        default=4096, metadata=about("memory for images; a larger set is read in windows")
    )
    seconds: float = field(default=5.0, metadata=about("how long to read"))
    json: bool = field(default=False, metadata=about("print one JSON object"))

    def check(self) -> "LoaderConfig":
        """Return the configuration itself if every value is in range.

        Raises:
            UsageError: naming the option.
        """
        for name in ("batch_size", "memory_mb", "seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"--{name.replace('_', '-')} must be above 0, not {value}")
        return self


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Options of `bench allreduce` and `bench exchange`."""

    ranks: int | None = field(
        default=None,
        metadata=about(
            "start this many ranks on this machine", default="those of the launcher, else 2"
        ),
    )
    largest: int = field(default=64 * 2**20, metadata=about("bytes of the largest message"))
    algorithm: str = field(
        default="auto",
        metadata=about(
            f"{', '.join(ALGORITHMS)}, or all: algorithm of the MPI library (allreduce)"
        ),
    )
    json: bool = field(default=False, metadata=about("print one JSON object"))

    @property
    def algorithms(self) -> list[str]:
        """Return the requested algorithm, or all of them."""
        return list(ALGORITHMS) if self.algorithm == "all" else [self.algorithm]

    def check(self) -> "NetworkConfig":
        """Return the configuration itself if every value is in range.

        Raises:
            UsageError: naming the option.
        """
        if self.algorithm not in (*ALGORITHMS, "all"):
            raise UsageError(
                f"--algorithm {self.algorithm} is unknown: use {', '.join(ALGORITHMS)} or all"
            )
        if not 4 <= self.largest <= LARGEST_MESSAGE:
            raise UsageError(
                f"--largest must be between 4 and {LARGEST_MESSAGE} bytes, not {self.largest}"
            )
        if self.ranks is not None and self.ranks < 2:
            raise UsageError(f"--ranks must be at least 2, not {self.ranks}")
        return self
