"""Parse the texts of `--on-bad-step`, `--restarts` and `--checkpoint-every`."""

import math
import re
from dataclasses import dataclass

from hvdtrain.errors import UsageError


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
    word, colon, number = str(text).partition(":")
    limit = _number(number) if colon else math.inf
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
    match = re.fullmatch(r"(\d{1,6})(?:,min-ranks=(\d{1,6}))?", str(value))
    if match is None or (match[2] is not None and not (int(match[1]) and int(match[2]))):
        raise UsageError(
            f"--restarts {value} is not known: use N, or N,min-ranks=M for one rank fewer at each "
            "restart, down to M"
        )
    return Restarts(int(match[1]), int(match[2]) if match[2] else None)


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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
