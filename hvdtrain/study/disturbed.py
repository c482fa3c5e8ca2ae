"""Runs that something else on the machine slowed down, places among their repeats."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np
from scipy import stats

FALSE_ALARMS = 0.01  # of the undisturbed runs
LEAST = 0.02  # a smaller loss of throughput is not called a disturbance
REPEATS_NEEDED = 3  # of two runs nobody can say which one is disturbed
# The first quartile of the differences of two values with unit normal noise.
QUARTILE = float(np.sqrt(2) * stats.norm.ppf(0.625))


def disturbed(rates: Mapping[int, Sequence[float]]) -> dict[int, list[int]]:
    """Return the places of runs whose throughput is lower than noise explains.

    Args:
        rates: throughputs of repeats by number of ranks. All have the same
            relative noise, which is estimated from the differences of any two repeats, so that
            disturbed runs hardly change it (as Q_n of Rousseeuw and Croux, JASA 88, 1993).

    Returns:
        Places by number of ranks; sizes without disturbed runs are left out.
    """
    logs = {key: np.log(values) for key, values in rates.items() if len(values) >= REPEATS_NEEDED}
    if not logs:
        return {}
    noise = _noise(logs.values())
    degrees = sum(len(values) - 1 for values in logs.values())
    # Each of the repeats is compared with the others: the limit holds for all of them together.
    limit = float(stats.t.isf(FALSE_ALARMS, degrees))
    places: dict[int, list[int]] = {}
    for key, values in logs.items():
        for place, value in enumerate(values):
            others = np.delete(values, place)
            spread = noise * np.sqrt(1 + np.pi / 2 / len(others))
            loss = float(np.median(others)) - value
            if loss > max(limit * spread, LEAST):
                places.setdefault(key, []).append(place)
    return places


def _noise(groups: Iterable[np.ndarray]) -> float:
    differences = [abs(one - other) for values in groups for one, other in combinations(values, 2)]
    return float(np.quantile(differences, 0.25)) / QUARTILE
