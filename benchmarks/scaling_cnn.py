"""Compares two ranks with one process on the CIFAR-10 CNN at a fixed global batch size.

    python benchmarks/scaling_cnn.py --data DIR [--images 64] [--precision bf16] [--rounds 5]

This is strong scaling on two cores as in Ajayi et al. (AJEST 2026), who report a speed-up of 1.24.
One process has two threads; two ranks have one thread each and half of the batch each. The bound
of the same round is two processes side by side that train half of the batch each without
communication. All three are `hvdtrain train`.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import common

WARM_UP = 2  # windows of each job that do not count
PAPER_A = 1.24


def main() -> None:
    """Run the rounds and print all three rates and their ratios."""
    options = _options()
    half = options.images // 2
    with tempfile.TemporaryDirectory() as folder:

        def rate(name: str, arguments: str, images: int, threads: int, jobs: int = 1) -> float:
            runs = [Path(folder) / f"{name}-{job}" for job in range(jobs)]
            arguments += f" --model cnn --precision {options.precision} --threads {threads}"
            arguments += f" --max-steps {options.steps} --log-every {options.window}"
            arguments += f" --batch-size {images}"
            common.run_all(
                [common.training(arguments, options.data, run) for run in runs], threads
            )
            return sum(
                images / statistics.median(common.step_seconds(run, images)[WARM_UP:])
                for run in runs
            )

        single, ranks, bound = common.rounds(
            options.rounds,
            [
                lambda number: rate(f"single{number}", "", options.images, 2),
                lambda number: rate(f"ranks{number}", "--ranks 2", options.images, 1),
                lambda number: rate(f"bound{number}", "", half, 1, jobs=2),
            ],
        )
    print(f"cnn, {options.precision}, global batch {options.images}; images/s:")
    for name, rates in (
        ("one process x 2 threads", single),
        ("2 ranks x 1 thread", ranks),
        ("bound: no communication", bound),
    ):
        print(f"{name:>24}: {common.spread(rates, ',.0f')}")
    gained = [
        ranks_rate / single_rate for ranks_rate, single_rate in zip(ranks, single, strict=True)
    ]
    reached = [
        ranks_rate / bound_rate for ranks_rate, bound_rate in zip(ranks, bound, strict=True)
    ]
    print(f"{'2 ranks : 1 process':>24}: {common.spread(gained)}; the paper's is {PAPER_A}")
    print(f"{'part of the bound':>24}: {common.spread(reached)}")


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
