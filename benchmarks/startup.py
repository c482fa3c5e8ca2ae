"""Measures the seconds from the command to the first step, and what they went to.

    python benchmarks/startup.py --data DIR [--ranks 1 2] [--rounds 5]

Each round starts `hvdtrain train` anew for each number of ranks, in random order, and reads the
phases of rank 0 in summary.json. One round before the others is not counted: it brings the files
into memory.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median


def main() -> None:
    """Print the median of each phase and of their sum, by number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    measured: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in options.ranks}
    for number in range(options.rounds + 1):
        for ranks in random.sample(options.ranks, len(options.ranks)):
            phases = start(options.model, options.data, ranks)
            if number:
                measured[ranks].append(phases)
    for ranks, rounds in measured.items():
        sums = sorted(sum(phases.values()) for phases in rounds)
        print(f"{ranks} rank(s): {median(sums):.2f} s ({sums[0]:.2f} to {sums[-1]:.2f})")
        for phase in rounds[0]:
            print(f"  {phase:>10} {median(phases.get(phase, 0.0) for phases in rounds):6.2f} s")


def start(model: str, data: str, ranks: int) -> dict[str, float]:
    """Train for one step; return the seconds of each phase before it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "hvdtrain", "train", "--model", model, "--data", data]
        command += ["--run", str(run), "--max-steps", "1", "--threads", "1", "--ranks", str(ranks)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        phases: dict[str, float] = json.loads((run / "summary.json").read_text())["startup"]
    return phases


if __name__ == "__main__":
    main()
