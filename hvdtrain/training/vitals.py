"""Evaluation of the ranks' vitals of a step."""

import numpy as np
from numpy.typing import NDArray

from hvdtrain.training.control import Vitals

SECONDS, OWN, DATA = (Vitals._fields.index(f"{name}seconds") for name in ("", "own_", "data_"))


def own_seconds(vitals: NDArray[np.float64]) -> tuple[tuple[float, ...], float]:
    """Return each rank's own seconds without the wait for data, and the seconds of the step.

    Args:
        vitals: [ranks, fields of Vitals], fp64.
    """
    seconds = np.maximum(vitals[:, OWN] - vitals[:, DATA], 0.0)
    return tuple(seconds.tolist()), float(vitals[:, SECONDS].max())
