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

from comparison import add_row


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
    columns = ["", *(f"{ranks} rank(s)" for ranks in measured)]
    names = list(dict.fromkeys(name for rounds in measured.values() for name in rounds[0]))
    for name in ["", *names]:
        row = _row(name, measured)
        print("  ".join(f"{cell:>24}" for cell in row))
        add_row(columns, row, options.rounds, None if name else measured)


def _row(phase: str, measured: dict[int, list[dict[str, float]]]) -> list[str]:
    """Return the seconds of a phase by number of ranks; without a name, of all phases."""
    row = [phase or "from the command to the first step"]
    for rounds in measured.values():
        seconds = [one.get(phase, 0.0) if phase else sum(one.values()) for one in rounds]
        row.append(f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")
    return row


def start(model: str, data: str, ranks: int, *more: str) -> dict[str, float]:
    """Train for one step; return the seconds of each phase before it.

    Args:
        more: options of `train`.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "hvdtrain", "train", "--model", model, "--data", data]
        command += ["--run", str(run), "--max-steps", "1", "--threads", "1", "--ranks", str(ranks)]
        command += more
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        phases: dict[str, float] = json.loads((run / "summary.json").read_text())["startup"]
    return phases


if __name__ == "__main__":
    main()
