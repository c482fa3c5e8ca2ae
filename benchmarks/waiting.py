"""Measures how long a user waits for commands that do not train, and for a plan.

    python benchmarks/waiting.py --data DIR [--rounds 5]

Each round runs every command once, in random order, each as a process of its own that finds its
files in memory; one round before the others is not counted. `train` counts from the command to the
first step, and `--plan auto` what it adds before it: both are in summary.json. The plan of 200
components on 16 ranks counts seconds of the processor.
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from comparison import add_row
from solver import question
from startup import start

from hvdtrain.planner.solve import solve

COLUMNS = ["", "seconds", "goal", ""]
RUNS = 10  # that a report reads
LONGEST_JOB = 120  # seconds


def main() -> None:
    """Print a row per command: its seconds, the most that it should take, and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / f"run{number}" for number in range(RUNS)]
        for number, run in enumerate(runs):
            settings = f"--model cnn --data {options.data} --max-steps 20 --seed {number}"
            _run(f"{'train' if number else 'jobs submit --cluster local'} {settings} --run {run}")
        deadline = time.monotonic() + LONGEST_JOB
        while not (runs[0] / "summary.json").exists():
            if time.monotonic() > deadline:
                sys.exit(f"the job of {runs[0]} did not end in {LONGEST_JOB} s")
            time.sleep(0.1)
        seconds = _lines(options.data, runs, Path(folder))
        measured: dict[str, list[float]] = {name: [] for name in seconds}
        for number in range(options.rounds + 1):
            for name in random.sample(list(seconds), len(seconds)):
                value = seconds[name][1](number)
                if number:
                    measured[name].append(value)
    for name, values in measured.items():
        goal, middle = seconds[name][0], statistics.median(values)
        shown = f"{middle:.2f} s ({min(values):.2f} to {max(values):.2f})"
        row = [name, shown, f"{goal:g} s", "met" if middle <= goal else "missed"]
        print("  ".join(f"{cell:>32}" for cell in row), flush=True)
        add_row(COLUMNS, row, options.rounds, values)


def _lines(
    data: str, runs: list[Path], folder: Path
) -> dict[str, tuple[float, Callable[[int], float]]]:
    """Return by name the most seconds, and what measures a round."""
    show = "plan show --model resnet18 --ranks 4 --plan mp"
    report = f"report {' '.join(map(str, runs))} --to {folder}/report"
    return {
        "`plan show`, resnet18": (1, lambda _: _run(show)),
        "`jobs status` of a run": (1, lambda _: _run(f"jobs status {runs[0]}")),
        f"`report` of {RUNS} runs": (1, lambda number: _run(report + str(number))),
        "`train --ranks 2` to the first step": (2, lambda _: sum(start("cnn", data, 2).values())),
        "`--plan auto`, resnet18, two ranks": (
            20,
            lambda _: start("resnet18", data, 2, "--plan", "auto")["plan"],
        ),
        "solver, 200 components on 16 ranks": (0.3, _solve),
    }


def _run(command: str) -> float:
    """Run a command of hvdtrain; return its seconds."""
    began = time.perf_counter()
    words = [sys.executable, "-m", "hvdtrain", *command.split()]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _solve(number: int) -> float:
    problem = question(200, 16, number, None)
    began = time.process_time()
    solve(problem)
    return time.process_time() - began


if __name__ == "__main__":
    main()
