"""Compares images/s of hvdtrain on Keras 3 with plain Keras and MirroredStrategy.

    python benchmarks/keras.py --data DIR [--images 64] [--rounds 5]

All sides run `fit` on the CIFAR-10 CNN, fp32, Adam, with the same global batch size on two cores:
one process with two threads; MirroredStrategy on two logical CPU devices; two ranks with one
thread each. The bound of the same round is two processes side by side that train half of the batch
each without communication. All four read the same samples through the same pipeline. Run it in the
folder of the clone.
"""

import argparse
import json
import sys
from pathlib import Path

import common
from comparison import compare

from hvdtrain.launch import mpirun


def main() -> None:
    """Compare the rates of all sides."""
    options = _options()

    def rate(images: int, threads: int, *more: str, ranks: int = 1, jobs: int = 1) -> float:
        fit = [sys.executable, "-m", "benchmarks.keras_fit", "--data", str(options.data)]
        fit += ["--images", str(images), "--steps", str(options.steps), *more]
        command = [*mpirun(ranks), *fit] if ranks > 1 else fit
        printed = common.run_all([command] * jobs, threads, TF_CPP_MIN_LOG_LEVEL="2")
        results = [json.loads(output.splitlines()[-1]) for output in printed]
        return sum(float(result["images_per_second"]) for result in results)

    whole = options.images
    sides = {
        "hvdtrain, 2 ranks x 1 thread": lambda _: rate(whole, 1, ranks=2),
        "plain Keras, 2 threads": lambda _: rate(whole, 2),
        "MirroredStrategy, 2 devices": lambda _: rate(whole, 2, "--replicas", "2"),
        "bound: no communication": lambda _: rate(whole // 2, 1, jobs=2),
    }
    compare(f"cnn on Keras, fp32, {whole} images per step", "images/s", sides, options.rounds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="packed CIFAR-10")
    parser.add_argument("--images", type=int, default=64, help="images per step over all ranks")
    parser.add_argument("--steps", type=int, default=400, help="steps per job")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
