"""Measures the algorithms of an all-reduce, and judges the trade-off that textbooks count.

    python benchmarks/collectives.py [--ranks 2] [--rounds 3] [--largest 16777216]
                                     [--algorithms NAME,...]

Few messages are fast for small sums, few bytes for large ones, and between them lies a crossover.
Messages and bytes are counted as by Thakur et al. ("Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005): those that follow one after another until the last rank
has the sum. A message of s bytes takes alpha + beta s seconds (Hockney, Parallel Computing 20(3),
1994), and each all-reduce has an overhead besides, such as Horovod's cycle; additions are part of
beta. The three numbers are fitted to all algorithms of a library together.

A job per algorithm and round, in random order, sums fp32 of each size by MPI's non-blocking
all-reduce (--reduce-with mpi) and by Horovod. An all-reduce lasts from the end of a barrier until
the last rank has the sum. All ranks are on this machine, so `hierarchical` has one level and is
not judged. The intervals are for 95 %.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import common
import numpy as np
from scipy import optimize

from hvdtrain import world
from hvdtrain.host import counters
from hvdtrain.host.launchers import ALGORITHMS, has_horovod
from hvdtrain.host.process import wait_until
from hvdtrain.launch import mpirun
from hvdtrain.study.laws import Estimate, markdown_table, number, ratio

PROVES = (
    "`benchmarks/collectives.py` measures each all-reduce; its counts, fits, crossovers "
    "and verdicts are those of curves whose truth is known."
)

LIBRARIES = ("MPI", "Horovod")
LEAST_BYTES, LARGEST = 1024, 16 * 2**20
LEAST, MOST, SECONDS = 5, 40, 1.5  # repeats of all sizes in a job, and the seconds they may take
DIFFERENT = 0.05  # a smaller relative difference of two medians counts as none
FEWEST_SIZES = 2  # on each side of a crossover
NEAR = 2.0  # a crossover within this factor of its prediction confirms it
HOLDS, FAILS, NOISE = "holds", "does not hold", "within the noise"
ONE_ROUND = "one round: undecided"
NO_PREDICTION = "the fit has no cost in which they differ: no prediction"
# The pairs whose trade-off is judged: fewer messages first, fewer bytes second.
PAIRS = (("tree", "ring"), ("recursive-doubling", "ring"), ("recursive-doubling", "rabenseifner"))

Seconds = Mapping[int, Sequence[float]]  # of the rounds, by bytes
Sums = Mapping[str, Seconds]  # by algorithm


class Network(NamedTuple):
    """Seconds that an all-reduce costs in any case, per message, and per byte of a message."""

    overhead: float
    alpha: float
    beta: float


class Counts(NamedTuple):
    """Messages of an all-reduce of n bytes on the longest path, and their bytes divided by n."""

    messages: int
    volume: float

    def seconds(self, network: Network, size: float) -> float:
        """Return the seconds for `size` bytes."""
        sending = self.messages * network.alpha + self.volume * network.beta * size
        return network.overhead + sending


class Crossing(NamedTuple):
    """The faster of two algorithms below and above a size in bytes.

    Without a size one of them is always faster; without names there is no difference.
    """

    below: str = ""
    above: str = ""
    size: float | None = None


def main() -> None:
    """Run the jobs and print times, fits and verdicts, or run as one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=LARGEST, help="bytes; the smallest is 1024")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="with commas")
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.is_rank:
        _rank(options)
        return
    names = options.algorithms.split(",")
    if unknown := set(names) - ALGORITHMS.keys():
        sys.exit(f"--algorithms: {min(unknown)} is none of {', '.join(ALGORITHMS)}")
    if options.ranks < 2 or options.rounds < 1 or options.largest < 4 * LEAST_BYTES:
        sys.exit(f"use 2 ranks, 1 round and {4 * LEAST_BYTES} bytes, or more")
    jobs = [name for name in names for _ in range(options.rounds)]
    random.Random(0).shuffle(jobs)  # a machine that changes does not change one algorithm alone
    before = counters.read_load()
    # Seconds of the rounds by library, algorithm and bytes.
    measured: dict[str, dict[str, dict[int, list[float]]]] = {library: {} for library in LIBRARIES}
    for name in jobs:
        command = [*mpirun(options.ranks), sys.executable, __file__, "--is-rank"]
        command += ["--algorithms", name, "--largest", str(options.largest)]
        printed = common.run_all([command], 1, **ALGORITHMS[name])[0]
        for library, by_size in json.loads(printed).items():
            rounds = measured[library].setdefault(name, {})
            for size, seconds in by_size.items():
                rounds.setdefault(int(size), []).append(seconds)
    beside = counters.disturbance([counters.read_load().since(before)])
    cores = len(os.sched_getaffinity(0))
    print(
        f"{options.ranks} ranks on {cores} cores, {options.rounds} rounds beside "
        f"{beside.other_cores + beside.stolen_cores:.2f} other cores on average"
    )
    if options.ranks > cores:
        print("Ranks wait for a core: the time follows the work of all ranks, not the counts.")
    for library, by_name in measured.items():
        if sums := {name: by_name[name] for name in names if name in by_name}:
            print(f"\n{report(library, sums, options.ranks)}", flush=True)


