"""Compares the planner's predictions and its choice with measured step times of many plans.

    python benchmarks/planner.py [--models cnn,resnet18,vit_tiny] [--steps 4] [--rounds 3]
        [--picture FILE]

Each model runs as one job of two ranks with one thread each, each bound to its own core.
Components and network are measured as `--plan auto` does, and a plan is chosen. Then, in each
round, the components are measured again, all plans are predicted with that, and some steps of each
plan are measured, so that a processor with a varying speed affects both sides. Steps follow
one another as in training: a step is timed from the end of the one before it to its own end, on
the slowest rank. A barrier before each step would let ranks start up to a millisecond apart.
The error is |predicted - measured| / measured of
the medians of all rounds; vTrain (Bang et al., MICRO 2024) reports 8.4 % for one node. The errors
of the profile from before all rounds are printed, too. The choice of `--plan auto` is compared
with the fastest measured plan.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from matplotlib import pyplot
from scipy import stats

from hvdtrain import launch, models, world
from hvdtrain.backends.pytorch.build import build_runtime
from hvdtrain.backends.pytorch.measured import subject_of
from hvdtrain.check.plan import MEAN, STD, local_batch, random_batch
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import TargetForm
from hvdtrain.models.component import Component
from hvdtrain.models.costs import component_costs
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.runtime import Runtime, Step
from hvdtrain.parallel.stage import Images
from hvdtrain.plan import schedule
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, Stage, pipeline, replicated
from hvdtrain.plan.schedule import program
from hvdtrain.planner import choose, measure
from hvdtrain.planner.candidate import play
from hvdtrain.planner.cost import Question
from hvdtrain.planner.measure import Subject
from hvdtrain.planner.probe import message_to_self
from hvdtrain.planner.profile import Profile, RankTimes
from hvdtrain.planner.solve import solve
from hvdtrain.study import plots
from hvdtrain.world import World

PROVES = (
    "The figures say how good the planner's predictions and choices are, and what "
    "adaptive plans gain."
)

RANKS, CLASSES, SIZE = 2, 10, 32
WARM_UP = 2
BATCHES = {"cnn": 64, "resnet18": 32, "vit_tiny": 32}


def main() -> None:
    """Run a job for each model, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(BATCHES))
    parser.add_argument("--steps", type=int, default=4, help="steps per plan and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--picture", help="PNG of predicted against measured times")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _rank(options)
        return
    errors: list[float] = []
    pairs: dict[str, list[tuple[float, float]]] = {}
    for model in options.models.split(","):
        command = [sys.executable, __file__, "--rank-of", model]
        command += ["--steps", str(options.steps), "--rounds", str(options.rounds)]
        job = ["core" if word == "none" else word for word in launch.mpirun(RANKS)]
        result = json.loads(common.run_all([[*job, *command]], threads=1)[0])
        errors += _print(model, result)
        pairs[model] = _medians(result["plans"])
    if options.picture:
        _draw(pairs, Path(options.picture))
    print(f"all models: mean absolute error {statistics.mean(errors):.1%} of {len(errors)} plans")


def _draw(pairs: dict[str, list[tuple[float, float]]], to: Path) -> None:
    """Draw predicted against measured seconds per step, by model; on the line they are equal."""
    with pyplot.rc_context(plots.STYLE):
        figure, axes = pyplot.subplots(figsize=(plots.WIDTH, plots.HEIGHT))
        everything = [value for points in pairs.values() for pair in points for value in pair]
        ends = [0.8 * min(everything), 1.25 * max(everything)]
        axes.plot(ends, ends, "--", color="grey", linewidth=0.8)
        for place, (name, points) in enumerate(pairs.items()):
            predicted, measured = zip(*points, strict=True)
            colour, marker = plots.COLOURS[place], plots.MARKERS[place]
            axes.plot(measured, predicted, marker, color=colour, label=name)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set(xlabel="measured seconds per step", ylabel="predicted seconds per step")
        axes.legend()
        plots.save(figure, to)


