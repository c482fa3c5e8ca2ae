"""From a configuration to a Keras model and its optimizer."""

from typing import Any

import keras

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.models import find
from hvdtrain.tf.cnn import cnn

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp64": "float64"}


def build_model(config: TrainConfig, classes: int, image_size: int) -> keras.Model:
    """The model of a run, its weights from the seed; images [n, size, size, 3] to logits.

    Raises:
        UsageError: if there is no such model, or it is not one that a run can train.
    """
    keras.config.set_dtype_policy(POLICIES[config.precision])
    keras.utils.set_random_seed(config.seed)
    if config.model == "cnn":
        return cnn(classes, image_size, config.seed)
    models.check_name(config.model)
    if config.model in models.REGISTRY:
        raise UsageError(
            f"--framework tensorflow has no {config.model}: there is cnn, and "
            "package.module:function for a Keras model of your own"
        )
    function = find.find_function(config.model)
    made = find.call(config.model, function, classes, image_size, {})
    check_model(config.model, made, classes, image_size)
    return made


def check_model(name: str, made: object, classes: int, image_size: int) -> None:
    """Refuse what a step cannot train.

    Raises:
        UsageError: saying what is wrong with it.
    """
    if not isinstance(made, keras.Model):
        raise UsageError(
            f"model {name!r} returned a {type(made).__name__}: with --framework tensorflow it "
            "must return a keras.Model"
        )
    if not made.built:
        made.build((None, image_size, image_size, 3))
    shape = tuple(made.compute_output_shape((2, image_size, image_size, 3)))
    if shape != (2, classes):
        raise UsageError(
            f"model {name!r} emits shape {shape} for 2 images, not (2, {classes}): "
            "it must emit one logit for each class"
        )
    last = getattr(made.layers[-1], "activation", None) if made.layers else None
    if last is keras.activations.softmax:
        raise UsageError(
            f"model {name!r} ends in a softmax, which belongs to the loss: let it emit logits"
        )
    if not made.trainable_weights:
        raise UsageError(f"model {name} has no parameters that are trained")
    paths = [weight.path for weight in made.weights]
    if len(set(paths)) < len(paths):
        raise UsageError(f"model {name!r} has two weights of one name: name its layers apart")


def build_optimizer(config: TrainConfig, model: keras.Model) -> Any:
    """The optimizer of a run, with its variables; its constants are Keras's own."""
    rate = config.learning_rate()
    if config.optimizer == "sgd":
        nesterov = config.momentum > 0
        own = keras.optimizers.SGD(rate, momentum=config.momentum, nesterov=nesterov)
    elif config.optimizer == "adam":
        own = keras.optimizers.Adam(rate)
    else:
        own = keras.optimizers.AdamW(rate, weight_decay=config.weight_decay)
    own.build(model.trainable_variables)
    return own
