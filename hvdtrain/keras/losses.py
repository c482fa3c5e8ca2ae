"""Compiled losses: the mean over ranks is right only for means over samples."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.keras import dataset

MEANS = ("sum_over_batch_size", "mean")
TOLERANCE = 1e-3  # relative; losses are computed in fp32 at least


class MeanLoss:
    """A loss of a compiled model that raises UsageError if it is not a mean over samples.

    What is known of the loss is checked when a step is traced. Its values are checked when a step
    runs: that of a batch must be the mean of those of the batch's halves.

    Attributes:
        is_due: whether the next call compares.
        values: of the batch, of its two halves as a mean, and of the larger half, when they were
            last compared.
    """

    def __init__(self, name: str, loss: Any, model: keras.Model) -> None:
        self.name, self.model = name, model
        self.loss: Any = loss.loss if isinstance(loss, MeanLoss) else loss  # of an earlier fit
        with tf.init_scope():
            self.is_due = tf.Variable(True, trainable=False)
            self.values = tf.Variable([0.0] * 3, trainable=False)

    def __call__(self, labels: Any, outputs: Any, weights: Any = None) -> Any:
        """Return the loss, as Keras calls it; the errors end the tracing of a step."""
        reduction = getattr(self.loss, "reduction", MEANS[0])
        means = MEANS if weights is not None else (*MEANS, "mean_with_sample_weight")
        if reduction not in means:
            raise UsageError(
                f"the loss of {self.name} has reduction={reduction!r}, which is not a mean over "
                f"samples, so averaging over ranks changes it: use reduction={MEANS[0]!r}"
            )
        is_masked = any(hasattr(output, "_keras_mask") for output in tf.nest.flatten(outputs))
        if is_masked or getattr(self.loss, "ignore_class", None) is not None:
            raise UsageError(
                f"the loss of {self.name} is a mean over unmasked values, and ranks differ in the "
                "number of these: remove the mask from the output (as mask_zero=False does) or "
                "ignore_class from the loss, and pass sample weights"
            )
        layers = self.model._flatten_layers()
        if dataset.uneven and any(layer._get_own_losses() for layer in layers):
            raise UsageError(
                "activity regularizers and add_loss ignore sample weights, which a batch of "
                f"{max(dataset.uneven)} images needs on these ranks: choose a batch_size with "
                "which all batches divide evenly, the last of an epoch too, or remove these losses"
            )
        value = self.loss(labels, outputs, weights)
        tf.cond(self.is_due, lambda: self._compare(value, labels, outputs, weights), lambda: False)
        return value

    def _compare(self, value: Any, *batch: Any) -> Any:
        def mean_of(rows: slice) -> Any:
            part = [None if values is None else values[rows] for values in flat]
            return self.loss(*tf.nest.pack_sequence_as(batch, part))

        flat = tf.nest.flatten(batch)
        if flat[0].shape[0] == 1:
            return False
        count = tf.shape(flat[0])[0]
        middle = (count + 1) // 2
        part = tf.cast(middle / count, value.dtype)
        first, second = mean_of(slice(None, middle)), mean_of(slice(middle, None))
        mean = tf.where(count > 1, first * part + second * (1 - part), value)
        larger = tf.maximum(abs(first), abs(second))
        self.values.assign(tf.cast([value, mean, larger], tf.float32))
        self.is_due.assign(False)
        return False

    def fault(self) -> str:
        """Return what is wrong if the values of the last comparison differ, else nothing."""
        whole, mean, larger = map(float, self.values.numpy())
        if not abs(whole - mean) > TOLERANCE * larger:
            return ""
        return (
            f"the loss of {self.name} is {whole:.5g} for a batch, but {mean:.5g} as the mean over "
            "its halves, so averaging over ranks changes it: return one value per sample"
        )


def watched_losses(model: keras.Model) -> list[MeanLoss]:
    """Return the losses of the compiled model, each in a `MeanLoss` from now on.

    Keras makes them when it first traces a step; the list is empty until then.
    """
    compiled = model._compile_loss
    watched: list[MeanLoss] = []

    def put() -> None:
        watched[:] = [MeanLoss(flat.name, flat.loss, model) for flat in compiled._flat_losses]
        compiled._flat_losses = [
            flat._replace(loss=loss)
            for flat, loss in zip(compiled._flat_losses, watched, strict=True)
        ]

    def build(*data: Any) -> None:
        type(compiled).build(compiled, *data)
        put()

    if compiled is not None:
        compiled.build = build
        if compiled.built:
            put()
            model.make_train_function(force=True)  # a step that is traced already has no checks
    return watched
