"""A run's session in TensorFlow: a Keras model on each rank, or on the devices of one process."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.backends.tensorflow.step import (
    MirroredSteps,
    Steps,
    build_model,
    build_optimizer,
    check_no_losses,
    make_strategy,
)
from hvdtrain.checkpoint.store import MODEL, OPTIMIZER, owners
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.order import Rows
from hvdtrain.engine.feed import (
    Feed,
    check_images,
    check_started,
    normalisation,
    open_splits,
    staged,
    step_seed,
)
from hvdtrain.engine.folders import shared_index
from hvdtrain.engine.session import (
    Device,
    Faults,
    PendingStep,
    Session,
    Shape,
    Spent,
    State,
    StepInput,
    StepOutcome,
)
from hvdtrain.errors import UsageError
from hvdtrain.health.failure import Sighting, bad_step_words, patience, stalled
from hvdtrain.host import output
from hvdtrain.host.activity import Activity
from hvdtrain.keras import ranks as keras_ranks
from hvdtrain.keras.optimizer import sums
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

EVALUATION_IMAGES = 256  # per rank


@dataclass(kw_only=True)
class KerasState(State):
    """The state of a Keras model, the same on all ranks."""

    model: keras.Model
    optimizer: Any
    world: World

    @override
    def agree(self) -> None:
        everywhere = self.world.gather(self.digests())
        if any(digests != everywhere[0] for digests in everywhere):
            keras_ranks.broadcast(self.model.weights)

    @override
    def start_from(self, path: Path) -> str:
        raise UsageError("--weights is not supported with --framework tensorflow: remove it")

    @override
    def digests(self) -> dict[str, str]:
        return {weight.path: _digest(weight.numpy()) for weight in self.model.weights}

    @override
    def fingerprints(self) -> dict[int, int]:
        return {0: int(keras_ranks.fingerprint([weight.value for weight in self.model.weights]))}

    def _kept(self) -> dict[str, Any]:
        """Return all variables that a checkpoint holds, by their names there."""
        rate = self.optimizer.learning_rate
        states = [state for state in self.optimizer.variables if state is not rate]
        weights = {f"{MODEL}{weight.path}": weight for weight in self.model.weights}
        return weights | {f"{OPTIMIZER}{state.path}": state for state in states}

    @override
    def share(self) -> dict[str, np.ndarray]:
        kept = self._kept()
        sizes = [
            int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size
            for variable in kept.values()
        ]
        owned = zip(kept.items(), owners(sizes, self.world.size), strict=True)
        local = [item for item, owner in owned if owner == self.world.rank]
        return {name: np.array(variable.numpy(), order="C") for name, variable in local}

    @override
    def expected(self, was_updated: bool, saved: Mapping[str, Shape]) -> dict[str, Shape]:
        return {name: tuple(variable.shape) for name, variable in self._kept().items()}

    @override
    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, variable in self._kept().items():
            variable.assign(arrays[name])


@dataclass
class KerasFaults(Faults):
    """Faults in the layers of a Keras model.

    Attributes:
        spoiled: factors of layers' outputs, and functions that return whether they become NaN.
    """

    steps: Steps
    mirrored: MirroredSteps | None
    spoiled: list[tuple[Any, Callable[[], bool]]] = field(default_factory=list)

    @override
    def spoil(self, component: str, is_due: Callable[[], bool]) -> None:
        factor = tf.Variable(1.0)
        layer = self.steps.model.get_layer(component)
        compute = layer.call

        def spoiled(*inputs: Any, **options: Any) -> Any:
            output = compute(*inputs, **options)
            return output * tf.cast(factor, output.dtype)

        layer.call = spoiled
        self.spoiled.append((factor, is_due))
        self.steps.forget()
        if self.mirrored is not None:
            self.mirrored.forget()

    @override
    def allocate_memory(self, count: int) -> None:
        tf.zeros([count], tf.uint8)

    def set(self, is_training: bool) -> None:
        """Set the factors for the next step or evaluation."""
        for factor, is_due in self.spoiled:
            factor.assign(float("nan") if is_training and is_due() else 1.0)


@dataclass(kw_only=True)
class KerasSession(Session):
    """A data-parallel `Session`.

    Attributes:
        steps: the traced functions. mirrored: the same on the devices of a strategy.
        seeds: states of the generators that layers draw from.
        rate: the current learning rate of the optimizer.
    """

    state: KerasState
    faults: KerasFaults
    steps: Steps
    mirrored: MirroredSteps | None
    seeds: list[Any]
    rate: float | None = None
    libraries = ("tensorflow", "tensorflow-cpu", "keras")

    @property
    @override
    def evaluation_images(self) -> int:
        return EVALUATION_IMAGES * self.world.size

    @override
    def summed_by(self) -> str | None:
        return "horovod" if self.world.size > 1 else None

    @override
    def local_rows(self, batch: Rows, is_training: bool) -> tuple[Rows, Rows]:
        first, last = order.split(len(batch), [1] * self.world.size)[self.world.rank]
        return batch[first:last], batch[first:last]

    @override
    def train(self, step: StepInput) -> PendingStep:
        if step.rate != self.rate:
            self.state.optimizer.learning_rate = self.rate = step.rate
        self._seed(step.position)
        started = time.perf_counter()
        with self.activity.doing("forward, backward, all-reduce and update"):
            done = (self.mirrored or self.steps).train(
                *self._arguments(step.feed, step.batch_size)
            )
            exposed = float(done.exposed_seconds)
        seconds = time.perf_counter() - started
        # Nothing is hidden: all gradients are sent at the end.
        spent = Spent(exposed, communication=exposed, compute=seconds - exposed)
        outcome = StepOutcome(float(done.loss_sum), bool(done.is_bad), spent)
        return PendingStep(len(step.feed.ids), lambda: outcome, float(done.norm), outcome.is_bad)

    def trace(self) -> None:
        """Trace a step on a full batch, so that the first step does not include the tracing.

        Raises:
            UsageError: if the model adds losses in training.
        """
        batch = np.zeros(min(self.config.batch_size, len(self.train_rows)), np.int64)
        rows, _ = self.local_rows(batch, is_training=True)
        images = np.zeros((len(rows), *self.index.image_shape), np.uint8)
        arguments = self._arguments(Feed(images, rows, rows), len(batch))
        (self.mirrored or self.steps).trace(*arguments)
        check_no_losses(self.steps.model)

    def _arguments(self, feed: Feed, batch_size: int) -> tuple[Any, ...]:
        return feed.images, feed.labels, self.steps.dtype.as_numpy_dtype(batch_size)

    @override
    def evaluate(self, batches: Iterable[tuple[Feed, int]]) -> list[float]:
        loss_sum, correct = 0.0, 0.0
        self.faults.set(is_training=False)
        for feed, _ in batches:
            if len(feed.images):
                losses, right = self.steps.evaluate(feed.images, feed.labels)
                loss_sum, correct = loss_sum + float(losses), correct + float(right)
        return [loss_sum, correct]

    @override
    def diagnose(self, step: StepInput) -> str:
        if self.mirrored is not None:
            return (
                "the weights are already updated, so the layer is not known: use --plan dp to "
                "find it"
            )
        newest, _ = self.activity.now()
        self.activity.step(step.step)
        kept = [statistic.numpy() for statistic in self.steps.statistics]
        arguments = self._arguments(step.feed, step.batch_size)
        explanation = diagnose(
            self.steps, self.world, arguments, lambda: self._seed(step.position)
        )
        for variable, before in zip(self.steps.statistics, kept, strict=True):
            variable.assign(before)
        self.activity.step(newest)
        return explanation

    def _seed(self, position: int) -> None:
        """Seed the layers' generators, so that draws depend on seed, position and rank only."""
        self.faults.set(is_training=True)
        if self.seeds:
            seed = step_seed(self.config.seed, position, self.world.rank)
            for number, state in enumerate(self.seeds):
                words = np.array([seed >> 32, (seed + number) & 0xFFFFFFFF], np.uint32)
                state.assign(words)


