"""A Keras model, its optimizer, and a training step of them as one traced function."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import models
from hvdtrain.backends.tensorflow.models import NAMES, make
from hvdtrain.checkpoint.tensorfile import DTYPES
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.errors import UsageError, one_line
from hvdtrain.keras.optimizer import sums
from hvdtrain.keras.ranks import is_float
from hvdtrain.models import find
from hvdtrain.options.sections import is_exempt, smoothing_of
from hvdtrain.world import World

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp64": "float64"}


def build_model(config: TrainConfig, classes: int, image_size: int) -> keras.Model:
    """Return the model of a run, from images [n, size, size, 3] to logits; weights by the seed.

    Raises:
        UsageError: if there is no such model, or a run cannot train it.
    """
    keras.config.set_floatx("float64" if config.precision == "fp64" else "float32")
    keras.config.set_dtype_policy(POLICIES[config.precision])
    keras.utils.set_random_seed(config.seed)
    if config.model == "cnn":
        model: object = cnn(classes, image_size, config.seed)
    else:
        models.check_name(config.model)
        if config.model in NAMES:
            made = make(config.model, classes, image_size, config.patch_size, config.seed)
            return checked(config.model, made, classes, image_size)
        if config.model in models.REGISTRY or config.model.startswith(models.LIBRARIES):
            raise UsageError(
                f"--framework tensorflow has no model {config.model}: use cnn, {', '.join(NAMES)} "
                "or package.module:function for your own Keras model"
            )
        function = find.find_function(config.model)
        model = find.call(config.model, function, classes, image_size, config.patch_size)
    return checked(config.model, model, classes, image_size)


def checked(name: str, model: object, classes: int, image_size: int) -> keras.Model:
    """Return the model that was made, after building it, if a step can train it.

    Raises:
        UsageError: with what is wrong with it.
    """
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"model {name!r} returned a {type(model).__name__}: with --framework tensorflow it "
            "must return a keras.Model"
        )
    try:
        output = model(np.zeros((2, image_size, image_size, 3), keras.config.floatx()))
        shape = tuple(output.shape)
    except Exception as error:
        raise UsageError(
            f"model {name!r} does not turn images of {image_size}x{image_size} into one tensor: "
            f"{one_line(error)}"
        ) from error
    if shape != (2, classes):
        raise UsageError(
            f"model {name!r} returns shape {shape} for 2 images, not (2, {classes}): "
            "return one logit per class"
        )
    _check_loss(name, model)
    _check_weights(name, model)
    return model


def _check_loss(name: str, model: keras.Model) -> None:
    last = model.layers[-1] if model.layers else model
    is_softmax = getattr(last, "activation", None) is keras.activations.softmax
    if is_softmax or isinstance(last, keras.layers.Softmax):
        raise UsageError(
            f"model {name!r} ends in a softmax, which belongs to the loss: return logits"
        )


def check_no_losses(model: keras.Model) -> None:
    """Raise UsageError if the last forward pass of the model added losses."""
    if model.losses:
        raise UsageError(
            f"model {model.name!r} has losses of its own (regularisers, add_loss), which a run "
            "ignores: remove them, and use --weight-decay"
        )


def _check_weights(name: str, model: keras.Model) -> None:
    if not model.trainable_weights:
        raise UsageError(f"model {name} has no trainable parameters: make some layers trainable")
    check_names(weight.path for weight in model.weights)
    for weight in model.weights:
        if weight.dtype not in DTYPES:
            raise UsageError(
                f"{weight.path} has dtype {weight.dtype}, which a checkpoint cannot hold: "
                "use another dtype for it"
            )


def check_names(paths: Any) -> None:
    """Raise UsageError if two variables have the same name: a checkpoint stores them by name."""
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise UsageError(
                f"the model has two variables {path}: give its layers different names"
            )
        seen.add(path)


def is_undecayed(variable: Any) -> bool:
    """Return whether a variable is exempt from weight decay."""
    path = str(variable.path)
    return is_exempt(path, path.rpartition("/")[0], len(variable.shape))


def build_optimizer(config: TrainConfig, model: keras.Model) -> Any:
    """Return the optimizer of a run, built, with the default constants of Keras.

    Raises:
        UsageError: if the states of two parameters have the same name.
    """
    rate = config.learning_rate()
    if config.optimizer == "sgd":
        nesterov = config.momentum > 0
        optimizer = keras.optimizers.SGD(rate, momentum=config.momentum, nesterov=nesterov)
    elif config.optimizer == "adam":
        optimizer = keras.optimizers.Adam(rate)
    else:
        optimizer = keras.optimizers.AdamW(rate, weight_decay=config.weight_decay)
        exempt = [variable for variable in model.trainable_variables if is_undecayed(variable)]
        optimizer.exclude_from_weight_decay(var_list=exempt)
    optimizer.build(model.trainable_variables)
    check_names(variable.path for variable in optimizer.variables)
    return optimizer


def cnn(classes: int, image_size: int, seed: int | None = None) -> keras.Model:
    """Return the CNN, from float images [n, size, size, 3] to logits [n, classes].

    It has 282,250 parameters for 10 classes and images of 32x32. The softmax belongs to the loss
    (`from_logits=True`). Layers have the names of the components in PyTorch.

    Args:
        seed: for the weights; None uses Keras's own generator.
    """
    layers = keras.layers
    conv = {"kernel_size": 3, "padding": "same", "activation": "relu"}

    # The head computes in fp32 even if the layers before it compute in bf16.
    precise = "float64" if keras.config.dtype_policy().name == "float64" else "float32"

    def kernel(number: int) -> keras.initializers.Initializer:
        return keras.initializers.GlorotUniform(seed=None if seed is None else seed + number)

    return keras.Sequential(
        [
            layers.Input((image_size, image_size, 3)),
            layers.Conv2D(32, name="conv1", kernel_initializer=kernel(0), **conv),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, name="conv2", kernel_initializer=kernel(1), **conv),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(64, "relu", name="dense", kernel_initializer=kernel(2)),
            layers.Dense(classes, name="head", kernel_initializer=kernel(3), dtype=precise),
        ],
        name="cnn",
    )


class Done(NamedTuple):
    """Results of a traced step, as tensors.

    Attributes:
        loss_sum: over this rank's samples.
        norm: of all gradients.
        is_bad: whether the gradients are not finite or too large.
        exposed_seconds: from the last gradient to the last reduced one.
    """

    loss_sum: Any
    norm: Any
    is_bad: Any
    exposed_seconds: Any


class Steps:
    """The traced functions of one rank.

    Images are uint8 [n, H, W, C], labels int64 [n]; n is 0 on a rank without samples of a batch.
    The loss is the mean over the samples of the global batch, so the sum of all ranks' gradients
    is the gradient.

    Args:
        normalisation: mean and deviation per channel.
        ranks: number of ranks that reduce their gradients.
        mirrors: number of devices of MirroredStrategy, whose optimizer adds up their gradients;
            0 without one.
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
        self.mean, self.std = (np.asarray(values, kind) for values in normalisation)
        self.weights = list(model.trainable_variables)
        # Running statistics: all ranks get the mean, weighted by samples. Frozen weights are among
        # these variables; those that no forward has changed keep their exact bits.
        self.statistics = [weight for weight in model.non_trainable_weights if is_float(weight)]
        # A variable, not a constant: TensorFlow evaluates operations on constants once, before the
        # first step. This includes all-reduces, which the other ranks would miss in later steps.
        self.zero = tf.Variable(0, dtype=self.dtype, trainable=False)
        self.forget()

    def forget(self) -> None:
        """Discard the traced functions, so that the next steps trace them again."""
        self.train = tf.function(self.once)
        self.evaluate = tf.function(self._evaluate, reduce_retracing=True)

    def trace(self, images: np.ndarray, labels: np.ndarray, whole: Any) -> None:
        """Trace a step on such a batch, without running it."""
        self.train.get_concrete_function(images, labels, whole)

    def prepare(self, images: Any) -> Any:
        """Return normalised images, in the dtype of the model."""
        return (tf.cast(images, self.dtype) / 255 - self.mean) / self.std

    def gradients(self, images: Any, labels: Any, whole: Any) -> tuple[Any, list[Any]]:
        """Return the sum of the losses, and this rank's part of each gradient.

        Args:
            whole: number of samples of the global batch.
        """
        if images.shape[0] == 0:  # layers do not accept an empty batch
            zero = tf.convert_to_tensor(self.zero)
            nothing = [
                tf.fill(weight.shape, tf.cast(zero, weight.dtype)) for weight in self.weights
            ]
            return zero, nothing
        with tf.GradientTape() as tape:
            logits = tf.cast(self.model(self.prepare(images), training=True), self.dtype)
            loss_sum = tf.reduce_sum(self._losses(logits, labels))
            loss = loss_sum / whole
        gradients = tape.gradient(loss, self.weights)
        dense = [
            tf.zeros_like(weight) if gradient is None else tf.convert_to_tensor(gradient)
            for weight, gradient in zip(self.weights, gradients, strict=True)
        ]
        return loss_sum, dense

    def _losses(self, logits: Any, labels: Any) -> Any:
        part = smoothing_of(self.config.loss)
        if not part:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        classes = logits.shape[-1]
        targets = tf.one_hot(labels, classes, dtype=self.dtype) * (1 - part) + part / classes
        return tf.nn.softmax_cross_entropy_with_logits(targets, logits)

    def once(self, images: Any, labels: Any, whole: Any) -> Done:
        """Do one step; the arguments are those of `gradients`."""
        before = [tf.identity(variable) for variable in self.statistics]
        loss_sum, gradients = self.gradients(images, labels, whole)
        fraction = tf.cast(images.shape[0], self.dtype) / whole
        gradients, exposed = self._reduced(gradients, fraction, before)
        norm = tf.linalg.global_norm([tf.cast(gradient, self.dtype) for gradient in gradients])
        is_good = tf.math.is_finite(norm) & (norm <= self.config.bad_step.limit)
        # With mirrors, each device sees only its own gradients: a bad step ends the run after the
        # update.
        if self.mirrors:
            self.optimizer.apply(self._decayed(gradients), self.weights)
        else:
            tf.cond(is_good, lambda: self._update(gradients, norm), lambda: self._assign(before))
        return Done(loss_sum, norm, ~is_good, exposed)

    def _reduced(
        self, gradients: list[Any], fraction: Any, before: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """Return the sums over all ranks, and the seconds that the all-reduce took.

        Args:
            fraction: this rank's part of the samples, 0 to 1.
            before: the statistics before the forward pass.
        """
        statistics = [
            tf.convert_to_tensor(variable) * tf.cast(fraction, variable.dtype)
            for variable in self.statistics
        ]
        if statistics:
            changed = [
                tf.reduce_any(tf.convert_to_tensor(variable) != was)
                for variable, was in zip(self.statistics, before, strict=True)
            ]
            statistics.append(tf.cast(tf.stack(changed), self.dtype))
        if self.mirrors and statistics:  # the optimizer adds the gradients up
            context = tf.distribute.get_replica_context()
            self._assign_means(context.all_reduce(tf.distribute.ReduceOp.SUM, statistics))
        if self.ranks == 1:
            return gradients, tf.zeros((), tf.float64)
        with tf.control_dependencies(gradients):
            start = tf.timestamp()
        reduced = sums([*gradients, *statistics], "step")
        with tf.control_dependencies(reduced):
            end = tf.timestamp()
        self._assign_means(reduced[len(gradients) :])
        return reduced[: len(gradients)], end - start

    def _assign_means(self, reduced: Sequence[Any]) -> None:
        """Assign the sums of statistics.

        Args:
            reduced: the sums, and last a vector: the number of ranks that changed each statistic.
        """
        if not reduced:
            return
        *sums_, changed = reduced
        values = [
            tf.where(count > 0, value, tf.convert_to_tensor(variable))
            for variable, value, count in zip(
                self.statistics, sums_, tf.unstack(changed, len(sums_)), strict=True
            )
        ]
        self._assign(values)

    def _assign(self, statistics: Sequence[Any]) -> None:
        for variable, value in zip(self.statistics, statistics, strict=True):
            variable.assign(value)

    def _update(self, gradients: list[Any], norm: Any) -> None:
        if self.config.clip_norm is not None:
            scale = tf.minimum(tf.ones((), norm.dtype), self.config.clip_norm / norm)
            gradients = [gradient * tf.cast(scale, gradient.dtype) for gradient in gradients]
        self.optimizer.apply(self._decayed(gradients), self.weights)

    def _decayed(self, gradients: list[Any]) -> list[Any]:
        """Return gradients with the weight decay added, as in PyTorch, unless AdamW adds it."""
        decay = self.config.weight_decay / max(1, self.mirrors)
        if not decay or self.config.optimizer == "adamw":
            return gradients
        return [
            tf.identity(gradient)  # as a tensor of the condition's graph, like the others
            if is_undecayed(weight)
            else gradient + decay * tf.convert_to_tensor(weight)
            for gradient, weight in zip(gradients, self.weights, strict=True)
        ]

    def _evaluate(self, images: Any, labels: Any) -> tuple[Any, Any]:
        """Return the sum of losses, and the number of correct answers."""
        logits = tf.cast(self.model(self.prepare(images), training=False), self.dtype)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        right = tf.math.argmax(logits, axis=-1) == labels
        return tf.reduce_sum(losses), tf.reduce_sum(tf.cast(right, tf.int64))


def make_strategy(plan: str, devices: int, gpus: int, world: World) -> tf.distribute.Strategy:
    """Return a strategy for GPUs, or for logical CPU devices if there are none.

    Args:
        plan: as the user typed it.
        devices: their number; 0 for all GPUs, or for one CPU device per thread of this rank.
        gpus: number of GPUs that TensorFlow sees.

    Raises:
        UsageError: if there are fewer GPUs.
        RuntimeError: if TensorFlow is already initialised.
    """
    if gpus:
        if devices > gpus:
            raise UsageError(
                f"--plan {plan} needs {devices} GPUs, but TensorFlow sees {gpus}: use fewer"
            )
        return tf.distribute.MirroredStrategy([f"GPU:{i}" for i in range(devices or gpus)])
    count = devices or world.threads
    processor = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(processor, parts)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])


