"""hvdtrain's Horovod on Keras 3 against plain Keras and against MirroredStrategy, images/s.

    python benchmarks/keras.py --data DIR [--images 64] [--rounds 5]

The CIFAR-10 CNN under `fit`, fp32, Adam, one global batch, two cores: one process with two
threads; MirroredStrategy on two logical CPU devices; two ranks with one thread each; and the bound
of the same round, two processes beside each other that train half of the batch each and say
nothing to one another. All four read the same samples by the same pipeline. To be run in the
clone's folder.
"""

import argparse
import json
import sys
from pathlib import Path

import common

from hvdtrain.launch import mpirun

RANKS = "hvdtrain, 2 ranks x 1 thread"


def main() -> None:
    """Run the rounds and print the rates and their ratios."""
    options = _options()

    def rate(images: int, threads: int, *more: str, ranks: int = 1, jobs: int = 1) -> float:
        fit = [sys.executable, "-m", "benchmarks.keras_fit", "--data", str(options.data)]
        fit += ["--images", str(images), "--steps", str(options.steps), *more]
        command = [*mpirun(ranks), *fit] if ranks > 1 else fit
        printed = common.run_all([command] * jobs, threads, TF_CPP_MIN_LOG_LEVEL="2")
        last = [json.loads(each.splitlines()[-1]) for each in printed]
        return sum(float(each["images_per_second"]) for each in last)

    whole = options.images
    sides = {
        "plain Keras, 2 threads": lambda _: rate(whole, 2),
        "MirroredStrategy, 2 devices": lambda _: rate(whole, 2, "--replicas", "2"),
        RANKS: lambda _: rate(whole, 1, ranks=2),
        "bound: no communication": lambda _: rate(whole // 2, 1, jobs=2),
    }
    rates = dict(zip(sides, common.rounds(options.rounds, list(sides.values())), strict=True))
    print(f"cnn, fp32, global batch {whole}; images/s:")
    for name, found in rates.items():
        print(f"{name:>30}: {common.spread(found, ',.0f')}")
    own = rates.pop(RANKS)
    for name, found in rates.items():
        ratios = [mine / theirs for mine, theirs in zip(own, found, strict=True)]
        print(f"{'2 ranks : ' + name:>40}: {common.spread(ratios)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="packed CIFAR-10")
    parser.add_argument("--images", type=int, default=64, help="images a step, over all ranks")
    parser.add_argument("--steps", type=int, default=400, help="steps of a job")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
