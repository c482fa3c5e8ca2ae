"""From a configuration to a Keras model and its optimizer."""

from typing import Any

import keras
import numpy as np

from hvdtrain import decay, models
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError, one_line
from hvdtrain.models import find
from hvdtrain.tf.cnn import cnn
from hvdtrain.training.checkpoint import partfile

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp64": "float64"}


def build_model(config: TrainConfig, classes: int, image_size: int) -> keras.Model:
    """The model of a run, its weights from the seed; images [n, size, size, 3] to logits.

    Raises:
        UsageError: if there is no such model, or it is not one that a run can train.
    """
    keras.config.set_floatx("float64" if config.precision == "fp64" else "float32")
    keras.config.set_dtype_policy(POLICIES[config.precision])
    keras.utils.set_random_seed(config.seed)
    if config.model == "cnn":
        made: object = cnn(classes, image_size, config.seed)
    else:
        models.check_name(config.model)
        if config.model in models.REGISTRY:
            raise UsageError(
                f"--framework tensorflow has no {config.model}: there is cnn, and "
                "package.module:function for a Keras model of your own"
            )
        function = find.find_function(config.model)
        made = find.call(config.model, function, classes, image_size, {})
    return checked(config.model, made, classes, image_size)


def checked(name: str, made: object, classes: int, image_size: int) -> keras.Model:
    """The model that was made, built, if a step can train it.

    Raises:
        UsageError: saying what is wrong with it.
    """
    if not isinstance(made, keras.Model):
        raise UsageError(
            f"model {name!r} returned a {type(made).__name__}: with --framework tensorflow it "
            "must return a keras.Model"
        )
    try:
        emitted = made(np.zeros((2, image_size, image_size, 3), keras.config.floatx()))
        shape = tuple(emitted.shape)
    except Exception as error:
        raise UsageError(
            f"model {name!r} cannot take images of {image_size}x{image_size} and give one tensor: "
            f"{one_line(error)}"
        ) from error
    if shape != (2, classes):
        raise UsageError(
            f"model {name!r} emits shape {shape} for 2 images, not (2, {classes}): "
            "it must emit one logit for each class"
        )
    _check_loss(name, made)
    _check_weights(name, made)
    return made


def _check_loss(name: str, model: keras.Model) -> None:
    last = model.layers[-1] if model.layers else model
    is_softmax = getattr(last, "activation", None) is keras.activations.softmax
    if is_softmax or isinstance(last, keras.layers.Softmax):
        raise UsageError(
            f"model {name!r} ends in a softmax, which belongs to the loss: let it emit logits"
        )
    if model.losses:
        raise UsageError(
            f"model {name!r} has losses of its own (regularisers), which a run does not add: "
            "leave them out, and use --weight-decay"
        )


def _check_weights(name: str, model: keras.Model) -> None:
    if not model.trainable_weights:
        raise UsageError(f"model {name} has no parameters that are trained")
    check_names(weight.path for weight in model.weights)
    for weight in model.weights:
        if weight.dtype not in partfile.DTYPES:
            raise UsageError(f"{weight.path} is of {weight.dtype}, which a checkpoint cannot hold")


def check_names(paths: Any) -> None:
    """Raise UsageError if two variables have one name, by which a checkpoint keeps them."""
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise UsageError(f"the model has two variables {path}: name its layers apart")
        seen.add(path)


def is_undecayed(config: TrainConfig, variable: Any) -> bool:
    """Whether weight decay leaves a variable alone."""
    kinds, path = decay.parse(config.no_decay), str(variable.path)
    return decay.is_exempt(kinds, path, path.rpartition("/")[0], len(variable.shape))


def build_optimizer(config: TrainConfig, model: keras.Model) -> Any:
    """The optimizer of a run, with its variables; its constants are Keras's own.

    Raises:
        UsageError: if it would keep two parameters' states under one name.
    """
    rate = config.learning_rate()
    if config.optimizer == "sgd":
        nesterov = config.momentum > 0
        own = keras.optimizers.SGD(rate, momentum=config.momentum, nesterov=nesterov)
    elif config.optimizer == "adam":
        own = keras.optimizers.Adam(rate)
    else:
        own = keras.optimizers.AdamW(rate, weight_decay=config.weight_decay)
        free = [each for each in model.trainable_variables if is_undecayed(config, each)]
        own.exclude_from_weight_decay(var_list=free)
    own.build(model.trainable_variables)
    check_names(variable.path for variable in own.variables)
    return own
