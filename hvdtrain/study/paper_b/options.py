"""Options of `hvdtrain reproduce paper-b` as a dataclass, like the configuration of a run."""

import os
from dataclasses import dataclass, field

from hvdtrain.errors import UsageError
from hvdtrain.models import check_name
from hvdtrain.options.fields import about, flag

MOST_RANKS = 64
MOST_PIXELS = 1024
NO_MODEL = "none"  # only predictions
USUAL_RANKS = (2, 4, 8)
MOST_OF_TIMED = 3  # timed runs of a large model per strategy
LEAST_STEPS = 3  # the first one is slower than the others


@dataclass(frozen=True)
class ModelAtSize:
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
            "models to train for time, memory and accuracy, or none; NAME@PIXELS has larger "
            "images, such as resnet50@224: synthetic ones if those of the data set are too small, "
            "without accuracy",
            metavar="NAME,...",
        ),
    )
    timed_models: str = field(
        default="resnet50,vit_b16,resnet50@224,vit_b16@224",
        metadata=about(
            "models to train for time and memory only, by the strategies of table I, or none",
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
    accuracy_pixels: int | None = field(
        default=None,
        metadata=about(
            "image size of the runs for accuracy: the centre of larger images",
            default="that of --models",
        ),
    )
    emulated_steps: int = field(
        default=12, metadata=about("steps of a run on emulated V100; 0 leaves them out")
    )
    event_steps: int = field(
        default=96,
        metadata=about("steps of such a run while devices or links change; 0 leaves them out"),
    )
    seeds: int = field(default=3, metadata=about("runs for accuracy per strategy and model"))

    @property
    def with_accuracy(self) -> list[ModelAtSize]:
        """Return the models to train for accuracy, too."""
        return _models("--models", self.models)

    @property
    def trained(self) -> list[ModelAtSize]:
        """Return all models to train."""
        timed = _models("--timed-models", self.timed_models)
        return self.with_accuracy + [one for one in timed if one not in self.with_accuracy]

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
            usual = [number for number in USUAL_RANKS if number <= devices()]
            return usual or [USUAL_RANKS[0]]
        numbers = []
        for word in self.ranks.split(","):
            if not (word.isascii() and word.isdigit() and 2 <= int(word[:9]) <= MOST_RANKS):
                raise UsageError(
                    f"--ranks {self.ranks} is not valid: give numbers between 2 and {MOST_RANKS} "
                    "with commas; one rank is the baseline"
                )
            numbers.append(int(word))
        return sorted(set(numbers))

    def check(self) -> "PaperBOptions":
        """Return the options themselves if every value is in range.

        Raises:
            UsageError: naming the option.
        """
        models = self.trained
        twice = [model.key for model in models if models.count(model) > 1]
        if twice:
            raise UsageError(
                f"--models or --timed-models name {twice[0]} twice: name each model once"
            )
        least = {"repeats": 1, "steps": LEAST_STEPS, "seeds": 1}
        least |= dict.fromkeys(("epochs", "emulated_steps", "event_steps"), 0)
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise UsageError(
                    f"{flag(name)} must be at least {smallest}, not {getattr(self, name)}"
                )
        pixels = self.accuracy_pixels
        if pixels is not None and not 1 <= pixels <= MOST_PIXELS:
            raise UsageError(f"--accuracy-pixels must be 1 to {MOST_PIXELS}, not {pixels}")
        most = self.numbers_of_ranks[-1]
        if self.batch_size < most:
            raise UsageError(
                f"--batch-size must be at least --ranks, {most}, not {self.batch_size}"
            )
        return self


def on_gpus() -> bool:
    """Return whether the runs train on GPUs."""
    from torch import cuda

    return cuda.is_available()


def devices() -> int:
    """Return the number of GPUs, or without one that of the cores that this process may use."""
    from torch import cuda

    return cuda.device_count() or len(os.sched_getaffinity(0))


def _models(flag: str, words: str) -> list[ModelAtSize]:
    return [_model(flag, word) for word in words.split(",") if word != NO_MODEL]


def _model(flag: str, word: str) -> ModelAtSize:
    name, at, pixels = word.partition("@")
    check_name(name)
    if not at:
        return ModelAtSize(name, None)
    if not (pixels.isascii() and pixels.isdigit() and 1 <= int(pixels[:5]) <= MOST_PIXELS):
        raise UsageError(
            f"{flag} {word} is not valid: use NAME@PIXELS, with 1 to {MOST_PIXELS} pixels"
        )
    return ModelAtSize(name, int(pixels))
