"""Compares hvdtrain on one rank with a hand-written PyTorch loop on the same data.

    python benchmarks/overhead.py [--model cnn] [--images 64] [--precision bf16] [--threads N]
                                  [--device cuda]

Both train the same model from the same seed on the same images in channels_last with fused SGD.
The loop has the images in memory, normalises them, and reads the loss of every step. A round is
one job of each side, in turns; its value is the median over windows of steps without the first
ones.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import common
from comparison import compare

WARM_UP = 2  # windows of each job that do not count


def main() -> None:
    """Compare the seconds per step of both sides."""
    options = _options()
    if options.data is not None:
        _loop(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        from hvdtrain.data import synth

        synth(data, options.images * options.steps, common.CLASSES, size=common.SIZE)
        compare(
            f"{options.model}, {options.precision}, one rank x {options.threads} thread(s) on "
            f"{options.device}, {options.images} images per step",
            "s",
            {
                "hvdtrain": lambda number: _ours(options, data, Path(folder) / f"run{number}"),
                "plain loop": lambda _: _theirs(options, data),
            },
            options.rounds,
            goals={"plain loop": 1.1},
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--images", type=int, default=64, help="images per step")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=400, help="steps per job")
    parser.add_argument("--window", type=int, default=20, help="steps that are timed as one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    return parser.parse_args()


def _ours(options: argparse.Namespace, data: Path, run: Path) -> float:
    arguments = f"--model {options.model} --precision {options.precision}"
    arguments += f" --threads {options.threads} --batch-size {options.images}"
    arguments += f" --device {options.device}"
    arguments += f" --max-steps {options.steps} --log-every {options.window}"
    common.run_all([common.training(arguments, data, run)], options.threads)
    return statistics.median(common.step_seconds(run, options.images)[WARM_UP:])


def _theirs(options: argparse.Namespace, data: Path) -> float:
    command = [sys.executable, __file__, "--data", str(data)]
    for name in ("model", "images", "precision", "threads", "device", "steps", "window"):
        command += [f"--{name}", str(getattr(options, name))]
    return float(json.loads(common.run_all([command], options.threads)[0]))


def _loop(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(options.threads)
    loop = common.PlainLoop(options.model, options.data, options.precision, device=options.device)
    windows = []
    for first in range(0, options.steps, options.window):
        began = time.perf_counter()
        for step in range(first, first + options.window):
            loop.step(step * options.images, options.images)
        windows.append((time.perf_counter() - began) / options.window)
    print(statistics.median(windows[WARM_UP:]))


if __name__ == "__main__":
    main()
