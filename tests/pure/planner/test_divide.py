"""The division of components over ranks, against trying all divisions."""

import itertools
import random

import numpy as np
import pytest

from hvdtrain.planner.divide import UNFIT, Limit, Run, Times, divide


def instance(seed: int) -> tuple[int, int, int, dict[tuple[int, int], Times]]:
    """Return a small random problem with unequal ranks."""
    draw = random.Random(seed)
    n, ranks = draw.randint(1, 6), draw.randint(1, 5)
    work = [draw.choice([0.0, 1.0, draw.random(), 5 * draw.random()]) for _ in range(n)]
    size = [draw.random() for _ in range(n)]
    speed = [draw.choice([1.0, 1.0, 0.5 + draw.random()]) for _ in range(ranks)]
    fixed = 0.3 * draw.random()
    microbatches = draw.choice([1, 2, 4, 9])
    tables = {}
    for first in range(ranks):
        for count in range(1, ranks - first + 1):
            shape = (n + 1, n + 1)
            passing, pace = np.full(shape, UNFIT), np.full(shape, UNFIT)
            held, flight = np.zeros(shape), np.zeros(shape)
            for start, stop in itertools.combinations(range(n + 1), 2):
                together = sum(speed[first : first + count])
                passing[start, stop] = sum(work[start:stop]) / together + fixed
                rest = (count > 1) * sum(size[start:stop]) * draw.random()
                pace[start, stop] = (microbatches - 1) * passing[start, stop] + rest
                held[start, stop] = 4 * sum(size[start:stop])
                flight[start, stop] = sum(work[start:stop]) / count
            tables[first, count] = Times(passing, pace, held, flight)
    return n, ranks, microbatches, tables


def compositions(total: int, parts: int) -> "list[tuple[int, ...]]":
    """Return all ways to write a number as a sum of `parts` numbers above 0."""
    return [
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))
        for cuts in itertools.combinations(range(1, total), parts - 1)
    ]


def smallest_estimate(
    n: int, ranks: int, microbatches: int, tables: "dict[tuple[int, int], Times]", limit: float
) -> float:
    """Return the smallest estimate of all divisions that fit."""
    best = UNFIT
    for stages in range(1, min(n, ranks) + 1):
        for sizes, counts in itertools.product(
            compositions(n, stages), compositions(ranks, stages)
        ):
            total = pace = 0.0
            start = first = 0
            for number, (size, count) in enumerate(zip(sizes, counts, strict=True)):
                times, place = tables[first, count], (start, start + size)
                in_flight = min(microbatches, stages - number)
                if times.bytes[place] + in_flight * times.flight_bytes[place] > limit:
                    break
                total += times.passing[place]
                pace = max(pace, times.pace[place])
                start, first = start + size, first + count
            else:
                best = min(best, total + pace)
    return best


@pytest.mark.proves(
    "The division of components over ranks is exact against brute force, and no plan is "
    "shorter than the printed bound."
)
@pytest.mark.parametrize("seed", range(150))
def test_the_best_of_all_divisions_is_found(seed: int) -> None:
    n, ranks, microbatches, tables = instance(seed)
    wanted = smallest_estimate(n, ranks, microbatches, tables, UNFIT)
    division = divide(n, ranks, lambda first, count: tables[first, count])
    assert division is not None
    assert division.seconds == pytest.approx(wanted, rel=1e-12)
    covered = [component for run in division.runs for component in range(run.start, run.stop)]
    assert covered == list(range(n))
    held = [rank for run in division.runs for rank in range(run.first, run.first + run.number)]
    assert held == list(range(ranks))


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.parametrize("alike", [False, True])
def test_the_best_of_those_that_fit_is_found(seed: int, alike: bool) -> None:
    n, ranks, microbatches, tables = instance(seed)
    if alike:  # as if all ranks were equal, or all but the first
        first = seed % 2 if ranks > 1 else 0
        one = {count: tables[first, count] for count in range(1, ranks - first + 1)}
        tables = {key: times if key[0] < first else one[key[1]] for key, times in tables.items()}
    whole = float(tables[0, ranks].bytes[0, n])
    limit = random.Random(seed).choice([0.2, 0.5, 0.8, 1.2]) * whole
    wanted = smallest_estimate(n, ranks, microbatches, tables, limit)
    memory = Limit(limit, lambda stages: min(stages, microbatches))
    division = divide(n, ranks, lambda first, count: tables[first, count], memory)
    if wanted == UNFIT:
        assert division is None
    else:
        assert division is not None
        assert division.seconds == pytest.approx(wanted, rel=1e-12)


def test_runs_say_what_is_where() -> None:
    n, ranks, _, tables = instance(4)
    division = divide(n, ranks, lambda first, count: tables[first, count])
    assert division is not None
    assert division.runs[0][:1] == (0,)
    assert isinstance(division.runs[0], Run)


def test_two_hundred_components_on_sixteen_ranks_are_divided() -> None:
    """The estimate is that of the runs, and not worse than that of even divisions."""
    n, ranks, microbatches = 200, 16, 32
    draw = np.random.default_rng(0)
    work = draw.random(n)
    sums = np.concatenate([[0.0], np.cumsum(work)])
    length = sums[None, :] - sums[:, None]
    valid = np.arange(n + 1)[:, None] < np.arange(n + 1)[None, :]

    def times_of(first: int, count: int) -> Times:
        passing = np.where(valid, length / count + 0.01, UNFIT)
        rest = np.where(valid, (count > 1) * length, UNFIT)
        return Times(passing, (microbatches - 1) * passing + rest, length, length)

    division = divide(n, ranks, times_of)
    assert division is not None

    def estimate(runs: "list[Run]") -> float:
        passing = [length[r.start, r.stop] / r.number + 0.01 for r in runs]
        rest = [(r.number > 1) * length[r.start, r.stop] for r in runs]
        paces = [(microbatches - 1) * w + y for w, y in zip(passing, rest, strict=True)]
        return float(sum(passing) + max(paces))

    assert division.seconds == pytest.approx(estimate(list(division.runs)))
    for stages in (1, 2, 4, 8, 16):
        edges = np.linspace(0, n, stages + 1).astype(int)
        count = ranks // stages
        even = [
            Run(int(a), int(b), number * count, count)
            for number, (a, b) in enumerate(itertools.pairwise(edges))
        ]
        assert division.seconds <= estimate(even) + 1e-9
