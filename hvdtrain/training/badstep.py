"""What is said of a bad step, from what all ranks saw when they ran it again."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Sighting(NamedTuple):
    """A component whose output was not finite; `place` is its number in the model."""

    place: int
    component: str
    rank: int
    has_bad_weights: bool


def in_words(
    seen: Sequence[Sighting], norms: Mapping[str, float], places: Mapping[str, int]
) -> str:
    """The first bad component: in forward the first in the model, in backward the last.

    Args:
        norms: of the gradients of each component. places: their numbers in the model.
    """
    if seen:
        first = min(seen)
        why = "nor are its weights" if first.has_bad_weights else "input and weights are"
        return f"the output of {first.component} is the first that is not finite ({why})"
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if bad:
        last = max(bad, key=lambda name: places[name])
        return f"all outputs are finite, and the gradient of {last} is the first that is not"
    largest = max(norms, key=lambda name: norms[name])
    return (
        f"run again, the norm of all gradients is {math.hypot(*norms.values()):.3g}, the largest "
        f"part of it {norms[largest]:.3g} in {largest}"
    )
