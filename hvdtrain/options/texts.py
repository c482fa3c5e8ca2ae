"""The parts of an option's text: `METHOD:NUMBER,name=value`."""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from hvdtrain.errors import UsageError

AVERAGE = "average-optimizer"
WHOLE = ("a whole number above 0", lambda value: value >= 1 and value % 1 == 0)
# What may follow after a comma: the words of its range, and the range itself.
_RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("above 0", lambda value: 0 < value < math.inf),
    "momentum": ("0 or more and below 1", lambda value: 0 <= value < 1),
    "rate": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "servers": WHOLE,
    "min-ranks": WHOLE,
    "after": ("a whole number", lambda value: value % 1 == 0),
}


def number(text: str) -> float:
    """Return the number that a text is, from 0 to infinity; NaN for another text."""
    is_number = re.fullmatch(r"\d{1,12}(?:\.\d{1,20})?(?:e[-+]?\d{1,3})?", text)
    return float(text) if is_number else math.nan


def settings_of(option: str, text: str, allowed: Sequence[str]) -> dict[str, float]:
    """Return what follows the method in `METHOD,name=value,...`.

    Raises:
        UsageError: for a name that the method does not have, or a value out of its range.
    """
    chosen: dict[str, float] = {}
    for word in text.split(",")[1:]:
        name, _, value = word.partition("=")
        if name not in allowed or name in chosen or (name == AVERAGE) != (word == AVERAGE):
            forms = " and ".join(item if item == AVERAGE else f"{item}=X" for item in allowed)
            raise UsageError(
                f"{option} {text} is not known: {word!r} is none of what it takes after a comma, "
                f"{forms or 'which is nothing'}"
            )
        chosen[name] = 1.0 if name == AVERAGE else number(value)
        if name != AVERAGE and not _RANGES[name][1](chosen[name]):
            raise UsageError(f"{option} {text}: {name} must be {_RANGES[name][0]}, not {value!r}")
    return chosen
