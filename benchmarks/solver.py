"""Measures how long choosing a plan takes: random models of many components on up to 1,024 ranks.

    python benchmarks/solver.py [--components 200] [--ranks 16] [--rounds 5]

Times, bytes and speeds of ranks are random, so that no two ranks are alike and can share results;
all schedules are allowed. The gap is that of the chosen plan to the lower bound for any plan.
Seconds of the processor are those of this process and all its threads: unlike the seconds of the
clock, they do not include waiting for a processor that is shared with other jobs. Without
--components and --ranks the sizes are 24 x 4, 200 x 16, 200 x 16 with a memory limit that data
parallelism exceeds, and 500 x 64.
"""

import argparse
import statistics
import time

import numpy as np

from hvdtrain.models.costs import ComponentCost
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.network import Curve, Line, MeasuredNetwork
from hvdtrain.planner.profile import ComponentTimes, Profile, RankTimes
from hvdtrain.planner.solve import Solution, solve

BATCH = 256
LIMIT = 0.4  # part of the memory of data parallelism


def question(components: int, ranks: int, seed: int, limit: float | None) -> Question:
    """Return a random model on random ranks."""
    draw = np.random.default_rng(seed)
    costs = [_component(number, draw) for number in range(components)]
    seconds = draw.uniform(1e-5, 1e-4, components)
    profile = Profile(tuple(_rank(costs, seconds * draw.uniform(1, 2)) for _ in range(ranks)))
    summed = Curve.straight(Line(1e-4, 2e-9), 1e9)
    network = MeasuredNetwork(
        ("here",) * ranks,
        {False: {2: summed, max(3, ranks): summed}},
        {False: Curve.straight(Line(1e-4, 1e-10), 1e9)},
    )
    return Question(
        Known(costs, profile, network),
        BATCH,
        "sgd",
        ("1f1b", "interleaved", "zb-h1"),
        limits=None if limit is None else (limit,) * ranks,
    )


def _component(number: int, draw: np.random.Generator) -> ComponentCost:
    parameters, output = int(draw.integers(25_000, 1_000_000)), int(draw.integers(2_500, 25_000))
    return ComponentCost(
        name=f"component{number}",
        parameters=parameters,
        parameter_bytes=4 * parameters,
        buffer_bytes=0,
        forward_flops=float(draw.uniform(1e6, 1e8)),
        output_shape=(output,),
        output_bytes=4 * output,
        saved_bytes=int(draw.integers(10_000, 200_000)),
    )


def _rank(costs: list[ComponentCost], seconds: np.ndarray) -> RankTimes:
    def curve(slope: float) -> Curve:
        return Curve.straight(Line(2e-5, slope), BATCH)

    return RankTimes(
        {
            cost.name: ComponentTimes(
                curve(per_sample), curve(2 * per_sample), curve(per_sample), curve(per_sample)
            )
            for cost, per_sample in zip(costs, seconds, strict=True)
        }
    )


def measure(components: int, ranks: int, rounds: int, is_limited: bool) -> str:
    """Return a line with the results of one size."""
    solutions: list[Solution] = []
    seconds: list[float] = []
    processor: list[float] = []
    for seed in range(rounds):
        limit = None
        if is_limited:
            whole = solve(question(components, ranks, seed, None))
            largest = max(whole.candidates, key=lambda candidate: max(candidate.rank_bytes))
            limit = LIMIT * max(largest.rank_bytes)
        problem = question(components, ranks, seed, limit)
        began, busy = time.perf_counter(), time.process_time()
        solutions.append(solve(problem))
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - busy)
    gap = statistics.median(solution.gap for solution in solutions)
    return (
        f"{components} components x {ranks} ranks{', limited' if is_limited else ''}: "
        f"{statistics.median(processor):.2f} s of the processor ({min(processor):.2f} to "
        f"{max(processor):.2f}), {statistics.median(seconds):.2f} s by the clock; "
        f"{gap:.0%} above the bound; {solutions[-1].chosen.name}"
    )


def main() -> None:
    """Measure the requested size, or all default sizes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--components", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if bool(options.components) != bool(options.ranks):
        parser.error("--components and --ranks go together")
    sizes = [(24, 4, False), (200, 16, False), (200, 16, True), (500, 64, False)]
    if options.components:
        sizes = [(options.components, options.ranks, False)]
    for components, ranks, is_limited in sizes:
        print(measure(components, ranks, options.rounds, is_limited), flush=True)


if __name__ == "__main__":
    main()
