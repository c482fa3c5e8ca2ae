"""What the vitals of a step say of the ranks."""

import numpy as np
from numpy.typing import NDArray

from hvdtrain.training.control import Vitals

SECONDS, OWN, DATA = (Vitals._fields.index(f"{name}seconds") for name in ("", "own_", "data_"))


def own_seconds(vitals: NDArray[np.float64]) -> tuple[tuple[float, ...], float]:
    """Each rank's own seconds without the wait for its data, and those of the step.

    Args:
        vitals: [ranks, Vitals], fp64.
    """
    own = np.maximum(vitals[:, OWN] - vitals[:, DATA], 0.0)
    return tuple(own.tolist()), float(vitals[:, SECONDS].max())
