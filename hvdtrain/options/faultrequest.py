"""Parse the texts of `--on-bad-step`, `--restarts` and `--checkpoint-every`."""

import math
import re
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.options.texts import number, settings_of


@dataclass(frozen=True)
class BadStep:
    """A limit above which gradients make a step bad, and what follows.

    Attributes:
        skips: leave the step out; else the run stops.
        limit: the largest norm of the gradients that is not bad; infinite for none.
    """

    skips: bool
    limit: float = math.inf

    @property
    def is_limited(self) -> bool:
        """Return whether there is a limit."""
        return self.limit < math.inf


def parse_bad_step(text: str) -> BadStep:
    """Return what a value of `--on-bad-step` requests.

    Raises:
        UsageError: if it is none of stop, skip, stop:NORM and skip:NORM.
    """
    word, colon, part = str(text).partition(":")
    limit = number(part) if colon else math.inf
    if word not in ("stop", "skip") or not limit > 0:
        raise UsageError(
            f"--on-bad-step {text} is not known: use stop or skip, or stop:NORM or skip:NORM with "
            "the norm above which gradients are bad"
        )
    return BadStep(word == "skip", limit)


@dataclass(frozen=True)
class Restarts:
    """The number of restarts, and the fewest ranks; None for as many as before."""

    most: int
    fewest_ranks: int | None = None


def parse_restarts(value: int | str) -> Restarts:
    """Return what a value of `--restarts` requests.

    Raises:
        UsageError: if it is neither N nor N,min-ranks=M.
    """
    text = str(value)
    count = text.partition(",")[0]
    if not re.fullmatch(r"\d{1,6}", count):
        raise UsageError(
            f"--restarts {text} is not known: use N, or N,min-ranks=M for one rank fewer at each "
            "restart, down to M"
        )
    fewest = settings_of("--restarts", text, ("min-ranks",)).get("min-ranks")
    return Restarts(int(count), None if fewest is None else int(fewest))


def interval(text: str) -> tuple[float, str]:
    """Return the number and "epoch", "step" or "minute" in a value of `--checkpoint-every`.

    Raises:
        UsageError: if the text is not such an interval.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(epoch|step|minute)s?", text)
    number = float(match[1]) if match else 0.0
    if match is None or number == 0 or (match[2] != "minute" and number % 1):
        raise UsageError(
            f"--checkpoint-every {text!r} is not understood: "
            "give it as '2 epochs', '500 steps' or '10 minutes'"
        )
    return number, match[2]
