"""Building a Keras model and its optimizer from a configuration."""

from typing import Any

import keras
import numpy as np

from hvdtrain import models
from hvdtrain.checkpoint.tensorfile import DTYPES
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError, one_line
from hvdtrain.models import find
from hvdtrain.options.sections import is_exempt

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
        if config.model in models.REGISTRY:
            raise UsageError(
                f"--framework tensorflow has no model {config.model}: use cnn, or "
                "package.module:function for your own Keras model"
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
