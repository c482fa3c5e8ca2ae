"""What `hvdtrain bench` is asked: dataclasses, as the configuration of a run."""

from dataclasses import dataclass, field, fields
from typing import Literal

from hvdtrain.algorithms import ALGORITHMS
from hvdtrain.config import Device, Precision, TrainConfig, about
from hvdtrain.errors import UsageError

LARGEST_MESSAGE = 2**30


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What `bench step` trains, without a run folder; names and values are those of `train`."""

    model: str = field(
        metadata=about(
            "cnn, resnet18, resnet50, vit_tiny, vit_b16, or package.module:function of your own"
        )
    )
    data: str | None = field(
        default=None,
        metadata=about("folder of a packed data set; default: images made for the purpose"),
    )
    plan: str | None = field(default=None, metadata=about("as of train"))
    ranks: int | None = field(default=None, metadata=about("as of train"))
    batch_size: int = field(default=64, metadata=about("images a step, over all ranks together"))
    microbatches: int | None = field(default=None, metadata=about("as of train"))
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] | None = field(
        default=None, metadata=about("as of train")
    )
    precision: Precision = field(default="fp32", metadata=about("fp32, bf16 or fp64"))
    optimizer: Literal["sgd", "adam", "adamw"] = field(
        default="sgd", metadata=about("sgd, adam or adamw")
    )
    batch_norm: Literal["local", "sync"] = field(default="local", metadata=about("as of train"))
    recompute: str | None = field(default=None, metadata=about("as of train"))
    label_smoothing: float = field(default=0.0, metadata=about("as of train"))
    clip_norm: float | None = field(default=None, metadata=about("as of train"))
    augment: Literal["none", "crop-flip"] = field(default="none", metadata=about("as of train"))
    cutout: int | None = field(default=None, metadata=about("as of train"))
    compile: bool = field(default=False, metadata=about("as of train"))
    image_size: int | None = field(
        default=None, metadata=about("of the images; default: that of the data, else 32")
    )
    classes: int | None = field(
        default=None, metadata=about("classes of images made for the purpose; default: 10")
    )
    patch_size: int | None = field(default=None, metadata=about("as of train"))
    device: Device | None = field(default=None, metadata=about("as of train"))
    threads: int | None = field(default=None, metadata=about("as of train"))
    allreduce: Literal["ring", "auto"] = field(default="auto", metadata=about("as of train"))
    steps: int = field(default=30, metadata=about("steps that are timed"))
    json: bool = field(default=False, metadata=about("print one JSON object"))

    def training(self, data: str) -> TrainConfig:
        """The training run whose steps are timed.

        Raises:
            UsageError: if a value is out of range.
        """
        if self.data is not None and self.classes is not None:
            raise UsageError("--classes is that of the data: leave it or --data out")
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
    """What `bench loader` reads."""

    data: str = field(metadata=about("folder of a packed data set"))
    batch_size: int = field(default=64, metadata=about("images a batch"))
    augment: Literal["none", "crop-flip"] = field(
        default="crop-flip", metadata=about("none or crop-flip")
    )
    cutout: int | None = field(default=None, metadata=about("as of train"))
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
        for name in ("batch_size", "memory_mb", "seconds", "cutout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"--{name.replace('_', '-')} must be above 0, not {value}")
        return self


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """What `bench allreduce` and `bench exchange` send between ranks."""

    ranks: int | None = field(default=None, metadata=about("as of train"))
    largest: int = field(default=64 * 2**20, metadata=about("bytes of the largest message"))
    algorithm: str = field(
        default="auto",
        metadata=about(
            f"{', '.join(ALGORITHMS)}, or all: the MPI library's own, where it has it (allreduce)"
        ),
    )
    json: bool = field(default=False, metadata=about("print one JSON object"))

    @property
    def algorithms(self) -> list[str]:
        """One, or all of them."""
        return list(ALGORITHMS) if self.algorithm == "all" else [self.algorithm]

    def check(self) -> "NetworkConfig":
        """Return the configuration itself if every value is in range.

        Raises:
            UsageError: naming the option.
        """
        if self.algorithm not in (*ALGORITHMS, "all"):
            raise UsageError(
                f"--algorithm {self.algorithm}: there are {', '.join(ALGORITHMS)}, and all"
            )
        if not 4 <= self.largest <= LARGEST_MESSAGE:
            raise UsageError(
                f"--largest must be between 4 and {LARGEST_MESSAGE} bytes, not {self.largest}"
            )
        if self.ranks is not None and self.ranks < 2:
            raise UsageError(f"--ranks must be at least 2, not {self.ranks}: it is between ranks")
        return self
