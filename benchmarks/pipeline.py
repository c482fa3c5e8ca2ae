"""hvdtrain against torch.distributed.pipelining (gloo): the step time of a pipeline.

    python benchmarks/pipeline.py [--model resnet18] [--schedule 1f1b] [--images 64]
        [--microbatches 8] [--precision fp32] [--steps 8] [--rounds 5]

Both sides train the same two stages on two ranks with one thread each: the same components from
the same seed, cut at the same place, on the same images, in channels_last, with fused SGD. A round
is one job of each side, in turn; a step is timed from a barrier to the end on the slowest rank,
normalising included. PyTorch's side is its documented loop. Gloo sends no channels_last tensors,
so its stages hand on NHWC views of the same memory, which costs nothing. The ratio is above 1
where hvdtrain is faster; the losses of the first step show that both compute the same.

hvdtrain's jobs also profile their stages before, between and after the steps, simulate the schedule
with these costs, and say how far the prediction is from the measured step; and they say how much
of a step the interpreter's own loop takes, with actions that do nothing.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from hvdtrain import launch, models, world
from hvdtrain.config import TrainConfig

RANKS, CLASSES, SIZE, SEED = 2, 10, 32, 0
WARM_UP = 2  # steps that no job counts
EMPTY_LOOPS = 50


def main() -> None:
    """Run the rounds of every model and schedule, or be one rank of a job."""
    options = _options()
    if options.job == "ours":
        _ours(options)
    elif options.job == "theirs":
        _theirs(options)
    else:
        for model in options.model.split(","):
            for schedule in options.schedule.split(","):
                _compare(options, model, schedule)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="one, or several with commas")
    parser.add_argument("--schedule", default="gpipe,1f1b,zb-h1", help="one, or several")
    parser.add_argument("--images", type=int, default=64, help="images a step")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=8, help="steps of a job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _compare(options: argparse.Namespace, model: str, schedule: str) -> None:
    """All rounds of one model under one schedule."""
    names = ("images", "microbatches", "precision", "steps")
    own = [sys.executable, __file__, "--model", model, "--schedule", schedule]
    own += [f"--{name}={getattr(options, name)}" for name in names]
    ours, theirs = [], []
    for number in range(options.rounds):
        jobs = [
            lambda: ours.append(_run([[*launch.mpirun(RANKS), *own, "--job", "ours"]])),
            lambda: theirs.append(_run(_peers(own))),
        ]
        for job in jobs[:: 1 if number % 2 == 0 else -1]:
            job()
    _print(options, model, schedule, ours, theirs)


def _peers(own: list[str]) -> list[list[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = [*own, "--job", "theirs", "--port", str(port)]
    return [[*shared, "--rank", str(rank)] for rank in range(RANKS)]


def _run(commands: list[list[str]]) -> dict[str, Any]:
    """Run commands side by side; the JSON object that the first printed."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = os.environ | root | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for command in commands
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"failed: {' '.join(commands[0])}")
    found: dict[str, Any] = json.loads(printed[0])
    return found


def _print(
    options: argparse.Namespace, model: str, schedule: str, ours: list[Any], theirs: list[Any]
) -> None:
    def median(name: str, jobs: list[Any] = ours) -> float:
        return statistics.median(job[name] for job in jobs)

    print(
        f"{model}, {schedule}, {options.precision}, {RANKS} ranks x 1 thread, "
        f"{options.images} images in {options.microbatches} micro-batches"
    )
    for name, jobs in (("hvdtrain", ours), ("PyTorch", theirs)):
        seconds = [job["seconds"] for job in jobs]
        print(
            f"  {name:>9}: {statistics.median(seconds):.4f} s a step "
            f"({min(seconds):.4f} to {max(seconds):.4f}), first loss {jobs[0]['loss']:.7f}"
        )
    ratios = sorted(other["seconds"] / own["seconds"] for own, other in zip(ours, theirs))
    each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"      ratio: {statistics.median(ratios):.3f} (rounds: {each}); {theirs[0]['peer']}")
    print(
        f"   exchange: {median('transfer'):.2%} of a step exposed; bubble {median('bubble'):.2%}, "
        f"idle in all {median('idle'):.2%}, simulated {median('simulated_idle'):.2%}"
    )
    errors = sorted(job["predicted"] / job["seconds"] - 1 for job in ours)
    print(
        f"  simulated: {median('predicted'):.4f} s a step, {statistics.median(errors):+.1%} of "
        f"the measured one (rounds: {', '.join(f'{error:+.1%}' for error in errors)})"
    )
    print(f"       loop: {1e6 * median('loop'):.0f} us a step, {median('overhead'):.3%} of it")
