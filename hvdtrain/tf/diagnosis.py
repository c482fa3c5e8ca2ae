"""Where a bad step of a Keras model went wrong: it is run again, and each layer is looked at."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.tf.reduction import sums
from hvdtrain.tf.step import Steps
from hvdtrain.training.badstep import Sighting, in_words
from hvdtrain.world import World


def diagnose(
    steps: Steps, here: World, arguments: tuple[Any, ...], seed: Callable[[], Any]
) -> str:
    """Run a step again without updating anything; what is wrong with it, in words. Collective.

    Running statistics are changed.

    Args:
        arguments: of `Steps.gradients`.
        seed: makes generators as they were when the step began.
    """
    sightings: list[Sighting] = []
    seed()
    with _watched(steps, here.rank, sightings):
        _, gradients = steps.gradients(*arguments)
    seen = [sighting for theirs in here.gather(sightings) for sighting in theirs]
    if here.size > 1:
        gradients = sums(gradients, "diagnosis")
    norms = {
        weight.path: float(np.linalg.norm(gradient.numpy().astype(np.float64)))
        for weight, gradient in zip(steps.weights, gradients, strict=True)
    }
    return in_words(seen, norms, {name: place for place, name in enumerate(norms)})


@contextmanager
def _watched(steps: Steps, rank: int, sightings: list[Sighting]) -> Iterator[None]:
    """Note the layers that emit what is not finite from what is."""
    layers = list(steps.model.layers)
    before = [layer.call for layer in layers]
    for number, layer in enumerate(layers):
        layer.call = _looking(number, layer, rank, sightings)
    try:
        yield
    finally:
        for layer, call in zip(layers, before, strict=True):
            layer.call = call


def _looking(number: int, layer: Any, rank: int, sightings: list[Sighting]) -> Callable[..., Any]:
    call = layer.call

    def look(*given: Any, **options: Any) -> Any:
        output = call(*given, **options)
        if _are_finite(given) and not _are_finite(output):
            has_bad_weights = not _are_finite(layer.weights)
            sightings.append(Sighting(number, layer.name, rank, has_bad_weights))
        return output

    return look


def _are_finite(values: Any) -> bool:
    found = (tf.convert_to_tensor(each) for each in tf.nest.flatten(values) if each is not None)
    numbers = (each for each in found if each.dtype.is_floating)
    return all(bool(tf.reduce_all(tf.math.is_finite(each))) for each in numbers)