def _digest(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def diagnose(
    steps: Steps, world: World, arguments: tuple[Any, ...], seed: Callable[[], Any]
) -> str:
    """Run a step again without updates; return what is wrong with it, in words. Collective.

    This changes running statistics.

    Args:
        arguments: of `Steps.gradients`.
        seed: sets the generators to their state at the start of the step.
    """
    sightings: list[Sighting] = []
    seed()
    with _watched(steps, world.rank, sightings):
        _, gradients = steps.gradients(*arguments)
    seen = [sighting for rank_sightings in world.gather(sightings) for sighting in rank_sightings]
    if world.size > 1:
        gradients = sums(gradients, "diagnosis")
    norms = {
        weight.path: float(np.linalg.norm(gradient.numpy().astype(np.float64)))
        for weight, gradient in zip(steps.weights, gradients, strict=True)
    }
    return bad_step_words(seen, norms, {name: place for place, name in enumerate(norms)})


@contextmanager
def _watched(steps: Steps, rank: int, sightings: list[Sighting]) -> Iterator[None]:
    """Note the layers that return values that are not finite for finite inputs."""
    layers = list(steps.model.layers)
    before = [layer.call for layer in layers]
    for number, layer in enumerate(layers):
        layer.call = _looking(number, layer, rank, sightings)
    try:
        yield
    finally:
        for layer, call in zip(layers, before, strict=True):
            layer.call = call


def _looking(number: int, layer: Any, rank: int, sightings: list[Sighting]) -> Callable[..., Any]:
    call = layer.call

    def look(*inputs: Any, **options: Any) -> Any:
        output = call(*inputs, **options)
        if _are_finite(inputs) and not _are_finite(output):
            has_bad_weights = not _are_finite(layer.weights)
            sightings.append(Sighting(number, layer.name, rank, has_bad_weights))
        return output

    return look


def _are_finite(values: Any) -> bool:
    tensors = (
        tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(values) if tensor is not None
    )
    numbers = (tensor for tensor in tensors if tensor.dtype.is_floating)
    return all(bool(tf.reduce_all(tf.math.is_finite(tensor))) for tensor in numbers)


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
