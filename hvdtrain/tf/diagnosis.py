"""Where a bad step of a Keras model went wrong: it is run again, and each layer is looked at."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.tf.reduction import sums
from hvdtrain.tf.step import Steps
from hvdtrain.world import World

Sighting = tuple[int, str, bool]  # number and name of a layer; whether its weights are bad


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
    with _watched(steps, sightings):
        _, gradients = steps.gradients(*arguments)
    seen = [sighting for theirs in here.gather(sightings) for sighting in theirs]
    if here.size > 1:
        gradients = sums(gradients, "diagnosis")
    if seen:
        _, layer, has_bad_weights = min(seen)
        why = "nor are its weights" if has_bad_weights else "input and weights are"
        return f"the output of {layer} is the first that is not finite ({why})"
    norms = [float(np.linalg.norm(each.numpy().astype(np.float64))) for each in gradients]
    names = [weight.path for weight in steps.weights]
    bad = [name for name, norm in zip(names, norms, strict=True) if not np.isfinite(norm)]
    if bad:  # backward goes from the last to the first
        return f"all outputs are finite, and the gradient of {bad[-1]} is the first that is not"
    largest = int(np.argmax(norms))
    return (
        f"run again, the norm of all gradients is {float(np.linalg.norm(norms)):.3g}, the largest "
        f"part of it {norms[largest]:.3g} in {names[largest]}"
    )


@contextmanager
def _watched(steps: Steps, sightings: list[Sighting]) -> Iterator[None]:
    """Note the layers that emit what is not finite from what is."""
    layers = list(steps.model.layers)
    before = [layer.call for layer in layers]
    for number, layer in enumerate(layers):
        layer.call = _looking(number, layer, layer.call, sightings)
    try:
        yield
    finally:
        for layer, call in zip(layers, before, strict=True):
            layer.call = call


def _looking(
    number: int, layer: Any, call: Callable[..., Any], sightings: list[Sighting]
) -> Callable[..., Any]:
    def look(*given: Any, **options: Any) -> Any:
        output = call(*given, **options)
        if _are_finite(given) and not _are_finite(output):
            sightings.append((number, layer.name, not _are_finite(layer.weights)))
        return output

    return look


def _are_finite(values: Any) -> bool:
    found = (tf.convert_to_tensor(each) for each in tf.nest.flatten(values) if each is not None)
    numbers = (each for each in found if each.dtype.is_floating)
    return all(bool(tf.reduce_all(tf.math.is_finite(each))) for each in numbers)
