"""Shows what a step on one rank of a CPU spends its time on, by model, precision and threads.

    python benchmarks/profiles.py [--models cnn,resnet18] [--rounds 3]

Each round measures every setting once, in random order, by `hvdtrain bench step`. Figures are
medians of the rounds. An operation's share is that of the operations of PyTorch, by PyTorch's
profiler, in steps after the timed ones.
"""

import argparse
import json
import random
import statistics
import sys
from itertools import product
from typing import Any, NamedTuple

import common
from comparison import add_row

LISTED = 5
# By model: images per step, steps that are timed
STEPS = {
    "cnn": (64, 100),
    "resnet18": (32, 15),
    "resnet50": (32, 4),
    "vit_tiny": (64, 15),
    "vit_b16": (8, 4),
}
COLUMNS = ["", "images/s", "of the matrix rate", "longest operations, and their share"]


class Setting(NamedTuple):
    """A model on one rank."""

    model: str
    precision: str
    threads: int


def main() -> None:
    """Measure all settings, print a row for each, and add it to the record if there is one."""
    options = _options()
    precisions, threads = ("fp32", "bf16"), (1, 2)
    settings = [Setting(*values) for values in product(options.models, precisions, threads)]
    results: dict[Setting, list[dict[str, Any]]] = {setting: [] for setting in settings}
    for number in range(options.rounds):
        for setting in random.Random(number).sample(settings, len(settings)):
            results[setting].append(_bench_step(setting))
    for setting, measured in results.items():
        row = _row(setting, measured)
        print(" | ".join(row), flush=True)
        add_row(COLUMNS, row, options.rounds, measured)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(STEPS))
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def _bench_step(setting: Setting) -> dict[str, Any]:
    images, steps = STEPS[setting.model]
    command = [
        sys.executable,
        *["-m", "hvdtrain", "bench", "step", "--json", "--model"],
        setting.model,
    ]
    command += f"--precision {setting.precision} --threads {setting.threads}".split()
    command += f"--batch-size {images} --steps {steps} --device cpu".split()
    result: dict[str, Any] = json.loads(common.run_all([command], setting.threads)[0])
    return result


def _row(setting: Setting, measured: list[dict[str, Any]]) -> list[str]:
    rates = [result["images_per_second"] for result in measured]
    shares = [result["matrix_share"] for result in measured]
    names = {name for result in measured for name in result["operations"]}
    parts = {
        name: statistics.median(_share(result["operations"], name) for result in measured)
        for name in names
    }
    longest = sorted(parts, key=lambda name: -parts[name])[:LISTED]
    images = STEPS[setting.model][0]
    title = f"{setting.model}, {setting.precision}, {setting.threads} thread(s), {images} images"
    return [
        title,
        f"{_rate(statistics.median(rates))} ({_rate(min(rates))} to {_rate(max(rates))})",
        f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})",
        ", ".join(f"`{name}` {parts[name]:.0%}" for name in longest),
    ]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(operations: dict[str, float], name: str) -> float:
    return operations.get(name, 0.0) / sum(operations.values())


if __name__ == "__main__":
    main()
