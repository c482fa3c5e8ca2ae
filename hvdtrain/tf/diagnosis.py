"""Where a bad step of a Keras model went wrong: it is run again, layer by layer."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.tf.step import Steps
from hvdtrain.world import World


def diagnose(steps: Steps, here: World, arguments: tuple[Any, ...]) -> str:
    """Run a step again without updating anything; what is wrong with it, in words. Collective.

    The generators are as they were when the step began. Running statistics are changed.
    """
    images, labels, counts, whole = arguments
    seen = here.gather(_first_bad_layer(steps, images) if counts else None)
    found = [each for each in seen if each is not None]
    if found:
        _, layer, has_bad_weights = min(found)
        why = "nor are its weights" if has_bad_weights else "input and weights are"
        return f"the output of {layer} is the first that is not finite ({why})"
    _, gradients = steps.gradients(images, labels, counts, whole)
    told = here.gather([each.numpy() for each in gradients])
    sums = [np.sum(parts, axis=0) for parts in zip(*told, strict=True)]
    norms = [float(np.linalg.norm(each.astype(np.float64))) for each in sums]
    names = [weight.path for weight in steps.weights]
    bad = [name for name, norm in zip(names, norms, strict=True) if not np.isfinite(norm)]
    if bad:  # backward goes from the last to the first
        return f"all outputs are finite, and the gradient of {bad[-1]} is the first that is not"
    largest = int(np.argmax(norms))
    return (
        f"run again, the norm of all gradients is {float(np.linalg.norm(norms)):.3g}, the largest "
        f"part of it {norms[largest]:.3g} in {names[largest]}"
    )


def _first_bad_layer(steps: Steps, images: np.ndarray) -> tuple[int, str, bool] | None:
    """Number and name of the first layer that emits what is not finite; are its weights bad too?

    None as well for a model that is no graph of layers, whose inside cannot be looked at.
    """
    try:
        layers = [each for each in steps.model.layers if not _is_input(each)]
        outputs = [layer.output for layer in layers]
    except AttributeError:
        return None
    inside = keras.Model(steps.model.inputs, outputs)
    emitted = inside(steps.prepare(images), training=True)
    emitted = emitted if isinstance(emitted, list) else [emitted]
    for number, (layer, output) in enumerate(zip(layers, emitted, strict=True)):
        if not _is_finite(output):
            return number, layer.name, not all(map(_is_finite, layer.weights))
    return None


def _is_input(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, keras.layers.InputLayer)


def _is_finite(value: Any) -> bool:
    number = tf.cast(tf.convert_to_tensor(value), tf.float64)
    return bool(tf.reduce_all(tf.math.is_finite(number)))
