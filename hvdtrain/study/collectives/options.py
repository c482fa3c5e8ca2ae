"""Options of `hvdtrain reproduce collectives` as a dataclass, like the configuration of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.errors import UsageError
from hvdtrain.host.launchers import ALGORITHMS
from hvdtrain.models import MODEL_NAMES
from hvdtrain.options.fields import about

LEAST_BYTES, LARGEST_MESSAGE = 1024, 2**30
MOST_RANKS = 64
NO_MODEL = "none"
DEFAULT_STEPS, STEPS_OF_CNN = 16, 60


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of `reproduce collectives`."""

    to: str = field(metadata=about("folder for measurements and report", metavar="DIR"))
    data: str | None = field(
        default=None,
        metadata=about(
            "packed data set of the training runs", metavar="DIR", default="random images"
        ),
    )
    ranks: str = field(
        default="2,3,4", metadata=about("sizes of the groups of ranks", metavar="N,...")
    )
    repeats: int = field(default=3, metadata=about("jobs per measurement"))
    largest: int = field(
        default=16 * 2**20,
        metadata=about("bytes of the largest all-reduce; the smallest has 1024"),
    )
    algorithms: str = field(
        default=",".join(ALGORITHMS), metadata=about("algorithms to compare", metavar="NAME,...")
    )
    models: str = field(
        default="cnn",
        metadata=about(
            "models whose training step is measured and predicted, or none", metavar="NAME,..."
        ),
    )
    steps: int | None = field(
        default=None,
        metadata=about("steps of a training run", default="60 for cnn, 16 for other models"),
    )

    @property
    def groups(self) -> list[int]:
        """Return the numbers of ranks, ascending."""
        return sorted({int(word) for word in self.ranks.split(",")})

    @property
    def algorithm_names(self) -> list[str]:
        """Return the algorithms in the order of `--allreduce`."""
        return [name for name in ALGORITHMS if name in self.algorithms.split(",")]

    @property
    def model_names(self) -> list[str]:
        """Return the models."""
        return [name for name in self.models.split(",") if name != NO_MODEL]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of the all-reduces in bytes, ascending."""
        return doublings(self.largest)

    def steps_of(self, model: str) -> int:
        """Return the number of steps of a training run."""
        return self.steps or (STEPS_OF_CNN if model == "cnn" else DEFAULT_STEPS)

    def check(self) -> "StudyOptions":
        """Return the options themselves if every value is in range.

        Raises:
            UsageError: naming the option.
        """
        words = self.ranks.split(",")
        if not all(word.isascii() and word.isdigit() and len(word) < 4 for word in words):
            raise UsageError(f"--ranks {self.ranks} is not a list of numbers: use such as 2,4")
        if not 2 <= min(self.groups) <= max(self.groups) <= MOST_RANKS:
            raise UsageError(
                f"--ranks must be between 2 and {MOST_RANKS}, not {self.ranks}: one rank sums "
                "nothing"
            )
        for name, value in (("repeats", self.repeats), ("steps", self.steps)):
            if value is not None and value < 1:
                raise UsageError(f"--{name} must be at least 1, not {value}")
        if not 2 * LEAST_BYTES <= self.largest <= LARGEST_MESSAGE:  # a line needs two sizes
            raise UsageError(
                f"--largest must be between {2 * LEAST_BYTES} and {LARGEST_MESSAGE} bytes, not "
                f"{self.largest}"
            )
        _check_names("--algorithms", self.algorithms, tuple(ALGORITHMS))
        _check_names("--models", self.models, (*MODEL_NAMES, NO_MODEL))
        return self


def _check_names(option: str, text: str, known: Sequence[str]) -> None:
    for name in text.split(","):
        if name not in known:
            raise UsageError(f"{option} {name or repr(name)} is unknown: use {', '.join(known)}")


def doublings(largest: int) -> tuple[int, ...]:
    """Return the sizes up to `largest` in bytes, each twice the one before."""
    sizes = [LEAST_BYTES]
    while 2 * sizes[-1] <= largest:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)
