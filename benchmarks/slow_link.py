"""Measures ways to agree on a link of known bandwidth between two ranks (root only).

    python benchmarks/slow_link.py [--model resnet18] [--images 32] [--gigabits 0.1,1]
                                   [--methods "exact;compress fp16;..."] [--rounds 3]
                                   [--plot FILE]

A round is one job of each method, in turns, on a link that `tc` limits (benchmarks/link.py); the
first steps of a job do not count. The bytes are those that the interface of rank 0 has sent per
step, headers included, beside those that hvdtrain has counted. The predicted step is the planner's
for data parallelism: before the rounds it measures components, all-reduces on this link and the
seconds of compressing, as `--plan auto` does. A method pays below the bandwidth at which its step
is as long as the exact one; it is interpolated between the two bandwidths around it, in
logarithms. The peers are DistributedDataParallel over gloo with PyTorch's own hooks.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import common
from link import NETWORK, Link

WARM_UP = 4  # steps of each job that do not count
ALONE = "sync local:1000000"
METHODS = (
    f"{ALONE};exact;compress fp16;compress topk:0.01;compress powersgd:2;sync local:8;"
    "sync diloco:32;ddp;ddp fp16;ddp powersgd"
)


class Sample(NamedTuple):
    """The results of one job.

    Attributes:
        seconds: median per step, or the mean of a period for methods that meet every few steps.
        sent: bytes per step of rank 0, as the interface counts them.
        counted: bytes per step, as hvdtrain counts them; NaN for a peer.
    """

    seconds: float
    sent: float
    counted: float


def main() -> None:
    """Run the rounds and print a table for each bandwidth."""
    options = _options()
    if options.job is not None:
        _peer(options)
        return
    if options.predict:
        _predict(options)
        return
    methods = options.methods.split(";")
    medians: dict[float, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        from hvdtrain.data import synth

        images = 2 * options.images
        synth(data, images * (options.steps + 1), common.CLASSES, size=common.SIZE)
        for gigabits in map(float, options.gigabits.split(",")):
            results: dict[str, list[Sample]] = {method: [] for method in methods}
            with Link(gigabits) as link:
                only_peers = all(method.startswith("ddp") for method in methods)
                predicted = {} if only_peers else _predicted(options, link)
                for number in range(options.rounds):
                    turn = number % len(methods)
                    for method in methods[turn:] + methods[:turn]:
                        run = Path(folder) / f"run-{gigabits}-{number}-{len(results[method])}"
                        results[method] += _samples(options, link, method, data, run)
            _print(options, gigabits, results, predicted)
            medians[gigabits] = {
                method: statistics.median(sample.seconds for sample in samples)
                for method, samples in results.items()
                if samples
            }
    for method in methods:
        if "exact" in methods and method not in (ALONE, "exact"):
            print(f"{method:>24} {_crossover(medians, method)}")
    if options.plot:
        _plot(options, medians)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--images", type=int, default=32, help="images per rank and step")
    parser.add_argument("--gigabits", default="0.1,0.5,1,10", help="bandwidths in Gbit/s")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--steps", type=int, default=36, help="steps per job")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture of the steps")
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--predict", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _predicted(options: argparse.Namespace, link: Link) -> dict[str, float]:
    """Return the predicted seconds per step of all methods but the peers."""
    command = [sys.executable, __file__, "--predict", "--methods", options.methods]
    command += ["--model", options.model, "--images", str(options.images)]
    result: dict[str, float] = json.loads(common.run_all([link.mpirun(command)], threads=1)[0])
    return result


def _predict(options: argparse.Namespace) -> None:
    """Run one rank of the predictions; rank 0 prints them."""
    import torch

    from hvdtrain import models, world
    from hvdtrain.backends.pytorch.parts import build_model
    from hvdtrain.plan.plan import replicated
    from hvdtrain.planner import choose
    from hvdtrain.planner.candidate import play
    from hvdtrain.planner.coding import measure_coding

    job = world.start(threads=1)
    ways = {
        method: _options_of(method)
        for method in options.methods.split(";")
        if not method.startswith("ddp")
    }
    config, subject, known = common.measured(options.model, 2 * options.images, job)
    components = models.components(options.model, common.CLASSES, common.SIZE)
    by_name = {part.name: part for part in components}
    coding = measure_coding(
        lambda name: build_model([by_name[name]], config, torch.device("cpu")).parameters(),
        subject.names,
        [way["compress"] for way in ways.values() if "compress" in way],
        job.size,
        job,
    )
    known = replace(known, profile=known.profile.with_coding(coding))
    plan = replicated(subject.names, job.size, 1, None)
    if job.rank == 0:
        questions = {
            method: choose.question(replace(config, **way), known, job.size)
            for method, way in ways.items()
        }
        seconds = {method: play(one, plan, method).seconds for method, one in questions.items()}
        print(json.dumps(seconds), flush=True)
    world.stop()


def _options_of(method: str) -> dict[str, Any]:
    """Return the options of `train` that a method stands for, such as sync and compress."""
    words = method.replace("--", "").split() if method != "exact" else []
    return dict(zip(words[::2], words[1::2], strict=True))


def _samples(
    options: argparse.Namespace, link: Link, method: str, data: Path, run: Path
) -> list[Sample]:
    """Return the results of one job; none of a peer that failed."""
    try:
        return [_job(options, link, method, data, run)]
    except SystemExit:
        if not method.startswith("ddp"):
            raise
        return []


def _job(options: argparse.Namespace, link: Link, method: str, data: Path, run: Path) -> Sample:
    if method.startswith("ddp"):
        return _ddp(options, link, method, data)
    images = 2 * options.images
    way = "" if method == "exact" else f"--{method}"
    arguments = f"--model {options.model} --threads 1 --batch-size {images}"
    way += ",after=0" if method.startswith("compress") else ""
    arguments += f" --max-steps {options.steps} --log-every 1 --eval-every 0 {way}"
    run = run.with_name(f"{run.name}-{method.replace(' ', '-').replace(':', '-')}")
    before = link.sent_bytes()
    common.run_all([link.mpirun(common.training(arguments, data, run))], threads=1)
    sent = (link.sent_bytes() - before) / options.steps
    summary = json.loads((run / "summary.json").read_text())
    seconds = common.step_seconds(run, images)[WARM_UP:]
    middle = statistics.mean(seconds) if method.startswith("sync") else statistics.median(seconds)
    return Sample(middle, sent, summary["agreement"]["sent_bytes_per_step"])


def _ddp(options: argparse.Namespace, link: Link, method: str, data: Path) -> Sample:
    command = [sys.executable, __file__, "--data", str(data), "--method", method]
    for name in ("model", "images", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    before = link.sent_bytes()
    commands = [link.on(rank, [*command, "--job", str(rank)]) for rank in (0, 1)]
    seconds = json.loads(common.run_all(commands, threads=1)[0])
    sent = (link.sent_bytes() - before) / options.steps
    return Sample(statistics.median(seconds[WARM_UP:]), sent, float("nan"))


def _peer(options: argparse.Namespace) -> None:
    """Run one rank of DistributedDataParallel with a hook."""
    import torch
    from torch import distributed, nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = f"end{options.job}"
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{NETWORK}.1:29555", rank=options.job, world_size=2
    )
    loop = common.PlainLoop(options.model, options.data, "fp32")
    # Over gloo, PowerSGD's hook starts the sums of several buckets in another order on each rank.
    bucket_size = 10_000 if options.method == "ddp powersgd" else None
    loop.module = nn.parallel.DistributedDataParallel(
        loop.module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_size
    )
    if options.method == "ddp fp16":
        loop.module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if options.method == "ddp powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        loop.module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    seconds = []
    for step in range(options.steps):
        started = time.perf_counter()
        loop.step((step * 2 + options.job) * options.images, options.images)
        seconds.append(time.perf_counter() - started)
    if options.job == 0:
        print(json.dumps(seconds), flush=True)
    distributed.destroy_process_group()  # otherwise gloo's threads may abort the process


def _print(
    options: argparse.Namespace,
    gigabits: float,
    results: Mapping[str, list[Sample]],
    predicted: Mapping[str, float],
) -> None:
    images = 2 * options.images
    print(f"{options.model}, 2 ranks x 1 thread, {images} images per step, {gigabits:g} Gbit/s")
    print(
        f"{'':>24}{'s/step':>9}{'images/s':>10}{'MB sent':>9}{'counted':>9}"
        f"{'predicted':>11}{'error':>8}"
    )
    for method, samples in results.items():
        if not samples:
            print(f"{method:>24}   failed")
            continue
        seconds, sent, counted = (
            statistics.median(column) for column in zip(*samples, strict=True)
        )
        ahead = predicted.get(method, float("nan"))
        print(
            f"{method:>24}{seconds:>9.3f}{images / seconds:>10.1f}{sent / 1e6:>9.2f}"
            f"{counted / 1e6:>9.2f}{ahead:>11.3f}{ahead / seconds - 1:>8.1%}"
        )
    sys.stdout.flush()


def _crossover(medians: Mapping[float, Mapping[str, float]], method: str) -> str:
    """Return the bandwidths at which a method is faster than exact sums, in words."""
    gains = [
        (gigabits, math.log(steps["exact"] / steps[method]))
        for gigabits, steps in sorted(medians.items())
        if method in steps
    ]
    if not gains:
        return "failed"
    if all(gain > 0 for _, gain in gains):
        return "is faster than exact at every bandwidth measured"
    if gains[0][1] <= 0:
        return f"is not faster than exact at {gains[0][0]:g} Gbit/s"
    (low, before), (high, after) = next(
        pair for pair in itertools.pairwise(gains) if pair[1][1] <= 0
    )
    share = before / (before - after)
    return f"is faster than exact below {low * (high / low) ** share:.2g} Gbit/s"


def _plot(options: argparse.Namespace, medians: Mapping[float, Mapping[str, float]]) -> None:
    from matplotlib import pyplot

    from hvdtrain.study.plots import COLOURS, MARKERS, STYLE

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(5, 3.2))
        methods = {method for steps in medians.values() for method in steps} - {ALONE}
        for place, method in enumerate(sorted(methods)):
            links = [gigabits for gigabits in sorted(medians) if method in medians[gigabits]]
            seconds = [1000 * medians[gigabits][method] for gigabits in links]
            line = "--" if method.startswith("ddp") else ":" if place >= len(COLOURS) else "-"
            marker = MARKERS[place % len(MARKERS)]
            colour = COLOURS[place % len(COLOURS)]
            axes.plot(links, seconds, line, marker=marker, color=colour, label=method)
        axes.set(xscale="log", yscale="log", xlabel="link, Gbit/s", ylabel="step, ms")
        axes.set_xticks(sorted(medians), [f"{gigabits:g}" for gigabits in sorted(medians)])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(options.plot)


if __name__ == "__main__":
    main()
