"""Measures what each way to agree costs in test accuracy: the CNN on CIFAR-10, several seeds.

    python benchmarks/agreement_accuracy.py --data data/cifar10 --to DIR [--epochs 10] [--seeds 3]
                                            [--methods "exact;compress bf16;..."]

A run is `hvdtrain train --ranks 2` with the defaults of the CNN and one method. Runs are kept in
DIR by method and seed: started again, the program continues with those that are missing. The
difference is from the exact run of the same seed, with the 95 % interval of Student's t over the
seeds. Accuracy is that of the last epoch on the test images; time is not compared.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import common
from scipy import stats

EXACT = "exact"
METHODS = (
    f"{EXACT};compress bf16;compress int8;compress topk:0.01;compress powersgd:2;sync local:8;"
    "sync diloco:32;sync elastic:8"
)


def main() -> None:
    """Train what is missing, seed by seed, and print the table after each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=METHODS)
    options = parser.parse_args()
    methods = options.methods.split(";")
    results: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for seed in range(options.seeds):
        for method in methods:
            results[method].append(_train(options, method, seed))
        _print(options, results)


def _train(options: argparse.Namespace, method: str, seed: int) -> dict[str, float]:
    """Return the accuracy of a run, and the bytes it has sent per step and rank."""
    run = options.to / f"{method.replace(' ', '-').replace(':', '-')}-{options.epochs}-{seed}"
    if not (run / "summary.json").exists():
        way = "" if method == EXACT else f"--{method}"
        arguments = f"--model cnn --epochs {options.epochs} --ranks 2 --threads 1 --seed {seed}"
        command = common.training(f"{arguments} {way} --resume auto", options.data, run)
        common.run_all([common.without_rate(command)], threads=1)
    summary = json.loads((run / "summary.json").read_text())
    sent = summary["agreement"]["sent_bytes_per_step"]
    return {"accuracy": summary["final"]["test_accuracy"], "sent": sent}


def _print(options: argparse.Namespace, results: dict[str, list[dict[str, float]]]) -> None:
    exact = [run["accuracy"] for run in results[EXACT]]
    print(f"CNN, CIFAR-10, {options.epochs} epochs, 2 ranks, {len(exact)} seeds")
    print(f"{'':>20}{'accuracy':>10}{'difference, points':>28}{'MB per step':>13}")
    for method, runs in results.items():
        accuracies = [run["accuracy"] for run in runs]
        differences = [100 * (a - b) for a, b in zip(accuracies, exact, strict=True)]
        sent = statistics.median(run["sent"] for run in runs)
        print(
            f"{method:>20}{statistics.mean(accuracies):>10.4f}{_with_interval(differences):>28}"
            f"{sent / 1e6:>13.3f}"
        )


def _with_interval(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:+.2f}"
    reach = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.2f} ({mean - reach:+.2f} to {mean + reach:+.2f})"


if __name__ == "__main__":
    main()
