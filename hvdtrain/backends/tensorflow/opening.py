"""Building a Keras session from a configuration."""

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.build import build_model, build_optimizer
from hvdtrain.backends.tensorflow.session import KerasFaults, KerasSession, KerasState
from hvdtrain.backends.tensorflow.step import MirroredSteps, Steps, make_strategy
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.engine.feed import check_images, check_started, normalisation, open_splits, staged
from hvdtrain.engine.folders import shared_index
from hvdtrain.engine.session import Device
from hvdtrain.errors import UsageError
from hvdtrain.health.failure import patience, stalled
from hvdtrain.host import output
from hvdtrain.host.activity import Activity
from hvdtrain.keras.ranks import (
    before_any_model,
    check_backend,
    start_horovod,
    use_gpus,
    use_own_threads,
)
from hvdtrain.options.requests import Mirrored, check_one_rank
from hvdtrain.plan.plan import replicated
from hvdtrain.world import World, notes


def open_session(config: TrainConfig, world: World) -> KerasSession:
    """Check everything that can be checked before the first step, then build it. Collective.

    Raises:
        UsageError, DataError: if the options or the data are invalid.
    """
    check_started(config, world)
    check_backend()
    index = staged(shared_index(config, world), config.stage, world)
    check_images(config, index)
    strategy, gpus = _devices(config, world)
    keras.backend.clear_session()  # restarts the numbers in layer names
    with strategy.scope() if strategy else nullcontext():
        model = build_model(config, index.classes, index.image_shape[0])
        optimizer = build_optimizer(config, model)
    start_horovod(world, sum(_bytes(weight) for weight in model.trainable_weights))
    mirrors = int(strategy.num_replicas_in_sync) if strategy else 0
    train_rows, held_rows = order.holdout(
        index.splits["train"].count, config.holdout, index.hash, config.seed
    )
    normal = normalisation(config.normalise, index, train_rows, world)
    steps = Steps(model, optimizer, config, normal, world.size, mirrors)
    names = [layer.name for layer in model.layers if layer.weights] or [model.name]
    saved = {id(weight) for weight in model.weights}
    mirrored = MirroredSteps(steps, strategy) if strategy else None
    session = KerasSession(
        config=config,
        world=world,
        activity=Activity(*notes(world.rank), patience(config), stalled),
        device=_device(gpus, mirrored.count if mirrored else 1),
        state=KerasState(
            plan=replicated(names, world.size, None, None),
            shapes={weight.path: tuple(weight.shape) for weight in model.weights},
            model=model,
            optimizer=optimizer,
            world=world,
        ),
        faults=KerasFaults(steps, mirrored),
        steps=steps,
        mirrored=mirrored,
        seeds=[variable for variable in model.variables if id(variable) not in saved],
        parameters=sum(int(np.prod(weight.shape)) for weight in model.trainable_weights),
        index=index,
        normalisation=normal,
        train_rows=train_rows,
        held_rows=held_rows,
        splits=open_splits(index, world, reads=True),
    )
    session.trace()
    return session


def _devices(config: TrainConfig, world: World) -> tuple[Any, int]:
    """Return the strategy of a mirrored plan, None for others, and this rank's number of GPUs.

    Raises:
        UsageError: if there are fewer devices than the options request.
    """
    check_one_rank(config.plan, world.size)
    request = config.plan_request
    available = len(tf.config.list_physical_devices("GPU"))
    if config.device == "cuda" and not available:
        raise UsageError("--device cuda: TensorFlow sees no GPU on this host: use --device cpu")
    with before_any_model(), output.without(output.TENSORFLOW_REMARKS):
        use_own_threads(world)
        if config.device == "cpu":
            if available:
                tf.config.set_visible_devices([], "GPU")
            gpus = 0
        elif isinstance(request, Mirrored):
            gpus = use_gpus(range(min(request.devices or available, available)))
        else:
            gpus = use_gpus([world.local_rank])
        if isinstance(request, Mirrored):
            return make_strategy(config.plan or "", request.devices or 0, gpus, world), gpus
        tf.zeros(1)  # initialises TensorFlow, which prints its remarks
    return None, gpus


def _device(gpus: int, count: int) -> Device:
    """Return the description of this rank's devices.

    Args:
        gpus: number of GPUs; 0 if the rank computes on the CPU.
        count: number of devices.
    """
    if not gpus:
        return Device(count=count)

    def memory_bytes(which: str) -> int:
        info = tf.config.experimental.get_memory_info
        return sum(int(info(f"GPU:{number}")[which]) for number in range(gpus))

    details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
    return Device(
        kind="cuda",
        accelerator=str(details.get("device_name", "unknown GPU")),
        count=count,
        memory_bytes=lambda: float(memory_bytes("current")),
        peak_memory_bytes=lambda: memory_bytes("peak"),
    )


def _bytes(weight: keras.Variable) -> int:
    return int(np.prod(weight.shape)) * int(tf.as_dtype(weight.dtype).size)
