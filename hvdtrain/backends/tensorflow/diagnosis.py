"""Diagnosis of a bad step of a Keras model: runs it again and checks each layer's output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.step import Steps
from hvdtrain.health.badstep import Sighting, as_words
from hvdtrain.keras.optimizer import sums
from hvdtrain.world import World


def diagnose(
    steps: Steps, world: World, arguments: tuple[Any, ...], seed: Callable[[], Any]
) -> str:
    """Run a step again without updates; return what is wrong with it, in words. Collective.

    This changes running statistics.

    Args:
        arguments: of `Steps.gradients`.
        seed: sets the generators to their state at the start of the step.
    """
    sightings: list[Sighting] = []
    seed()
    with _watched(steps, world.rank, sightings):
        _, gradients = steps.gradients(*arguments)
    seen = [sighting for rank_sightings in world.gather(sightings) for sighting in rank_sightings]
    if world.size > 1:
        gradients = sums(gradients, "diagnosis")
    norms = {
        weight.path: float(np.linalg.norm(gradient.numpy().astype(np.float64)))
        for weight, gradient in zip(steps.weights, gradients, strict=True)
    }
    return as_words(seen, norms, {name: place for place, name in enumerate(norms)})


@contextmanager
def _watched(steps: Steps, rank: int, sightings: list[Sighting]) -> Iterator[None]:
    """Note the layers that return values that are not finite for finite inputs."""
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

    def look(*inputs: Any, **options: Any) -> Any:
        output = call(*inputs, **options)
        if _are_finite(inputs) and not _are_finite(output):
            has_bad_weights = not _are_finite(layer.weights)
            sightings.append(Sighting(number, layer.name, rank, has_bad_weights))
        return output

    return look


def _are_finite(values: Any) -> bool:
    tensors = (
        tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(values) if tensor is not None
    )
    numbers = (tensor for tensor in tensors if tensor.dtype.is_floating)
    return all(bool(tf.reduce_all(tf.math.is_finite(tensor))) for tensor in numbers)
