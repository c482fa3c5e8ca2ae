"""Measures the parts of a MirroredStrategy step on logical CPU devices and on a single device.

    python benchmarks/mirrored.py [--devices 2] [--rounds 5]

The model is the CIFAR-10 CNN with Adam, fp32, on random images. The parts are a whole step, a step
on two images, the sum of the gradients over the devices alone, and that sum with the update of
weights and optimizer, in milliseconds. Each side runs in a separate process with all cores, in
turns. Run it in the folder of the clone.
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
    """Run the rounds and print the milliseconds of each part."""
    options = _options()
    if options.side is not None:
        print(json.dumps(_measure(options.side)), flush=True)
        return
    import common  # not at the top: its folder contains a keras.py, which would hide Keras

    results: dict[int, list[list[float]]] = {1: [], options.devices: []}

    def measured(devices: int) -> float:
        command = [sys.executable, "-m", "benchmarks.mirrored", "--side", str(devices)]
        printed = common.run_all([command], options.devices, TF_CPP_MIN_LOG_LEVEL="2")
        results[devices].append(json.loads(printed[0].splitlines()[-1]))
        return 0.0

    def side(devices: int) -> Callable[[int], float]:
        return lambda _: measured(devices)

    common.rounds(options.rounds, [side(devices) for devices in results])
    for place, part in enumerate(PARTS):
        for devices, rounds in results.items():
            name = "single device" if devices == 1 else f"{devices} mirrors"
            print(f"{part:>20}, {name:>13}: {common.spread([parts[place] for parts in rounds])}")


def _measure(devices: int) -> list[float]:
    """Return the median milliseconds of each of PARTS."""
    from hvdtrain import world
    from hvdtrain.backends.tensorflow.step import (
        MirroredSteps,
        Steps,
        build_model,
        build_optimizer,
        make_strategy,
    )
    from hvdtrain.config import TrainConfig
    from hvdtrain.keras.ranks import use_own_threads

    job = world.start()
    use_own_threads(job)
    config = TrainConfig(model="cnn", data="", framework="tensorflow")
    strategy = make_strategy("mirrored", devices, 0, job) if devices > 1 else None
    with strategy.scope() if strategy else nullcontext():
        model = build_model(config, 10, 32)
        optimizer = build_optimizer(config, model)
    unit = [0.0] * 3, [1.0] * 3
    steps = Steps(model, optimizer, config, unit, ranks=1, mirrors=devices if strategy else 0)
    whole: Any = MirroredSteps(steps, strategy) if strategy else steps
    draw = np.random.default_rng(0)
    milliseconds = []
    for images in (IMAGES, SMALL):
        pixels = draw.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
        batch = pixels, draw.integers(0, 10, images), np.float32(images)
        milliseconds.append(_milliseconds(partial(whole.train, *batch)))
    return [*milliseconds, *_parts(steps, optimizer, strategy)]


def _parts(steps: Any, optimizer: Any, strategy: Any) -> list[float]:
    """Return the milliseconds of the sum over devices alone, and of the sum with the update.

    The first one is 0 on a single device.
    """
    import tensorflow as tf

    gradients = [tf.ones(weight.shape) for weight in steps.weights]

    def add() -> Any:
        context = tf.distribute.get_replica_context()
        return tf.add_n(
            [tf.reduce_sum(gradient) for gradient in context.all_reduce("SUM", gradients)]
        )

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