def _rank(options: argparse.Namespace) -> None:
    """Measure all sizes under one algorithm; rank 0 prints the seconds by library and bytes.

    Horovod is measured last, because Horovod's thread communicates while it runs.
    """
    import torch

    from hvdtrain.errors import UsageError
    from hvdtrain.planner.probe import horovod_sum, started_sum
    from hvdtrain.sync.collectives import check_algorithm, open_group

    job = world.start(options.algorithms, threads=1)
    sizes = doublings(options.largest)
    measured = {}
    everybody, cpu = tuple(range(job.size)), torch.device("cpu")
    try:
        check_algorithm(options.algorithms)
    except UsageError as reason:
        if job.rank == 0:
            print(f"not measured with MPI: {reason}", file=sys.stderr)
    else:
        group = open_group("mpi", everybody, job, cpu, "benchmark")
        measured["MPI"] = _sum_seconds(job, started_sum(group("sums")), sizes)
    if all(job.gather(has_horovod())):
        # Horovod's cycle is that of models of up to 8 MiB: a longer one would delay small sums.
        measured["Horovod"] = _sum_seconds(job, horovod_sum(world.start_horovod(0)), sizes)
    if job.rank == 0:
        print(json.dumps(measured))
    world.stop()


def _sum_seconds(
    job: world.World, start: Callable[..., Callable[[], bool]], sizes: Sequence[int]
) -> dict[int, float]:
    """Return the median seconds of the slowest rank by bytes; exit if a sum is wrong."""
    import torch

    tensors = {size: torch.ones(size // 4) for size in sizes}
    group: Any = job.communicator

    def once(order: Sequence[int]) -> dict[int, float]:
        seconds = {}
        for size in order:
            group.Barrier()  # its ranks leave it together; `World.barrier` sleeps
            began = time.perf_counter()
            wait_until(start(tensors[size], f"benchmark.{size}"))
            seconds[size] = time.perf_counter() - began
        return seconds

    once(sizes)
    right = all(bool((values == job.size).all()) for values in tensors.values())
    if not all(job.gather(right)):
        sys.exit(f"a sum is wrong on rank {job.rank}")
    for values in tensors.values():
        values.zero_()
    longest = max(job.gather(sum(once(sizes).values())))
    dice = random.Random(0)  # the same order on all ranks
    repeats = range(int(min(MOST, max(LEAST, SECONDS / longest))))
    rows = [once(dice.sample(sizes, len(sizes))) for _ in repeats]
    slowest = np.max(job.gather([[row[size] for row in rows] for size in sizes]), axis=0)
    return {size: median(map(float, row)) for size, row in zip(sizes, slowest, strict=True)}


def doublings(largest: int) -> list[int]:
    """Return the sizes up to `largest` in bytes, each twice the one before."""
    return [LEAST_BYTES * 2**k for k in range(int(math.log2(largest / LEAST_BYTES)) + 1)]


def counts(algorithm: str, ranks: int) -> Counts | None:
    """Return the textbook's counts; None for an algorithm that the library chooses by itself.

    Recursive doubling and Rabenseifner's algorithm first fold a number of ranks that is not a
    power of two: two more messages of the whole tensor.
    """
    rounds = int(math.log2(ranks))
    fold = 0 if 2**rounds == ranks else 2
    depth = math.ceil(math.log2(ranks))
    return {
        "ring": Counts(2 * (ranks - 1), 2 * (ranks - 1) / ranks),
        "recursive-doubling": Counts(rounds + fold, rounds + fold),
        "rabenseifner": Counts(2 * rounds + fold, 2 * (1 - 0.5**rounds) + fold),
        "tree": Counts(2 * depth, 2 * depth),
    }.get(algorithm)


def fitted_network(sums: Sums, ranks: int) -> Network | None:
    """Return what explains all algorithms together, with the smallest relative error.

    Nothing in it is below 0. None without an algorithm that the textbook counts.
    """
    rows = [
        (1 / seconds, work.messages / seconds, work.volume * size / seconds)
        for algorithm, by_size in sums.items()
        if (work := counts(algorithm, ranks)) is not None
        for size, values in by_size.items()
        for seconds in [median(values)]
    ]
    if not rows:
        return None
    columns = np.array(rows)
    scale = columns.max(axis=0)
    fitted, _ = optimize.nnls(columns / scale, np.ones(len(rows)))
    return Network(*(float(value) for value in fitted / scale))


def predicted_crossing(one: str, other: str, ranks: int, network: Network) -> Crossing:
    """Return where the textbook's seconds of two algorithms that it counts cross."""
    first, second = counts(one, ranks), counts(other, ranks)
    assert first is not None and second is not None
    fixed = (first.messages - second.messages) * network.alpha
    slope = (first.volume - second.volume) * network.beta
    if not fixed and not slope:
        return Crossing()
    below = one if (fixed or slope) < 0 else other
    above = one if (slope or fixed) < 0 else other
    return Crossing(below, above, -fixed / slope if below != above else None)


def measured_crossing(one: str, other: str, sums: Sums) -> Crossing:
    """Return where the measured seconds of two algorithms cross.

    A size counts if the rounds of the two do not overlap and their medians differ by more than
    `DIFFERENT`. The crossover leaves the fewest sizes on the wrong sides, so that a disturbed size
    does not move it, and at least `FEWEST_SIZES` on each side. It is interpolated in logarithms.
    """
    clear: list[tuple[int, float]] = []  # size, and logarithm of the ratio
    for size, first in sorted(sums[one].items()):
        second = sums[other][size]
        overlap = min(first) <= max(second) and min(second) <= max(first)
        log_ratio = math.log(median(first) / median(second))
        if not overlap and abs(log_ratio) > math.log(1 + DIFFERENT):
            clear.append((size, log_ratio))
    if len(clear) < FEWEST_SIZES:
        return Crossing()

    def wrong(place: int, sign: int) -> tuple[int, float]:
        sides = [sign if k < place else -sign for k in range(len(clear))]
        misses = [abs(r) for side, (_, r) in zip(sides, clear, strict=True) if r * side < 0]
        return len(misses), sum(misses)

    # Sizes on the wrong sides and their ratios, whether there is a crossover, place, sign below.
    choices = [
        (wrong(place, sign), place > 0, place, sign)
        for place in (0, *range(FEWEST_SIZES, len(clear) - FEWEST_SIZES + 1))
        for sign in (-1, 1)
    ]
    _, crosses, place, sign = min(choices)
    faster = {-1: one, 1: other}  # a logarithm below 0: the first one is faster
    if not crosses:
        return Crossing(faster[-sign], faster[-sign])
    low, before = [item for item in clear[:place] if item[1] * sign > 0][-1]
    high, after = next(item for item in clear[place:] if item[1] * sign < 0)
    part = before / (before - after)
    return Crossing(faster[sign], faster[-sign], low * (high / low) ** part)


def verdicts(sums: Sums, ranks: int) -> Iterator[dict[str, str]]:
    """Judge small sums, large sums and the crossover of each pair, a row of a table per claim.

    A claim on which both algorithms have the same count is left out.
    """
    network = fitted_network(sums, ranks)
    for few, many in PAIRS:
        if network is None or not {few, many} <= sums.keys():
            continue
        first, second = counts(few, ranks), counts(many, ranks)
        assert first is not None and second is not None
        sizes, claims = sums[few].keys(), []
        if first.messages != second.messages:
            claims.append(("small", few, many, min(sizes)))
        if first.volume != second.volume:
            claims.append(("large", many, few, max(sizes)))
        for name, faster, slower, size in claims:
            measured = ratio(list(sums[slower][size]), list(sums[faster][size]))
            works = [counts(slower, ranks), counts(faster, ranks)]
            over, under = (work.seconds(network, size) for work in works if work is not None)
            yield {
                "claim": f"{name} sums: {faster} is faster than {slower}",
                "textbook": f"{over / under:.2f}" if under else "-",
                "measured": number(measured, ".2f"),
                "verdict": judge(measured),
            }
        if claims:
            predicted = predicted_crossing(few, many, ranks, network)
            crossing = measured_crossing(few, many, sums)
            yield {
                "claim": f"crossover of {few} and {many}",
                "textbook": crossing_words(predicted),
                "measured": crossing_words(crossing),
                "verdict": crossing_verdict(predicted, crossing, len(sums[few][min(sizes)])),
            }


def judge(measured: Estimate) -> str:
    """Return the verdict on a ratio that a claim says is above 1."""
    if measured.low is None or measured.high is None:
        return ONE_ROUND
    if measured.low > 1:
        return HOLDS
    return FAILS if measured.high < 1 else NOISE


def crossing_verdict(predicted: Crossing, measured: Crossing, rounds: int) -> str:
    """Return whether a measured crossover confirms a prediction."""
    if rounds < 2:
        return ONE_ROUND
    if not predicted.below:
        return NO_PREDICTION
    if not measured.below:
        return NOISE
    if predicted[:2] != measured[:2]:
        return FAILS
    if predicted.size is None or measured.size is None:
        return HOLDS
    is_near = abs(math.log(measured.size / predicted.size)) <= math.log(NEAR)
    return HOLDS if is_near else f"{HOLDS}, but not at the predicted size"


def crossing_words(crossing: Crossing) -> str:
    """Return where two algorithms cross, in words."""
    if not crossing.below:
        return "no difference"
    if crossing.size is None:
        return f"{crossing.below} at all sizes"
    return f"{crossing.below} below {size_name(crossing.size)}, {crossing.above} above"


def size_name(size: float) -> str:
    """Return a number of bytes in words."""
    for unit, bytes_ in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size:.0f} B"


def report(library: str, sums: Sums, ranks: int) -> str:
    """Return the times of a library beside the textbook's, its network, and the verdicts."""
    network = fitted_network(sums, ranks)

    def cell(name: str, size: int) -> str:
        seconds, work = median(sums[name][size]), counts(name, ranks)
        if work is None or network is None:
            return f"{1e6 * seconds:,.0f}"
        return f"{1e6 * seconds:,.0f} ({1e6 * work.seconds(network, size):,.0f})"

    sizes = list(next(iter(sums.values())))[::2]
    times = [
        {"bytes": size_name(size)} | {name: cell(name, size) for name in sums} for size in sizes
    ]
    parts = [f"## {library}: microseconds, in parentheses by the textbook", markdown_table(times)]
    if network is not None:
        parts.append(
            f"Fitted to all: overhead {1e6 * network.overhead:,.1f} us, alpha "
            f"{1e6 * network.alpha:,.1f} us per message, "
            f"beta {1e9 * network.beta:.3f} ns per byte."
        )
    if judged := list(verdicts(sums, ranks)):
        parts.append(markdown_table(judged))
    if slower := auto_words(sums):
        parts.append(slower)
    return "\n\n".join(parts)


def auto_words(sums: Sums) -> str:
    """Return how much slower the library's own choice is than the best named algorithm."""
    named = [name for name in sums if name not in ("auto", "hierarchical")]
    if "auto" not in sums or not named:
        return ""
    auto = {size: median(values) for size, values in sums["auto"].items()}
    best = {size: min(named, key=lambda name: median(sums[name][size])) for size in auto}
    losses = {size: auto[size] / median(sums[best[size]][size]) for size in auto}
    worst = max(losses, key=lambda size: losses[size])
    if losses[worst] <= 1 + DIFFERENT:
        return "auto is at no size clearly slower than another algorithm."
    return (
        f"auto is at most {losses[worst]:.2f}x slower than another algorithm: {best[worst]}, at "
        f"{size_name(worst)}."
    )


if __name__ == "__main__":
    main()
