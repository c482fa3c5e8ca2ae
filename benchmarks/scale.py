"""Measures on one core what grows with the number of ranks or samples, by the real code.

    python benchmarks/scale.py [--ranks 1024] [--samples 14200000] [--step 0.1] [--rounds 3]

Each round is a process of its own. Each line is one call as every rank, or rank 0 alone, makes it
in a job of this size: once at the start, once per epoch, per window of 20 steps, or per step. The
goal is 10 s at most at the start or per epoch, and 1 % of the steps that a line belongs to. What
waits for other ranks or for a disk cannot be measured on one host and is not here.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np
from comparison import add_row

from hvdtrain.data import order
from hvdtrain.engine.progress import HEADER, Agreed, Vitals
from hvdtrain.health.stragglers import Stragglers, as_lists, groups_of_equal_work
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import pipeline, replicated
from hvdtrain.plan.validate import prove

WINDOW = 20  # steps between two lines of the log
STAGES, MICROBATCHES = 8, 8
CHUNK_ROWS, WINDOW_ROWS = 16, 1_783  # of images of 224 x 224
COLUMNS = ["", "once per", "time on one core", "goal", ""]
COMPONENTS = [f"part{number}" for number in range(64)]


@dataclass(frozen=True)
class Line:
    """A call and how often it is made: "start", "epoch", "window" or "step"."""

    name: str
    often: str
    call: Callable[[], Any]


def main() -> None:
    """Print a row per line: seconds, the most that it may take, and the verdict."""
    options = _options()
    most = {
        "start": 10.0,
        "epoch": 10.0,
        "window": 0.01 * WINDOW * options.step,
        "step": 0.01 * options.step,
    }
    print(f"{options.ranks:,} ranks, {options.samples:,} samples, steps of {options.step:g} s")
    measured: dict[tuple[str, str], list[float]] = {}
    peaks = []
    for _ in range(options.rounds):
        with get_context("spawn").Pool(1) as pool:
            seconds, peak = pool.apply(_round, (options.ranks, options.samples))
        peaks.append(peak)
        for line, value in seconds.items():
            measured.setdefault(line, []).append(value)
    for (name, often), values in measured.items():
        verdict = "met" if median(values) <= most[often] else "missed"
        row = [name, often, _figure(values), f"{1e3 * most[often]:,.0f} ms", verdict]
        print("  ".join(f"{cell:>32}" for cell in row))
        add_row(COLUMNS, row, options.rounds, values)
    print(f"peak memory of a process: {median(peaks):,.0f} MiB")


def _round(ranks: int, samples: int) -> tuple[dict[tuple[str, str], float], float]:
    """Return the seconds of each line, and the peak memory of this process in MiB."""
    seconds = {(line.name, line.often): _seconds(line) for line in lines(ranks, samples)}
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _figure(values: list[float]) -> str:
    low, middle, high = (1e3 * value for value in (min(values), median(values), max(values)))
    form = ",.0f" if middle >= 10 else ".2g"
    return f"{middle:{form}} ms ({low:{form}} to {high:{form}})"


def lines(ranks: int, samples: int) -> list[Line]:
    """Return what is measured."""
    hybrid = pipeline(
        COMPONENTS, [1.0] * 64, ranks, STAGES, ranks // STAGES, MICROBATCHES, None, "hybrid"
    )
    data_parallel = replicated(COMPONENTS, ranks, None, None)
    rows = np.arange(samples, dtype=np.int64)
    vitals = np.random.default_rng(0).uniform(0.09, 0.11, (WINDOW, ranks, len(Vitals._fields)))
    total = np.concatenate((np.zeros(HEADER), vitals[0].ravel()))
    batch = 32 * ranks
    start = [
        Line("cut a batch, pipelines", "start", partial(cut, hybrid, batch)),
        Line("cut a batch, data parallel", "start", partial(cut, data_parallel, batch)),
        Line("prove the schedule, pipelines", "start", partial(prove, hybrid, batch, True)),
        Line(
            "prove the schedule, data parallel",
            "start",
            partial(prove, data_parallel, batch, True),
        ),
        Line("group ranks of equal work", "start", partial(groups_of_equal_work, hybrid, ranks)),
        Line("hold nothing out", "start", partial(order.holdout, samples, 0.0, "hash", 0)),
        Line("hold out 5 %", "start", partial(order.holdout, samples, 0.05, "hash", 0)),
    ]
    epoch = [
        Line(
            "order of an epoch",
            "epoch",
            partial(order.epoch_order, rows, "hash", 0, 1, CHUNK_ROWS, WINDOW_ROWS),
        ),
        Line("batches of an epoch", "epoch", partial(order.step_slices, samples, batch)),
    ]
    watch = Stragglers(groups_of_equal_work(data_parallel, ranks))
    window = [
        Line("look for stragglers", "window", partial(watch.look, vitals)),
        Line("line of the log", "window", lambda: json.dumps(as_lists(vitals))),
    ]
    step = [
        Line("make the control vector", "step", partial(_control_vector, ranks)),
        Line("read the agreement", "step", partial(Agreed.of, total, 0.0)),
        Line("rows of a rank", "step", partial(order.split, batch, [1] * ranks)),
    ]
    return start + epoch + window + step


def _control_vector(ranks: int) -> np.ndarray:
    vector = np.zeros(HEADER + ranks * len(Vitals._fields))
    vector[HEADER : HEADER + len(Vitals._fields)] = Vitals(0.1, 0.09)
    return vector


def _seconds(line: Line) -> float:
    """Return the median seconds of a few calls; long ones and those of the start once."""
    times: list[float] = []
    most = 1 if line.often == "start" else 15  # what is kept for a second call was not there
    while not times or (len(times) < most and sum(times) < 1):
        started = time.perf_counter()
        line.call()
        times.append(time.perf_counter() - started)
    return median(times)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=14_200_000)
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a step")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
