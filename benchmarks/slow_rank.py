"""Measures the time to a given accuracy with one slow rank, for several ways to agree.

    python benchmarks/slow_rank.py --data data/cifar10 [--accuracy 0.66] [--epochs 5] [--rounds 2]
                                   [--ways "exact;server:stale=3;server:async;local:8"]

Two ranks train the CNN, with one thread each, on a core each. A process that only computes
shares the core of rank 1 from the first step to the last. Servers have a third rank, which may use
both cores: its time is not hidden, as it would be on a node of its own. Seconds are those from the
start of the first step to the end of the first epoch whose test accuracy is at least `--accuracy`,
evaluations included. A round trains with each way once, with one seed per round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common

from hvdtrain import launch

WAYS = "exact;server:stale=3;server:async;local:8"
CORES = sorted(os.sched_getaffinity(0))[:2]
BOUND = (
    "case $OMPI_COMM_WORLD_RANK in 0) cores={0};; 1) cores={1};; *) cores={0},{1};; esac; "
    'exec taskset -c $cores "$@"'
)


def main() -> None:
    """Run all rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--accuracy", type=float, default=0.66)
    parser.add_argument("--epochs", type=int, default=5, help="the most epochs of a run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", default=WAYS)
    options = parser.parse_args()
    ways = options.ways.split(";")
    with tempfile.TemporaryDirectory() as folder:
        sides = [_side(way, Path(folder), options) for way in ways]
        seconds = common.rounds(options.rounds, sides)
    print(
        f"seconds to a test accuracy of {options.accuracy}, rank 1 slow; "
        f"inf: not in {options.epochs} epochs"
    )
    for way, values in zip(ways, seconds, strict=True):
        ratios = [exact / value for exact, value in zip(seconds[0], values, strict=True)]
        print(
            f"{way:>16}: {common.spread(values, '.1f')}; "
            f"{ways[0]} / this: {common.spread(ratios, '.2f')}"
        )


def _side(way: str, folder: Path, options: argparse.Namespace) -> Callable[[int], float]:
    def run(number: int) -> float:
        name = folder / f"{way.replace(':', '-')}-{number}"
        ranks = 3 if way.startswith("server") else 2
        arguments = (
            f"--model cnn --epochs {options.epochs} --threads 1 --seed {number} --sync {way}"
        )
        command = common.without_rate(common.training(arguments, options.data, name))
        bound = ["sh", "-c", BOUND.format(*CORES), "sh"]
        environment = os.environ | common.AS_ROOT
        whole = [*launch.mpirun(ranks), *bound, *command]
        job = subprocess.Popen(whole, env=environment, stdout=subprocess.DEVNULL)
        with common.busy(CORES[1]):
            return _until(job, name / "metrics.jsonl", options.accuracy)

    return run


def _until(job: "subprocess.Popen[bytes]", metrics: Path, accuracy: float) -> float:
    """Return the seconds until an epoch had the accuracy; print each epoch, and end the job.

    They are infinite if the job ended before.
    """
    seen = 0
    while True:
        ended = job.poll() is not None
        epochs = _epochs(metrics)
        for epoch in epochs[seen:]:
            print(
                f"    {metrics.parent.name}: epoch {epoch['epoch']}, {epoch['seconds']:.1f} s, "
                f"{epoch['test_accuracy']:.4f}",
                flush=True,
            )
            if epoch["test_accuracy"] >= accuracy:
                job.terminate()
                job.wait()
                return float(epoch["seconds"])
        seen = len(epochs)
        if ended and job.returncode:
            sys.exit(f"failed: {metrics.parent.name}")
        if ended:
            return float("inf")
        time.sleep(0.2)


def _epochs(metrics: Path) -> list[dict[str, float]]:
    if not metrics.exists():
        return []
    lines = metrics.read_text().split("\n")[:-1]  # the last line may not be whole
    return [json.loads(line) for line in lines if '"event": "epoch"' in line]


if __name__ == "__main__":
    main()
