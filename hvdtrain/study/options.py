"""Options of `report` and `reproduce paper-b` as dataclasses, like a run's configuration."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.host.process import usable_cores
from hvdtrain.models import check_name
from hvdtrain.options.sections import about, flag


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The optional parts of a report.

    Raises:
        UsageError: from `check`, if a value is out of range.
    """

    efficiency: float = field(
        default=0.75, metadata=about("efficiency to reach, 0 to 1", metavar="X")
    )
    to_accuracy: float | None = field(
        default=None,
        metadata=about(
            "also the time until this test accuracy, 0 to 1",
            metavar="X",
            default="what all runs expect, if they do",
        ),
    )
    compare: str | None = field(
        default=None,
        metadata=about(
            "runs of another cluster, version or setting: ratios to them by size", metavar="BASE"
        ),
    )

    def check(self) -> "ReportOptions":
        """Return the options themselves if every value is in range."""
        for name in ("efficiency", "to_accuracy"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UsageError(f"{flag(name)} must be above 0 and at most 1, not {value}")
        return self


MOST_RANKS = 64
MOST_PIXELS = 1024
NO_MODEL = "none"  # only predictions
USUAL_RANKS = (2, 4, 8)
MOST_OF_TIMED = 3  # timed runs of a large model per strategy
LEAST_STEPS = 3  # the first one is slower than the others


class ModelAtSize(NamedTuple):
    """A model, and the height and width of its images in pixels; None for the packed size."""

    name: str
    pixels: int | None

    @property
    def key(self) -> str:
        """Return the name in files and tables."""
        name = self.name.replace(":", "-")
        return name if self.pixels is None else f"{name}@{self.pixels}"


@dataclass(frozen=True, kw_only=True)
class PaperBOptions:
    """Options of `reproduce paper-b`."""

    data: str = field(metadata=about("packed CIFAR-100", metavar="DIR"))
    to: str = field(metadata=about("folder for runs and report", metavar="DIR"))
    models: str = field(
        default="resnet18,vit_tiny",
        metadata=about(
            "models to train for time, memory and accuracy, or none; NAME@PIXELS has images of "
            "another size: the centres of larger ones, such as resnet18@16, or synthetic ones, "
            "such as resnet50@224, without accuracy",
            metavar="NAME,...",
        ),
    )
    timed_models: str = field(
        default="resnet50,vit_b16,resnet50@224,vit_b16@224",
        metadata=about(
            "models to train for time and memory only, or none",
            metavar="NAME,...",
        ),
    )
    ranks: str | None = field(
        default=None,
        metadata=about(
            "numbers of ranks of all strategies but single",
            metavar="N,...",
            default="2, 4 and 8, as far as there are cores or GPUs",
        ),
    )
    batch_size: int = field(
        default=64,
        metadata=about(
            "images per step, on all ranks together; large models have fewer in timed runs"
        ),
    )
    repeats: int = field(
        default=5, metadata=about("timed runs per strategy and model; at most 3 of --timed-models")
    )
    steps: int = field(
        default=8, metadata=about("steps of a timed run; half as many for --timed-models")
    )
    epochs: int = field(
        default=1, metadata=about("epochs of the runs for accuracy; 0 leaves them out")
    )
    seeds: int = field(default=3, metadata=about("runs for accuracy per strategy and model"))
    event_steps: int = field(
        default=96,
        metadata=about(
            "steps of a run on emulated V100 while devices or links change; 0 leaves them out"
        ),
    )

    @property
    def with_accuracy(self) -> list[ModelAtSize]:
        """Return the models to train for accuracy, too."""
        return _models("--models", self.models)

    @property
    def trained(self) -> list[ModelAtSize]:
        """Return all models to train."""
        timed = _models("--timed-models", self.timed_models)
        return list(dict.fromkeys([*self.with_accuracy, *timed]))

    def repeats_of(self, model: ModelAtSize) -> int:
        """Return the timed runs of a model per strategy."""
        is_main = model in self.with_accuracy
        return self.repeats if is_main else min(self.repeats, MOST_OF_TIMED)

    def steps_of(self, model: ModelAtSize) -> int:
        """Return the steps of a timed run of a model."""
        return self.steps if model in self.with_accuracy else max(LEAST_STEPS, self.steps // 2)

    @property
    def numbers_of_ranks(self) -> list[int]:
        """Return the numbers of ranks, ascending."""
        if self.ranks is None:
            return [number for number in USUAL_RANKS if number <= max(devices(), USUAL_RANKS[0])]
        words = self.ranks.split(",")
        if not all(re.fullmatch("[0-9]{1,9}", n) and 2 <= int(n) <= MOST_RANKS for n in words):
            raise UsageError(
                f"--ranks {self.ranks} is not valid: give numbers between 2 and {MOST_RANKS} "
                "with commas; one rank is the baseline"
            )
        return sorted(set(map(int, words)))

    def check(self) -> "PaperBOptions":
        """Return the options themselves if every value is in range.

        Raises:
            UsageError: naming the option.
        """
        _ = self.trained
        least = {"repeats": 1, "steps": LEAST_STEPS, "epochs": 0, "seeds": 1, "event_steps": 0}
        for name, smallest in least.items():
            if (value := getattr(self, name)) < smallest:
                raise UsageError(f"{flag(name)} must be at least {smallest}, not {value}")
        most = self.numbers_of_ranks[-1]
        if self.batch_size < most:
            raise UsageError(
                f"--batch-size must be at least --ranks, {most}, not {self.batch_size}"
            )
        return self


def devices() -> int:
    """Return the number of GPUs, or without one that of the cores that this process may use."""
    from torch import cuda

    return cuda.device_count() or len(usable_cores())


def _models(option: str, words: str) -> list[ModelAtSize]:
    models = []
    for word in words.split(","):
        name, at, pixels = word.partition("@")
        if word == NO_MODEL:
            continue
        check_name(name)
        if at and not (re.fullmatch("[0-9]{1,4}", pixels) and 1 <= int(pixels) <= MOST_PIXELS):
            raise UsageError(
                f"{option} {word} is not valid: use NAME@PIXELS, with 1 to {MOST_PIXELS} pixels"
            )
        models.append(ModelAtSize(name, int(pixels) if at else None))
    return models
