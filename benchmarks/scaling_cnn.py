"""Compares two ranks with one process on the CIFAR-10 CNN at a fixed global batch size.

    python benchmarks/scaling_cnn.py --data DIR [--images 64] [--precision bf16] [--rounds 5]

This is strong scaling on two cores as in Ajayi et al. (AJEST 2026), who report a speed-up of 1.24.
One process has two threads; two ranks have one thread each and half of the batch each. Two bounds
are measured in the same rounds, each by two processes side by side that train half of the batch:
those that know nothing of each other, and those that meet at a barrier before every step. What the
second lose to the first is the cost of waiting for the slower core, which no library can avoid;
what two ranks lose to the second is the cost of communication. All are `hvdtrain train`.
"""

import argparse
import mmap
import os
import statistics
import struct
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import common
from comparison import compare

WARM_UP = 2  # windows of each job that do not count
COUNT = struct.Struct("q")
LONGEST_WAIT = 60.0  # seconds: the other job has failed, or starts on a machine that is very slow


def main() -> None:
    """Compare the rates of all sides, or run as a job that meets another one."""
    if sys.argv[1:2] == ["--meet"]:
        _train_and_meet(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        return
    options = _options()
    half = options.images // 2
    with tempfile.TemporaryDirectory() as folder:
        rate = partial(_rate, options, Path(folder))
        sides = {
            "2 ranks x 1 thread": lambda _: rate(options.images, 1, "--ranks 2"),
            "1 process x 2 threads": lambda _: rate(options.images, 2),
            "2 processes that meet each step": lambda _: rate(half, 1, jobs=2, meets=True),
            "2 processes on their own": lambda _: rate(half, 1, jobs=2),
        }
        title = f"cnn, {options.precision}, {options.images} images per step"
        goals = {"2 processes that meet each step": 0.97}
        compare(title, "images/s", sides, options.rounds, goals=goals)


def _rate(
    options: argparse.Namespace,
    folder: Path,
    images: int,
    threads: int,
    more: str = "",
    jobs: int = 1,
    meets: bool = False,
) -> float:
    """Return the images/s of jobs side by side."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        runs = [Path(place) / str(job) for job in range(jobs)]
        arguments = f"--model cnn --precision {options.precision} --threads {threads} {more}"
        arguments += f" --max-steps {options.steps} --log-every {options.window}"
        arguments += f" --batch-size {images}"
        commands = [common.training(arguments, options.data, run) for run in runs]
        if meets:
            shared = Path(place) / "steps"
            shared.write_bytes(bytes(jobs * COUNT.size))
            start = [sys.executable, __file__, "--meet", str(shared)]
            commands = [[*start, str(job), *command[3:]] for job, command in enumerate(commands)]
        common.run_all(commands, threads)
        return sum(
            images / statistics.median(common.step_seconds(run, images)[WARM_UP:]) for run in runs
        )


def _train_and_meet(shared: Path, place: int, arguments: list[str]) -> None:
    """Run `hvdtrain train` with a barrier before each step: counters in a file in memory."""
    from hvdtrain import cli
    from hvdtrain.host.activity import Activity

    with shared.open("r+b") as file:
        counters = mmap.mmap(file.fileno(), 0)
    start_step = Activity.step

    def meet(self: Activity, number: int) -> None:
        start_step(self, number)
        COUNT.pack_into(counters, place * COUNT.size, number)
        until = time.monotonic() + LONGEST_WAIT
        while COUNT.unpack_from(counters, (1 - place) * COUNT.size)[0] < number:
            os.sched_yield()
            if time.monotonic() > until:
                sys.exit(f"the other job has not reached step {number}")

    Activity.step = meet  # type: ignore[method-assign]
    cli.main(arguments)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="packed CIFAR-10")
    parser.add_argument("--images", type=int, default=64, help="images per step over all ranks")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, default=700, help="steps per job")
    parser.add_argument("--window", type=int, default=20, help="steps that are timed as one")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
