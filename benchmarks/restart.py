"""Measures the seconds from the kill of a rank to the next step, and what they went to.

    python benchmarks/restart.py --data DIR [--model cnn] [--ranks 2] [--rounds 5]

Each round trains with `--restarts 1`, kills the last rank after the first checkpoint, and lets the
ranks that are left finish. `end of the job` lasts until the launcher has ended the other ranks and
starts again; the phases after it are those of rank 0 in summary.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
from comparison import add_row

STEPS, SAVE_EVERY = 300, "50 steps"


def main() -> None:
    """Print the median of each phase and of their sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    measured = [restart(options.model, options.data, options.ranks) for _ in range(options.rounds)]
    rows = {"from the kill to the next step": [sum(one.values()) for one in measured]}
    for name in dict.fromkeys(name for one in measured for name in one):
        rows[name] = [one.get(name, 0.0) for one in measured]
    columns = ["", f"{options.model}, {options.ranks} ranks, one killed"]
    for number, (name, seconds) in enumerate(rows.items()):
        text = f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"{name:>32}  {text}")
        add_row(columns, [name, text], options.rounds, None if number else measured)


def restart(model: str, data: str, ranks: int) -> dict[str, float]:
    """Train, kill the last rank, and return the seconds of each phase until the next step."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "hvdtrain", "train", "--model", model, "--data", data]
        command += ["--run", str(run), "--max-steps", str(STEPS), "--checkpoint-every", SAVE_EVERY]
        command += f"--threads 1 --ranks {ranks} --restarts 1 --eval-every 0".split()
        job = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            while not list((run / "checkpoints").glob("step-*")):
                if job.poll() is not None:
                    sys.exit(f"failed: {' '.join(command)}")
                time.sleep(0.01)
            rank_of(job.pid, ranks - 1).kill()
            killed = time.monotonic()
            assert job.stderr is not None
            lines, phases = [], {}
            for line in job.stderr:
                lines.append(line)
                if "restarting on" in line:
                    phases["end of the job"] = time.monotonic() - killed
            if job.wait() or not phases:
                sys.exit("".join(lines))
        finally:
            job.terminate()
            job.wait()
        startup: dict[str, float] = json.loads((run / "summary.json").read_text())["startup"]
        return phases | startup


def rank_of(launcher: int, rank: int) -> psutil.Process:
    """Return the process of a rank that a launcher has started."""
    for process in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            arguments = process.cmdline()
            is_python = bool(arguments) and Path(arguments[0]).name.startswith("python")
            if is_python and process.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
                return process
    raise RuntimeError(f"rank {rank} is not found")


if __name__ == "__main__":
    main()
