"""The message about a bad step, from what all ranks saw when they repeated it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Sighting(NamedTuple):
    """A component whose output was not finite; `place` is its position in the model."""

    place: int
    component: str
    rank: int
    has_bad_weights: bool


def as_words(
    seen: Sequence[Sighting], norms: Mapping[str, float], places: Mapping[str, int]
) -> str:
    """Return which component went wrong first.

    The forward pass goes wrong first in the first bad component of the model, the backward pass
    in the last.

    Args:
        seen: the components whose output was not finite.
        norms: norm of the gradients, by component.
        places: position in the model, by component.
    """
    if seen:
        first = min(seen)
        why = (
            "its weights are not finite either"
            if first.has_bad_weights
            else "its input and weights are finite"
        )
        return f"{first.component} is the first component whose output is not finite ({why})"
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if bad:
        last = max(bad, key=lambda name: places[name])
        return f"all outputs are finite, but the gradient of {last}, the first in backward, is not"
    largest = max(norms, key=lambda name: norms[name])
    return (
        f"in a repetition the norm of all gradients is {math.hypot(*norms.values()):.3g}, "
        f"and {largest} has the largest ({norms[largest]:.3g})"
    )
