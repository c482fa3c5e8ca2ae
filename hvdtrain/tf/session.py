"""A run's session in TensorFlow: a Keras model on each rank, or on the devices of one process."""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain import world
from hvdtrain.activity import Activity
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import read_index
from hvdtrain.errors import UsageError
from hvdtrain.frameworks import mirrored_devices
from hvdtrain.parallel.plan import replicated
from hvdtrain.tf import agreement, diagnosis
from hvdtrain.tf.build import build_model, build_optimizer
from hvdtrain.tf.mirrored import MirroredSteps, make_strategy
from hvdtrain.tf.start import check_backend, start_horovod, use_gpus, use_own_threads
from hvdtrain.tf.step import Steps
from hvdtrain.training.checkpoint.store import MODEL, OPTIMIZER, owners
from hvdtrain.training.feed import Feed, open_splits
from hvdtrain.training.randomness import step_seed
from hvdtrain.training.session import Result, Session, Shape, Taken
from hvdtrain.training.staging import staged
from hvdtrain.training.stall import patience, stalled
from hvdtrain.world import World

EVALUATION_IMAGES = 256  # a rank


@dataclass(kw_only=True)
class KerasSession(Session):
    """What a `Session` is, data parallel.

    Attributes:
        steps: the traced functions. mirrored: the same on the devices of a strategy.
        seeds: states of the generators that layers draw from.
        spoiled: a factor of what a layer emits, and when it is to be no number.
        rate: the learning rate that the optimizer has.
    """

    model: keras.Model
    optimizer: Any
    steps: Steps
    mirrored: MirroredSteps | None
    seeds: list[Any]
    gpus: int
    spoiled: tuple[Any, Callable[[], bool]] | None = None
    rate: float | None = None
    libraries = ("tensorflow", "tensorflow-cpu", "keras")

    @property
    @override
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    @override
    def accelerator(self) -> str | None:
        if not self.gpus:
            return None
        own = tf.config.get_visible_devices("GPU")[0]
        details = tf.config.experimental.get_device_details(own)
        return str(details.get("device_name", "unknown GPU"))

    @property
    @override
    def devices(self) -> int:
        return self.mirrored.count if self.mirrored else 1

    @property
    @override
    def loss_delay(self) -> int:
        return 1 if self.gpus else 0

    @property
    @override
    def evaluation_images(self) -> int:
        return EVALUATION_IMAGES * self.world.size

    @override
    def own_rows(self, batch: Rows, is_training: bool) -> tuple[Rows, Rows]:
        first, last = order.split(len(batch), [1] * self.world.size)[self.world.rank]
        return batch[first:last], batch[first:last]

    @override
    def train(self, feed: Feed, position: int, batch_size: int, rate: float) -> Result:
        if rate != self.rate:
            self.optimizer.learning_rate = self.rate = rate
        self._seed(position)
        began = time.perf_counter()
        with self.activity.doing("forward, backward, all-reduce and update"):
            done = (self.mirrored or self.steps).train(*self._arguments(feed, batch_size))
            exposed = float(done.exposed_seconds)
        seconds = time.perf_counter() - began
        return Result(
            read_loss=lambda: float(done.loss_sum),
            samples=len(feed.ids),
            norm=float(done.norm),
            is_bad=bool(done.is_bad),
            exposed_seconds=exposed,
            communication_seconds=exposed,  # the gradients travel once all of them are there
            bubble_seconds=0.0,
            compute_seconds=seconds - exposed,
        )

    def trace(self) -> None:
        """Trace a step on a whole batch: that is not a part of the first one's time."""
        batch = np.zeros(min(self.config.batch_size, len(self.train_rows)), np.int64)
        own, _ = self.own_rows(batch, is_training=True)
        images = np.zeros((len(own), *self.index.image_shape), np.uint8)
        arguments = self._arguments(Feed(images, own, own), len(batch))
        (self.mirrored or self.steps).trace(*arguments)

    def _arguments(self, feed: Feed, batch_size: int) -> tuple[Any, ...]:
        """What the traced step takes; an image that does not count for a rank without any."""
        kind = self.steps.dtype.as_numpy_dtype
        images, labels, counts = feed.images, feed.labels, kind(1)
        if not len(images):
            images, labels = np.zeros((1, *images.shape[1:]), np.uint8), np.zeros(1, np.int64)
            counts = kind(0)
        return images, labels, counts, kind(batch_size)

    @override
    def evaluate(self, batches: Iterable[tuple[Feed, int]]) -> tuple[float, float]:
        loss_sum, correct = 0.0, 0.0
        self._set_spoiled(is_training=False)
        for feed, _ in batches:
            if len(feed.images):
                losses, right = self.steps.evaluate(feed.images, feed.labels)
                loss_sum, correct = loss_sum + float(losses), correct + float(right)
        return loss_sum, correct

    @override
    def diagnose(self, taken: Taken) -> str:
        newest, _ = self.activity.now()
        self.activity.step(taken.step)
        self._seed(taken.position)
        kept = [each.numpy() for each in self.steps.statistics]
        arguments = self._arguments(taken.feed, taken.batch_size)
        said = diagnosis.diagnose(self.steps, self.world, arguments)
        for own, before in zip(self.steps.statistics, kept, strict=True):
            own.assign(before)
        self.activity.step(newest)
        return said

    @override
    def agree(self) -> None:
        told = self.world.gather(self.digests())
        if any(digests != told[0] for digests in told):
            agreement.broadcast(self.model.weights)

    @override
    def start_from(self, path: Path) -> str:
        raise UsageError("--weights does not go with --framework tensorflow: leave it out")

    @override
    def digests(self) -> dict[str, str]:
        return {weight.path: _digest(weight.numpy()) for weight in self.model.weights}

    def _kept(self) -> dict[str, Any]:
        """All variables that a checkpoint holds, by the names that they have there."""
        own = [each for each in self.optimizer.variables if each is not self._rate_variable()]
        found = {f"{MODEL}{weight.path}": weight for weight in self.model.weights}
        return found | {f"{OPTIMIZER}{each.path}": each for each in own}

    def _rate_variable(self) -> Any:
        return self.optimizer.learning_rate

    @override
    def share(self) -> dict[str, np.ndarray]:
        kept = self._kept()
        sizes = [int(np.prod(each.shape)) for each in kept.values()]
        whose = zip(kept.items(), owners(sizes, self.world.size), strict=True)
        own = [item for item, owner in whose if owner == self.world.rank]
        return {name: np.array(variable.numpy(), order="C") for name, variable in own}

    @override
    def expected(self, was_updated: bool) -> dict[str, Shape]:
        return {name: tuple(variable.shape) for name, variable in self._kept().items()}

    @override
    def put(self, found: Mapping[str, np.ndarray]) -> None:
        for name, variable in self._kept().items():
            variable.assign(found[name])

    @override
    def spoil(self, component: str | None, is_due: Callable[[], bool]) -> None:
        layers = {layer.name: layer for layer in self.model.layers if layer.weights}
        name = component or next(iter(layers), "")
        if name not in layers:
            raise UsageError(
                f"--inject nan: rank {self.world.rank} holds no layer {name!r}; "
                f"it holds {', '.join(layers)}"
            )
        factor = tf.Variable(1.0)
        layer, whole = layers[name], layers[name].call

        def spoiled(*given: Any, **options: Any) -> Any:
            output = whole(*given, **options)
            return output * tf.cast(factor, output.dtype)

        layer.call = spoiled
        self.spoiled = factor, is_due
        self.steps.forget()
        if self.mirrored is not None:
            self.mirrored.forget()

    def _set_spoiled(self, is_training: bool) -> None:
        if self.spoiled is not None:
            factor, is_due = self.spoiled
            factor.assign(float("nan") if is_training and is_due() else 1.0)

    @override
    def ask_for_memory(self, count: int) -> None:
        tf.zeros([count], tf.uint8)

    @override
    def memory_bytes(self) -> float:
        return float(self._gpu_memory("current")) if self.gpus else super().memory_bytes()

    @override
    def peak_memory_bytes(self) -> int:
        return self._gpu_memory("peak") if self.gpus else super().peak_memory_bytes()

    def _gpu_memory(self, which: str) -> int:
        return int(tf.config.experimental.get_memory_info("GPU:0")[which])

    @override
    def celsius(self) -> float:
        return float("nan") if self.gpus else super().celsius()

    def _seed(self, position: int) -> None:
        """What layers draw in a step depends on seed, position and rank alone."""
        self._set_spoiled(is_training=True)
        if self.seeds:
            seed = step_seed(self.config.seed, position, self.world.rank)
            for number, state in enumerate(self.seeds):
                words = np.array([seed >> 32, (seed + number) & 0xFFFFFFFF], np.uint32)
                state.assign(words)


