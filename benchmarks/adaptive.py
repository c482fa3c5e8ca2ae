"""Compares `--plan adaptive` with static plans while another process loads the core of one rank.

    python benchmarks/adaptive.py [--model cnn] [--images 64] [--steps 1200] [--rounds 3]
        [--busy 1] [--arms dp,adaptive]

Two ranks run with one thread each, each bound to a core. During the middle half of the steps, one
process (or `--busy` processes) that only computes shares the core of rank 1. The plans take turns:
data parallel with equal shares, with the shares that would be best under permanent load (2 to 1
with one process), a pipeline, and adaptive. Then data parallel and adaptive run without load,
which shows the cost of watching. Seconds are those of the steps; a ratio is above 1 if adaptive is
faster.

The largest possible gain: with one process, the loaded core is half as fast for half of the steps.
Shares of 2 to 1 take 4/3 of an unloaded step throughout. An ideal run that migrates at once and at
no cost takes 1 in one half and 4/3 in the other, so it is 8/7 = 1.143x as fast.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import psutil

from hvdtrain import data, launch

RANKS, CLASSES = 2, 10
LOADED = ("dp", "dp uneven", "mp", "adaptive")
QUIET = ("dp", "adaptive")


def main() -> None:
    """Run all rounds and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--images", type=int, default=64, help="images per step")
    parser.add_argument("--steps", type=int, default=1200, help="steps per run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(LOADED), help="plans to run under load")
    parser.add_argument("--busy", type=int, default=1, help="processes on the core of rank 1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = data.synth(f"{folder}/data", 100 * options.images, CLASSES, size=32)
        uneven = {"stages": [{"ranks": [0, 1], "shares": [options.busy + 1, 1]}]}
        (Path(folder) / "uneven.json").write_text(json.dumps(uneven))
        loaded = tuple(arm for arm in options.arms.split(",") if arm)
        for arms, has_load in ((loaded, True), (QUIET, False)):
            if not arms:
                continue
            sides = [_side(name, Path(folder), made.folder, has_load, options) for name in arms]
            _print(arms, has_load, common.rounds(options.rounds, sides), options)


def _side(
    plan: str, folder: Path, source: Path, has_load: bool, options: argparse.Namespace
) -> Callable[[int], float]:
    def run(number: int) -> float:
        name = f"{plan.replace(' ', '-')}-{number}-{has_load}"
        plan_option = str(folder / "uneven.json") if plan == "dp uneven" else plan
        arguments = f"--model {options.model} --batch-size {options.images} --plan {plan_option}"
        arguments += f" --max-steps {options.steps}"
        busy = options.busy if has_load else 0
        return _run(arguments, source, folder / name, busy, options.steps)

    return run


def _run(arguments: str, source: Path, run: Path, busy: int, steps: int) -> float:
    """Return the seconds of the steps of one job; `busy` processes run during its middle half."""
    pinned = ["core" if word == "none" else word for word in launch.mpirun(RANKS)]
    command = [*pinned, *common.training(arguments, source, run)]
    environment = os.environ | common.AS_ROOT
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _wait_for(process, run, steps // 4)
    if busy and process.poll() is None:
        with common.busy(_core_of(process, 1), busy):
            _wait_for(process, run, 3 * steps // 4)
        if process.poll() is not None:
            sys.exit("the run ended before its load did: use more --steps")
    if process.wait():
        sys.exit(f"failed: {' '.join(command)}")
    _decisions(run)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return float(summary["train_seconds"])


def _wait_for(job: "subprocess.Popen[bytes]", run: Path, steps: int) -> None:
    """Wait until a run has done a number of steps, or has ended."""
    while job.poll() is None and _steps_done(run) < steps:
        time.sleep(0.05)


def _steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().splitlines()
    for line in reversed(lines):
        if b'"step"' in line and line.startswith(b"{") and line.endswith(b"}"):
            return int(json.loads(line).get("step", 0))
    return 0


def _core_of(job: "subprocess.Popen[bytes]", rank: int) -> int:
    """Return the core that a rank is bound to."""
    for child in psutil.Process(job.pid).children(recursive=True):
        if child.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
            return int(child.cpu_affinity()[0])
    sys.exit(f"rank {rank} was not found")


def _decisions(run: Path) -> None:
    """Print the first plan of an adaptive run and its decisions."""
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if line["event"] == "plan" and "predicted_seconds" in line:
            prefix = f"{line['cause']}: {line['decision']}: " if "cause" in line else ""
            stages = " | ".join(
                f"{len(stage['components'])} on {stage['ranks']} by {stage['shares']}"
                for stage in line["stages"]
            )
            print(f"    {run.name}, step {line['step']}: {prefix}{stages}", flush=True)


def _print(
    arms: tuple[str, ...],
    has_load: bool,
    seconds_by_arm: list[list[float]],
    options: argparse.Namespace,
) -> None:
    print(
        f"{options.model}, {options.steps} steps of {options.images} images, {RANKS} pinned ranks "
        "of 1 thread, "
        + (
            f"{options.busy} busy process(es) on one core from 1/4 to 3/4"
            if has_load
            else "no load"
        )
    )
    for name, seconds in zip(arms, seconds_by_arm, strict=True):
        print(f"{name:>10}: {common.spread(seconds, '.1f')} s")
    medians = [statistics.median(seconds) for seconds in seconds_by_arm]
    best = min(range(len(arms) - 1), key=lambda arm: medians[arm])
    ratios = [a / b for a, b in zip(seconds_by_arm[best], seconds_by_arm[-1], strict=True)]
    print(f"  {arms[best]} / adaptive: {common.spread(ratios)}\n")


if __name__ == "__main__":
    main()