def _print(model: str, result: dict[str, Any]) -> list[float]:
    """Print the table of a model; return the errors of all plans."""
    print(
        f"{model}, {BATCHES[model]} images per step, {RANKS} ranks x 1 thread; measured in "
        f"{result['profile_seconds']:.1f} s, chosen in {result['solve_seconds']:.2f} s"
    )
    print(f"{'plan':<26}{'predicted ms':>13}{'measured ms':>13}{'from':>9}{'to':>9}{'error':>8}")
    errors = []
    pairs = _medians(result["plans"])
    for (name, (_, rounds)), (predicted, measured) in zip(
        result["plans"].items(), pairs, strict=True
    ):
        errors.append(abs(predicted - measured) / measured)
        print(
            f"{name:<26}{1e3 * predicted:>13.2f}{1e3 * measured:>13.2f}{1e3 * min(rounds):>9.2f}"
            f"{1e3 * max(rounds):>9.2f}{predicted / measured - 1:>8.1%}"
        )
    correlation = stats.spearmanr(*zip(*pairs, strict=True)).statistic
    best = min(pairs, key=lambda pair: pair[1])[1]
    chosen = statistics.median(result["plans"][result["chosen"]][1])
    before = [
        abs(result["before"][name] - measured) / measured
        for name, (_, measured) in zip(result["plans"], pairs, strict=True)
    ]
    print(
        f"mean absolute error {statistics.mean(errors):.1%} (by the profile before all rounds "
        f"{statistics.mean(before):.1%}), rank correlation {correlation:.3f}\n"
        f"chosen: {result['chosen']}, {chosen / best - 1:+.1%} of the best measured\n"
    )
    return errors


def _medians(plans: dict[str, Any]) -> list[tuple[float, float]]:
    """Return predicted and measured seconds of each plan, as medians over all rounds."""
    return [(statistics.median(p), statistics.median(m)) for p, m in plans.values()]


