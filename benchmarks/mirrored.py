"""What a step of MirroredStrategy is made of, on logical CPU devices, against a single device; ms.

    python benchmarks/mirrored.py [--devices 2] [--rounds 5]

The CIFAR-10 CNN with Adam, fp32, on random images: a whole step, the same on two images, the sum
of the gradients over the devices alone, and that sum with the update of weights and optimizer.
Each side in a process of its own, with all cores, in turns. To be run in the clone's folder.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

IMAGES, SMALL = 64, 2
WARM_UP, STEPS = 20, 100
PARTS = (
    f"step on {IMAGES} images",
    f"step on {SMALL} images",
    "sum of gradients",
    "sum and update",
)


def main() -> None:
    """Run the rounds and print what each part takes."""
    options = _options()
    if options.side is not None:
        print(json.dumps(_measure(options.side)), flush=True)
        return
    import common  # of the script's folder, in which there is a keras.py, too

    found: dict[int, list[list[float]]] = {1: [], options.devices: []}

    def measured(devices: int) -> float:
        own = [sys.executable, "-m", "benchmarks.mirrored", "--side", str(devices)]
        printed = common.run_all([own], options.devices, TF_CPP_MIN_LOG_LEVEL="2")
        found[devices].append(json.loads(printed[0].splitlines()[-1]))
        return 0.0

    def side(devices: int) -> Callable[[int], float]:
        return lambda _: measured(devices)

    common.rounds(options.rounds, [side(devices) for devices in found])
    for place, part in enumerate(PARTS):
        for devices, rounds in found.items():
            name = "single device" if devices == 1 else f"{devices} mirrors"
            print(f"{part:>20}, {name:>13}: {common.spread([each[place] for each in rounds])}")


def _measure(devices: int) -> list[float]:
    """Milliseconds of each of PARTS, medians."""
    from hvdtrain import world
    from hvdtrain.config import TrainConfig
    from hvdtrain.tf.build import build_model, build_optimizer
    from hvdtrain.tf.mirrored import MirroredSteps, make_strategy
    from hvdtrain.tf.start import use_own_threads
    from hvdtrain.tf.step import Steps

    here = world.start()
    use_own_threads(here)
    config = TrainConfig(model="cnn", data="", framework="tensorflow")
    strategy = make_strategy("mirrored", devices, 0, here) if devices > 1 else None
    with strategy.scope() if strategy else nullcontext():
        model = build_model(config, 10, 32)
        optimizer = build_optimizer(config, model)
    unit = [0.0] * 3, [1.0] * 3
    steps = Steps(model, optimizer, config, unit, ranks=1, mirrors=devices if strategy else 0)
    whole: Any = MirroredSteps(steps, strategy) if strategy else steps
    draw = np.random.default_rng(0)
    found = []
    for images in (IMAGES, SMALL):
        pixels = draw.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
        given = pixels, draw.integers(0, 10, images), np.float32(images)
        found.append(_milliseconds(partial(whole.train, *given)))
    return [*found, *_parts(steps, optimizer, strategy)]


def _parts(steps: Any, optimizer: Any, strategy: Any) -> list[float]:
    """Milliseconds of the sum over devices alone, 0 on one, and with the update."""
    import tensorflow as tf

    gradients = [tf.ones(weight.shape) for weight in steps.weights]

    def add() -> Any:
        context = tf.distribute.get_replica_context()
        return tf.add_n([tf.reduce_sum(each) for each in context.all_reduce("SUM", gradients)])

    def apply() -> None:
        optimizer.apply(gradients, steps.weights)

    if strategy is None:
        return [0.0, _milliseconds(tf.function(apply))]
    parts = (tf.function(partial(strategy.run, work)) for work in (add, apply))
    return [_milliseconds(part) for part in parts]


def _milliseconds(work: Callable[[], object]) -> float:
    for _ in range(WARM_UP):
        work()
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
