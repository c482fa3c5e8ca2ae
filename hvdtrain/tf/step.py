"""A training step of Keras as one traced function: forward, backward, all-reduce and update."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.tf.agreement import is_float
from hvdtrain.tf.build import is_undecayed
from hvdtrain.tf.reduction import sums


class Done(NamedTuple):
    """What a traced step gives: the sum of its losses, and how it went.

    Attributes:
        norm: of all gradients.
        exposed_seconds: from the last gradient to the last reduced one.
    """

    loss_sum: Any
    norm: Any
    is_bad: Any
    exposed_seconds: Any


class Steps:
    """The traced functions of one rank.

    Images are uint8 [n, H, W, C], labels int64 [n]; n is 0 on a rank that has no part of a batch.
    The loss is the mean over the samples of the global batch: each rank's gradients are parts of a
    sum.

    Args:
        normalisation: what is taken away from each channel, and what it is divided by.
        ranks: that reduce their gradients.
        mirrors: devices of MirroredStrategy, whose optimizer adds their gradients up; 0 without.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: Any,
        config: TrainConfig,
        normalisation: tuple[Sequence[float], Sequence[float]],
        ranks: int,
        mirrors: int = 0,
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.ranks, self.mirrors = ranks, mirrors
        self.dtype = tf.float64 if config.precision == "fp64" else tf.float32
        kind = self.dtype.as_numpy_dtype
        self.mean, self.std = (np.asarray(each, kind) for each in normalisation)
        self.weights = list(model.trainable_variables)
        # Running statistics: all take the mean, by samples, of what each found. Frozen weights are
        # among these; what no forward has changed stays as it is, to the bit.
        self.statistics = [each for each in model.non_trainable_weights if is_float(each)]
        # No constant: TensorFlow computes once, before the first step, what it is given constants
        # for, all-reduces among them, which the other ranks would wait for in the next.
        self.zero = tf.Variable(0, dtype=self.dtype, trainable=False)
        self.forget()

    def forget(self) -> None:
        """Trace anew what was traced."""
        self.train = tf.function(self.once)
        self.evaluate = tf.function(self._evaluate, reduce_retracing=True)

    def trace(self, images: np.ndarray, labels: np.ndarray, whole: Any) -> None:
        """Trace a step on such a batch, without making it."""
        self.train.get_concrete_function(images, labels, whole)

    def prepare(self, images: Any) -> Any:
        """Images as the model reads them."""
        return (tf.cast(images, self.dtype) / 255 - self.mean) / self.std

    def gradients(self, images: Any, labels: Any, whole: Any) -> tuple[Any, list[Any]]:
        """The sum of the losses, and this rank's part of each gradient.

        Args:
            whole: samples of the global batch.
        """
        if images.shape[0] == 0:  # which no layer takes
            zero = tf.convert_to_tensor(self.zero)
            nothing = [tf.fill(each.shape, tf.cast(zero, each.dtype)) for each in self.weights]
            return zero, nothing
        with tf.GradientTape() as tape:
            logits = tf.cast(self.model(self.prepare(images), training=True), self.dtype)
            loss_sum = tf.reduce_sum(self._losses(logits, labels))
            loss = loss_sum / whole
        found = tape.gradient(loss, self.weights)
        dense = [
            tf.zeros_like(weight) if each is None else tf.convert_to_tensor(each)
            for weight, each in zip(self.weights, found, strict=True)
        ]
        return loss_sum, dense

    def _losses(self, logits: Any, labels: Any) -> Any:
        part = self.config.label_smoothing
        if not part:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        classes = logits.shape[-1]
        targets = tf.one_hot(labels, classes, dtype=self.dtype) * (1 - part) + part / classes
        return tf.nn.softmax_cross_entropy_with_logits(targets, logits)

    def once(self, images: Any, labels: Any, whole: Any) -> Done:
        """One step; its arguments as those of `gradients`."""
        before = [tf.identity(each) for each in self.statistics]
        loss_sum, gradients = self.gradients(images, labels, whole)
        own = tf.cast(images.shape[0], self.dtype) / whole
        gradients, exposed = self._reduced(gradients, own, before)
        norm = tf.linalg.global_norm([tf.cast(each, self.dtype) for each in gradients])
        limit = self.config.gradient_limit
        is_good = tf.math.is_finite(norm)
        if limit is not None:
            is_good = is_good & (norm <= limit)
        if self.mirrors:  # each sees its own gradients: what is bad ends the run behind the update
            self.optimizer.apply(self._decayed(gradients), self.weights)
        else:
            tf.cond(is_good, lambda: self._update(gradients, norm), lambda: self._assign(before))
        return Done(loss_sum, norm, ~is_good, exposed)

    def _reduced(
        self, gradients: list[Any], own: Any, before: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """The sums over all ranks, and the seconds that this took.

        Args:
            own: this rank's part of the samples.
            before: the statistics as they were before the forward.
        """
        statistics = [
            tf.convert_to_tensor(each) * tf.cast(own, each.dtype) for each in self.statistics
        ]
        if statistics:
            changed = [
                tf.reduce_any(tf.convert_to_tensor(each) != was)
                for each, was in zip(self.statistics, before, strict=True)
            ]
            statistics.append(tf.cast(tf.stack(changed), self.dtype))
        if self.mirrors and statistics:  # the optimizer adds the gradients up
            context = tf.distribute.get_replica_context()
            self._take_over(context.all_reduce(tf.distribute.ReduceOp.SUM, statistics))
        if self.ranks == 1:
            return gradients, tf.zeros((), tf.float64)
        with tf.control_dependencies(gradients):
            began = tf.timestamp()
        found = sums([*gradients, *statistics], "step")
        with tf.control_dependencies(found):
            ended = tf.timestamp()
        self._take_over(found[len(gradients) :])
        return found[: len(gradients)], ended - began

    def _take_over(self, found: Sequence[Any]) -> None:
        """Assign sums of statistics, behind which it says for each how many ranks changed it."""
        if not found:
            return
        *sums_, changed = found
        values = [
            tf.where(count > 0, value, tf.convert_to_tensor(own))
            for own, value, count in zip(
                self.statistics, sums_, tf.unstack(changed, len(sums_)), strict=True
            )
        ]
        self._assign(values)

    def _assign(self, statistics: Sequence[Any]) -> None:
        for own, value in zip(self.statistics, statistics, strict=True):
            own.assign(value)

    def _update(self, gradients: list[Any], norm: Any) -> None:
        if self.config.clip_norm is not None:
            scale = tf.minimum(tf.ones((), norm.dtype), self.config.clip_norm / norm)
            gradients = [each * tf.cast(scale, each.dtype) for each in gradients]
        self.optimizer.apply(self._decayed(gradients), self.weights)

    def _decayed(self, gradients: list[Any]) -> list[Any]:
        """With the weight decay of an optimizer that has none of its own (as in PyTorch)."""
        decay = self.config.weight_decay / max(1, self.mirrors)
        if not decay or self.config.optimizer == "adamw":
            return gradients
        return [
            tf.identity(each)  # of the same graph as the others, inside a condition
            if is_undecayed(self.config, weight)
            else each + decay * tf.convert_to_tensor(weight)
            for each, weight in zip(gradients, self.weights, strict=True)
        ]

    def _evaluate(self, images: Any, labels: Any) -> tuple[Any, Any]:
        """Sum of losses, and number of right answers."""
        logits = tf.cast(self.model(self.prepare(images), training=False), self.dtype)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        right = tf.math.argmax(logits, axis=-1) == labels
        return tf.reduce_sum(losses), tf.reduce_sum(tf.cast(right, tf.int64))
