"""Moves the boundaries of a division one at a time, as long as its estimate falls."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.planner.divide import UNFIT, Run
from hvdtrain.planner.tables import Tables

MOST_ROUNDS = 20


def refined(tables: Tables, runs: Sequence[Run], limit: float | None) -> tuple[Run, ...]:
    """Return a division over the same ranks that moving one boundary cannot improve.

    Args:
        tables: tables with all places.
        limit: bytes that a rank may hold.
    """
    cuts = [runs[0].start, *(run.stop for run in runs)]
    stages = [_stage(tables, number, runs, limit) for number in range(len(runs))]
    for _ in range(MOST_ROUNDS):
        before = list(cuts)
        for place in range(1, len(cuts) - 1):
            cuts[place] = _best_place(stages, cuts, place)
        if cuts == before:
            break
    return tuple(
        run._replace(start=start, stop=stop)
        for run, start, stop in zip(runs, cuts, cuts[1:], strict=False)
    )


class _Stage(NamedTuple):
    """Seconds of every run of components on the ranks of one stage: fp64 [start, stop]."""

    whole: np.ndarray
    pace: np.ndarray


def _stage(tables: Tables, number: int, runs: Sequence[Run], limit: float | None) -> _Stage:
    times = tables.times_of(runs[number].first, runs[number].number)
    pace = times.paces(tables.microbatches)
    if limit is not None:
        in_flight = min(tables.microbatches, len(runs) - number)
        pace = np.where(times.fits(limit, in_flight), pace, UNFIT)
    return _Stage(times.passing + times.arriving, pace)


def _best_place(stages: Sequence[_Stage], cuts: Sequence[int], place: int) -> int:
    """Return the best place of one boundary if all others stay."""
    before, behind = stages[place - 1], stages[place]
    left, right = cuts[place - 1], cuts[place + 1]
    pace = np.maximum(before.pace[left, :], behind.pace[:, right])
    for number, stage in enumerate(stages):
        if number not in (place - 1, place):
            pace = np.maximum(pace, stage.pace[cuts[number], cuts[number + 1]])
    estimates = before.whole[left, :] + behind.whole[:, right] + pace
    best = int(np.argmin(estimates))
    return best if estimates[best] < estimates[cuts[place]] else cuts[place]