class MirroredSteps:
    """The steps of `Steps` on the devices of a strategy."""

    def __init__(self, steps: Steps, strategy: tf.distribute.Strategy) -> None:
        self.steps, self.strategy = steps, strategy
        self.count = int(strategy.num_replicas_in_sync)
        self.forget()

    def forget(self) -> None:
        """Discard the traced function, so that the next step traces it again."""
        self._traced = tf.function(self._on_all)

    def train(self, images: np.ndarray, labels: np.ndarray, whole: Any) -> Done:
        """Do one step; each device trains on a contiguous part of the batch."""
        done: Done = self._traced(*self._parts(images, labels), whole)
        return done

    def trace(self, images: np.ndarray, labels: np.ndarray, whole: Any) -> None:
        """Trace a step on such a batch, without running it."""
        self._traced.get_concrete_function(*self._parts(images, labels), whole)

    def _parts(self, *arrays: np.ndarray) -> list[Any]:
        cuts = order.split(len(arrays[0]), [1] * self.count)
        return [self._spread([array[start:stop] for start, stop in cuts]) for array in arrays]

    def _spread(self, values: Sequence[np.ndarray]) -> Any:
        def of(context: Any) -> Any:
            return tf.constant(values[context.replica_id_in_sync_group])

        return self.strategy.experimental_distribute_values_from_function(of)

    def _on_all(self, images: Any, labels: Any, whole: Any) -> Done:
        done: Done = self.strategy.run(self.steps.once, args=(images, labels, whole))
        local_results = self.strategy.experimental_local_results
        return Done(
            tf.add_n(local_results(done.loss_sum)),
            tf.constant(np.nan),  # only a limit of --on-bad-step needs it, which excludes mirrors
            tf.reduce_any(tf.stack(local_results(done.is_bad))),
            tf.zeros((), tf.float64),
        )
