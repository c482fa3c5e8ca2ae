"""Options of `hvdtrain reproduce paper-b` as a dataclass, like the configuration of a run."""

from dataclasses import dataclass, field

from hvdtrain.errors import UsageError
from hvdtrain.models import check_name
from hvdtrain.options.fields import about, flag

MOST_RANKS = 64
MOST_PIXELS = 1024
NO_MODEL = "none"  # only predictions


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
            "models to train, or none; NAME@PIXELS has larger images, such as resnet50@224: "
            "synthetic ones if those of the data set are too small, without accuracy",
            metavar="NAME,...",
        ),
    )
    ranks: int = field(default=2, metadata=about("ranks of all strategies but single"))
    batch_size: int = field(default=64, metadata=about("images per step, on all ranks together"))
    repeats: int = field(default=5, metadata=about("timed runs per strategy and model"))
    steps: int = field(default=12, metadata=about("steps of a timed run"))
    epochs: int = field(
        default=1, metadata=about("epochs of the runs for accuracy; 0 leaves them out")
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
    def trained(self) -> list[ModelAtSize]:
        """Return the models to train."""
        return [_model(word) for word in self.models.split(",") if word != NO_MODEL]

    def check(self) -> "PaperBOptions":
        """Return the options themselves if every value is in range.

        Raises:
            UsageError: naming the option.
        """
        models = self.trained
        if len(set(models)) < len(models):
            raise UsageError(f"--models {self.models} names a model twice: name it once")
        least = {"repeats": 1, "steps": 3, "seeds": 1}
        least |= dict.fromkeys(("epochs", "emulated_steps", "event_steps"), 0)
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise UsageError(
                    f"{flag(name)} must be at least {smallest}, not {getattr(self, name)}"
                )
        if not 2 <= self.ranks <= MOST_RANKS:
            raise UsageError(
                f"--ranks must be between 2 and {MOST_RANKS}, not {self.ranks}: one rank is the "
                "baseline"
            )
        if self.batch_size < self.ranks:
            raise UsageError(
                f"--batch-size must be at least --ranks, {self.ranks}, not {self.batch_size}"
            )
        return self


def _model(word: str) -> ModelAtSize:
    name, at, pixels = word.partition("@")
    check_name(name)
    if not at:
        return ModelAtSize(name, None)
    if not (pixels.isascii() and pixels.isdigit() and 1 <= int(pixels[:5]) <= MOST_PIXELS):
        raise UsageError(
            f"--models {word} is not valid: use NAME@PIXELS, with 1 to {MOST_PIXELS} pixels"
        )
    return ModelAtSize(name, int(pixels))
