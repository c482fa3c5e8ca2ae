"""From a configuration to a session of Keras."""

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import quiet, world
from hvdtrain.activity import Activity
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.shards import read_index
from hvdtrain.errors import UsageError
from hvdtrain.frameworks import REMARKS, mirrored_devices
from hvdtrain.parallel.plan import replicated
from hvdtrain.tf.build import build_model, build_optimizer
from hvdtrain.tf.mirrored import MirroredSteps, make_strategy
from hvdtrain.tf.session import KerasSession
from hvdtrain.tf.start import (
    before_any_model,
    check_backend,
    start_horovod,
    use_gpus,
    use_own_threads,
)
from hvdtrain.tf.step import Steps
from hvdtrain.training.feed import open_splits
from hvdtrain.training.normalise import normalisation
from hvdtrain.training.precheck import check_images, check_started
from hvdtrain.training.staging import staged
from hvdtrain.training.stall import patience, stalled
from hvdtrain.world import World


def open_session(config: TrainConfig, here: World) -> KerasSession:
    """Check everything that can be checked before the first step, then build it. Collective.

    Raises:
        UsageError, DataError: for whatever a user can get wrong.
    """
    check_started(config, here)
    check_backend()
    index = staged(read_index(config.data), config.stage, here)
    check_images(config, index)
    strategy, gpus = _devices(config, here)
    keras.backend.clear_session()  # names of layers count on in a process
    with strategy.scope() if strategy else nullcontext():
        model = build_model(config, index.classes, index.image_shape[0])
        optimizer = build_optimizer(config, model)
    start_horovod(here, sum(_bytes(weight) for weight in model.trainable_weights))
    mirrors = int(strategy.num_replicas_in_sync) if strategy else 0
    train_rows, held_rows = order.holdout(
        index.splits["train"].count, config.holdout, index.hash, config.seed
    )
    normal = normalisation(config.normalise, index, train_rows, here)
    steps = Steps(model, optimizer, config, normal, here.size, mirrors)
    names = [layer.name for layer in model.layers if layer.weights] or [model.name]
    saved = {id(weight) for weight in model.weights}
    session = KerasSession(
        config=config,
        world=here,
        index=index,
        plan=replicated(names, here.size, None, None),
        shapes={weight.path: tuple(weight.shape) for weight in model.weights},
        parameters=sum(int(np.prod(weight.shape)) for weight in model.trainable_weights),
        activity=Activity(*world.notes(here.rank), patience(config), stalled),
        normalisation=normal,
        train_rows=train_rows,
        held_rows=held_rows,
        splits=open_splits(index, here, reads=True),
        model=model,
        optimizer=optimizer,
        steps=steps,
        mirrored=MirroredSteps(steps, strategy) if strategy else None,
        seeds=[each for each in model.variables if id(each) not in saved],
        gpus=gpus,
    )
    session.trace()
    return session


def _devices(config: TrainConfig, here: World) -> tuple[Any, int]:
    """The strategy of a mirrored plan, None for others, and how many GPUs this rank uses.

    Raises:
        UsageError: if there are not those that are asked for.
    """
    devices = mirrored_devices(config.plan)
    if here.size > 1 and (config.plan == "single" or devices is not None):
        raise UsageError(
            f"--plan {config.plan} runs on one rank, not on {here.size}: use --plan dp"
        )
    there = len(tf.config.list_physical_devices("GPU"))
    if config.device == "cuda" and not there:
        raise UsageError("--device cuda, but TensorFlow sees no GPU here: use --device cpu")
    with before_any_model(), quiet.without(REMARKS):
        use_own_threads(here)
        if config.device == "cpu":
            if there:
                tf.config.set_visible_devices([], "GPU")
            gpus = 0
        elif devices is None:
            gpus = use_gpus([here.local_rank])
        else:
            gpus = use_gpus(range(min(devices or there, there)))
        if devices is not None:
            return make_strategy(config.plan or "", devices, gpus, here), gpus
        tf.zeros(1)  # TensorFlow begins, with its remarks
    return None, gpus


def _bytes(weight: keras.Variable) -> int:
    return int(np.prod(weight.shape)) * int(tf.as_dtype(weight.dtype).size)