def open_session(config: TrainConfig, here: World) -> KerasSession:
    """Check everything that can be checked before the first step, then build it. Collective.

    Raises:
        UsageError, DataError: for whatever a user can get wrong.
    """
    if config.ranks is not None and config.ranks != here.size:
        raise UsageError(
            f"--ranks {config.ranks}, but the launcher started {here.size}: leave --ranks out"
        )
    check_backend()
    devices = mirrored_devices(config.plan)
    if here.size > 1 and (config.plan == "single" or devices is not None):
        raise UsageError(
            f"--plan {config.plan} runs on one rank, not on {here.size}: use --plan dp"
        )
    use_own_threads(here)
    gpus = _gpus(config, here, devices)
    start_horovod(here)
    index = staged(read_index(config.data), config.stage, here)
    size = index.image_shape[0]
    _check_images(config, index.image_shape)
    train_rows, held_rows = order.holdout(
        index.splits["train"].count, config.holdout, index.hash, config.seed
    )
    strategy = None
    if devices is not None:
        strategy = make_strategy(config.plan or "", devices, gpus, here)
    with strategy.scope() if strategy else nullcontext():
        model = build_model(config, index.classes, size)
        optimizer = build_optimizer(config, model)
    replicas = int(strategy.num_replicas_in_sync) if strategy else 1
    normalisation = index.normalisation(config.normalise)
    steps = Steps(model, optimizer, config, normalisation, here.size, replicas)
    names = [layer.name for layer in model.layers if layer.weights]
    saved = {id(weight) for weight in model.weights}
    session = KerasSession(
        config=config,
        world=here,
        index=index,
        plan=replicated(names, here.size, None, None),
        shapes={weight.path: tuple(weight.shape) for weight in model.weights},
        parameters=sum(int(np.prod(weight.shape)) for weight in model.trainable_weights),
        activity=Activity(world.activity_path(), here.rank, patience(config), stalled),
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


def _gpus(config: TrainConfig, here: World, devices: int | None) -> int:
    """How many GPUs this rank uses, and nothing else sees any."""
    if config.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
        return 0
    found = use_gpus(here, every=devices is not None)
    if config.device == "cuda" and not found:
        raise UsageError("--device cuda, but TensorFlow sees no GPU here: use --device cpu")
    return found


def _check_images(config: TrainConfig, shape: tuple[int, int, int]) -> None:
    height, width, channels = shape
    if channels != 3 or height != width:
        raise UsageError(
            f"{config.data} holds images of {height}x{width}x{channels}: "
            "models need square images of 3 channels"
        )
    if config.image_size not in (None, height):
        raise UsageError(
            f"--image-size {config.image_size}, but the images of {config.data} are {height}"
        )


def _digest(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
