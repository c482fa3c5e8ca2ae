"""`--plan adaptive` against static plans, with a busy process on one rank's core for half a run.

    python benchmarks/adaptive.py [--model cnn] [--images 64] [--steps 1200] [--rounds 3]
        [--busy 1] [--arms dp,adaptive]

Two ranks, each bound to a core, with one thread. From a quarter of the steps to three quarters
one process (or `--busy` of them) that does nothing but compute shares the core of rank 1. Plans:
data parallel with equal shares, with the shares that would be best if the load were always there
(2 to 1 with one process), a pipeline, and adaptive, each in turns. Then data parallel and
adaptive without any load: what watching costs. Seconds are those of the steps; a ratio is above 1
where adaptive is faster.

What can be had at most: with one process the loaded core is half as fast for half of the steps.
Shares of 2 to 1 then take 4/3 of an unloaded step throughout; whoever changed at once, and for
nothing, would take 1 in one half and 4/3 in the other: 8/7 = 1.143 times as fast.
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
SPIN = "while True: pass"
LOADED = ("dp", "dp uneven", "mp", "adaptive")
QUIET = ("dp", "adaptive")


def main() -> None:
    """Run all rounds and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--images", type=int, default=64, help="images a step")
    parser.add_argument("--steps", type=int, default=1200, help="of a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(LOADED), help="under load")
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
        given = str(folder / "uneven.json") if plan == "dp uneven" else plan
        arguments = f"--model {options.model} --batch-size {options.images} --plan {given}"
        arguments += f" --max-steps {options.steps}"
        busy = options.busy if has_load else 0
        return _run(arguments, source, folder / name, busy, options.steps)

    return run


def _run(arguments: str, source: Path, run: Path, busy: int, steps: int) -> float:
    """Seconds of the steps of one job, beside so many busy processes in their middle half."""
    pinned = ["core" if word == "none" else word for word in launch.mpirun(RANKS)]
    command = [*pinned, *common.training(arguments, source, run)]
    environment = os.environ | common.AS_ROOT
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    load: list[subprocess.Popen[bytes]] = []
    while process.poll() is None:
        time.sleep(0.05)
        done = _steps_done(run)
        if not load and steps / 4 <= done < 3 * steps / 4:
            spin = ["taskset", "-c", str(_core_of(process, 1)), sys.executable, "-c", SPIN]
            load = [subprocess.Popen(spin) for _ in range(busy)]
        if done >= 3 * steps / 4:
            for each in load:
                each.kill()
    for each in load:
        each.kill()
    if process.returncode:
        sys.exit(f"failed: {' '.join(command)}")
    if busy and not load:
        sys.exit("the run was over before its load began: use more --steps")
    _decisions(run)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return float(summary["train_seconds"])


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
    """The core that a rank is bound to."""
    for child in psutil.Process(job.pid).children(recursive=True):
        if child.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
            return int(child.cpu_affinity()[0])
    sys.exit(f"rank {rank} was not found")


def _decisions(run: Path) -> None:
    """Print what an adaptive run began with and decided."""
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if line["event"] == "plan" and "predicted_seconds" in line:
            said = f"{line['cause']}: {line['decision']}: " if "cause" in line else ""
            stages = " | ".join(
                f"{len(stage['components'])} on {stage['ranks']} by {stage['shares']}"
                for stage in line["stages"]
            )
            print(f"    {run.name}, step {line['step']}: {said}{stages}", flush=True)


def _print(
    arms: tuple[str, ...], has_load: bool, found: list[list[float]], options: argparse.Namespace
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
    for name, seconds in zip(arms, found, strict=True):
        print(f"{name:>10}: {common.spread(seconds, '.1f')} s")
    medians = [statistics.median(seconds) for seconds in found]
    best = min(range(len(arms) - 1), key=lambda arm: medians[arm])
    ratios = [a / b for a, b in zip(found[best], found[-1], strict=True)]
    print(f"  {arms[best]} / adaptive: {common.spread(ratios)}\n")


if __name__ == "__main__":
    main()