def _plans(config: TrainConfig, components: list[Component]) -> dict[str, Plan]:
    """Return at least twelve plans of all kinds that two ranks can run."""
    names = [part.name for part in components]
    costs = component_costs(components, SIZE, classes=CLASSES)
    work = [cost.forward_flops for cost in costs]
    both, n = tuple(range(RANKS)), len(names)
    plans = {
        "dp": replicated(names, RANKS, 1, None),
        "dp, 2 micro-batches": replicated(names, RANKS, 2, None),
        "dp, 4 micro-batches": replicated(names, RANKS, 4, None),
        "dp, shares 3:2": Plan((Stage(tuple(names), both, (3, 2)),)),
    }
    for number in (2, 4, 8):
        plans[f"mp, {number}"] = pipeline(names, work, RANKS, RANKS, 1, number, "1f1b")
    for kind in ("gpipe", "zb-h1"):
        plans[f"mp, 4, {kind}"] = pipeline(names, work, RANKS, RANKS, 1, 4, kind)
    if n >= 2 * RANKS:
        plans["mp, 4, interleaved"] = pipeline(names, work, RANKS, 2 * RANKS, 1, 4, "interleaved")
    middle = len(plans["mp, 4"].stages[0].components)
    for place in sorted({middle - 1, middle + 1, n // 3} - {0, n, middle}):
        if 0 < place < n:
            stages = (
                Stage(tuple(names[:place]), (0,), (1,)),
                Stage(tuple(names[place:]), (1,), (1,)),
            )
            plans[f"cut behind {place}"] = Plan(stages, 4)
    mixed = (Stage(tuple(names[:-1]), both, (1, 1)), Stage(tuple(names[-1:]), (1,), (1,)))
    plans["head on one rank"] = Plan(mixed, 1)
    mixed = (Stage(tuple(names[:1]), both, (1, 1)), Stage(tuple(names[1:]), (0,), (1,)))
    plans["all but the first on one"] = Plan(mixed, 1)
    return plans


def _rank(options: argparse.Namespace) -> None:
    """Run one rank of a job: predict and measure; rank 0 prints the results."""
    model, job = options.rank_of, world.start(threads=1)
    torch.set_num_threads(job.threads)
    size = BATCHES[model]
    config = TrainConfig(
        model=model, data="", plan="auto", optimizer="sgd", lr=1e-4, batch_size=size
    )
    components = models.components(model, CLASSES, SIZE)
    images = Images(MEAN, STD, torch.device("cpu"), config.precision)
    subject = subject_of(config, components, SIZE, TargetForm((), "int64", CLASSES), images)
    began = time.perf_counter()
    question = choose.question(config, choose.measure(subject, job), RANKS)
    profiled = time.perf_counter() - began
    began = time.perf_counter()
    chosen = solve(question).chosen
    solved = time.perf_counter() - began
    plans = _plans(config, components)
    # If the chosen plan is one of them, it is not measured twice.
    name_of = {plan: name for name, plan in plans.items()}
    choice = name_of.get(chosen.plan, f"chosen, {chosen.name}")
    plans[choice] = chosen.plan
    ready = _ready(subject, plans, job)
    rounds = _rounds(options, subject, question, plans, ready, job)
    if job.rank == 0:
        result = {
            "profile_seconds": profiled,
            "solve_seconds": solved,
            "chosen": choice,
            "before": {name: play(question, plan, name).seconds for name, plan in plans.items()},
            "plans": rounds,
        }
        print(json.dumps(result))
    next(iter(ready.values()))[0].observer.close()
    world.stop()


def _rounds(
    options: argparse.Namespace,
    subject: Subject,
    question: Question,
    plans: dict[str, Plan],
    ready: dict[str, tuple[Runtime, Step]],
    job: World,
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the predicted and measured seconds of each plan in each round. Collective."""
    assert job.communicator is not None
    exchange = Exchange(job.communicator, subject.images.device)
    rounds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ready}
    for _ in range(options.rounds):
        times = measure.local_times(subject, job, partial(message_to_self, exchange))
        ranks = map(_with_contention, job.gather(times), question.known.profile.ranks)
        now = replace(question.known, profile=Profile(tuple(ranks)))
        for name, side in ready.items():
            steps = _timed(*side, job, WARM_UP + options.steps)
            predicted, measured = rounds[name]
            predicted.append(play(replace(question, known=now), plans[name], name).seconds)
            measured.append(statistics.median(steps[WARM_UP - 1 :]))
    return rounds


def _with_contention(times: RankTimes, before: RankTimes) -> RankTimes:
    """Return the times with the contention measured before all rounds, as the planner has it."""
    components = {
        name: replace(one, contention=before.components[name].contention)
        for name, one in times.components.items()
    }
    return replace(times, components=components)


def _ready(
    subject: Subject, plans: dict[str, Plan], job: World
) -> dict[str, tuple[Runtime, Step]]:
    """Return what a step of each plan needs on this rank."""
    config, size = subject.config, subject.config.batch_size
    components = models.components(config.model, CLASSES, SIZE)
    first: Runtime | None = None
    ready = {}
    for name, plan in plans.items():
        runtime = build_runtime(config, plan, components, subject.images, SIZE, job, before=first)
        first = first or runtime
        pieces = cut(plan, size)
        actions = schedule.training_step(plan, pieces)[job.rank]
        todo = program(plan, pieces, actions, job.rank)
        batch = local_batch(plan, pieces, job.rank, *random_batch(size, SIZE, CLASSES, 0))
        ready[name] = runtime, Step(todo, *batch)
    return ready


def _timed(runtime: Runtime, step: Step, job: World, number: int) -> list[float]:
    """Return the seconds of each of some steps but the first, on the slowest rank. Collective."""
    job.barrier()
    ends = []
    for _ in range(number):
        runtime.run(Step(step.program, step.images, step.labels))
        ends.append(time.perf_counter())  # the same clock on all ranks of a host
    slowest = np.max(job.gather(ends), axis=0)
    seconds: list[float] = np.diff(slowest).tolist()
    return seconds


if __name__ == "__main__":
    main()
