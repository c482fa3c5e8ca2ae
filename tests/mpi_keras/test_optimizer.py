"""Gradients and weights of ranks that train a Keras model together, and mistakes."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import keras as distributed
from hvdtrain.backends.tensorflow.step import cnn
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.keras.optimizer import is_distributed
from hvdtrain.keras.ranks import check_same
from hvdtrain.world import World

CLASSES, SIZE, BATCH = 5, 16, 24
Data = tuple[np.ndarray, np.ndarray]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "adamw, clipped": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01, global_clipnorm=0.1),
    "accumulating": lambda: keras.optimizers.SGD(
        0.1, gradient_accumulation_steps=2, global_clipnorm=0.1
    ),
}


def batch(seed: int, count: int = BATCH) -> Data:
    draw = np.random.default_rng(seed)
    images = draw.standard_normal((count, SIZE, SIZE, 3)).astype(np.float32)
    return images, draw.integers(0, CLASSES, count)


def share(data: Data, world: World) -> Data:
    images, labels = data
    return images[world.rank :: world.size], labels[world.rank :: world.size]


def compiled(optimizer: Any, seed: int = 3, **options: Any) -> keras.Model:
    model = cnn(CLASSES, SIZE, seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def train(model: keras.Model, batches: Sequence[Data]) -> None:
    for images, labels in batches:
        model.train_on_batch(images, labels)


def distance(one: keras.Model, other: keras.Model) -> float:
    return max(
        float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-6))
        for a, b in zip(one.get_weights(), other.get_weights(), strict=True)
    )


@pytest.mark.proves(
    "With `hvdtrain.keras` steps of a Keras program equal the serial ones, and its "
    "optimizer keeps class and settings."
)
@pytest.mark.parametrize(
    "kind",
    [
        *("adam", "accumulating"),
        *(pytest.param(kind, marks=pytest.mark.proof) for kind in ("sgd", "adamw, clipped")),
    ],
)
def test_steps_of_all_ranks_are_the_serial_ones(world: World, kind: str) -> None:
    """The first step of SGD shows the gradient; with a negative control on several ranks."""
    batches = [batch(seed) for seed in range(4)]
    serial = compiled(OPTIMIZERS[kind]())
    train(serial, batches)
    together = compiled(distributed.optimizer(OPTIMIZERS[kind]()))
    train(together, [share(data, world) for data in batches])
    assert distance(together, serial) < 1e-4
    check_same(together.variables)
    alone = compiled(OPTIMIZERS[kind]())
    train(alone, [share(data, world) for data in batches])
    assert (distance(alone, serial) > 0.1) == (world.size > 1)


def test_gradients_in_16_bits_are_the_serial_ones_but_for_rounding(world: World) -> None:
    data = batch(2)
    weights = []
    for optimizer, samples in (
        (keras.optimizers.SGD(1.0), data),
        (distributed.optimizer(keras.optimizers.SGD(1.0), "fp16"), share(data, world)),
    ):
        model = compiled(optimizer)
        model.train_on_batch(*samples)
        weights.append(model)
    serial, together = weights
    check_same(together.variables)
    assert distance(together, serial) < 3e-3  # fp16 has 11 bits
    if world.size > 1:
        assert distance(together, serial) > 1e-6, "as exact as without compression"


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(UsageError, match="compress='bf16' is not supported for Keras: use none"):
        distributed.optimizer(keras.optimizers.SGD(1.0), "bf16")


def test_gradients_are_the_serial_ones(world: World) -> None:
    """The change of each weight is its gradient, because the learning rate is 1."""
    data = batch(1)
    gradients = []
    for optimizer, samples in (
        (keras.optimizers.SGD(1.0), data),
        (distributed.optimizer(keras.optimizers.SGD(1.0)), share(data, world)),
    ):
        model = compiled(optimizer)
        before = model.get_weights()
        model.train_on_batch(*samples)
        after = model.get_weights()
        gradients.append([old - new for old, new in zip(before, after, strict=True)])
    largest = max(float(np.max(np.abs(gradient))) for gradient in gradients[0])
    for serial, together in zip(*gradients, strict=True):
        scale = max(float(np.max(np.abs(serial))), 1e-6 * largest)
        assert float(np.max(np.abs(together - serial))) / scale < 1e-4


@pytest.mark.proof
def test_ranks_begin_with_the_weights_of_the_first(world: World) -> None:
    model = compiled(distributed.optimizer(keras.optimizers.Adam()), seed=world.rank)
    model.optimizer.build(model.trainable_variables)
    check_same(model.trainable_variables)
    assert distance(model, compiled(keras.optimizers.Adam(), seed=0)) == 0


@pytest.mark.proof
def test_fit_keeps_ranks_together_on_different_data(world: World) -> None:
    model = compiled(distributed.optimizer(keras.optimizers.Adam()), seed=world.rank)
    images, labels = batch(100 + world.rank, 20 * 8)
    model.fit(images, labels, 8, epochs=1, verbose=0, callbacks=distributed.callbacks())
    check_same(model.variables)
    check_same(model.optimizer.variables)


def test_statistics_of_batch_norm_become_those_of_all_ranks(world: World) -> None:
    layers = keras.layers
    norm = layers.BatchNormalization(momentum=0.0)
    model = keras.Sequential([layers.Input((4,)), norm, layers.Dense(1)])
    model.compile(distributed.optimizer(keras.optimizers.SGD(0.1)), "mse")
    values = np.full((8, 4), world.rank, np.float32)
    callbacks = distributed.callbacks()
    model.fit(values, np.zeros((8, 1)), 8, verbose=0, callbacks=callbacks)
    assert norm.moving_mean.numpy() == pytest.approx((world.size - 1) / 2)
    check_same(model.variables)


@pytest.mark.proves("`hvdtrain.keras` ends a job that would be silently wrong or hang.")
def test_an_optimizer_that_averages_nothing_is_found_out(world: World) -> None:
    """The callback detects it before the first step; without it the comparison of weights does."""
    images, labels = batch(200 + world.rank)
    model = compiled(keras.optimizers.Adam())
    if world.size == 1:
        model.fit(images, labels, verbose=0, callbacks=distributed.callbacks())
        return
    with pytest.raises(UsageError, match="averages nothing"):
        model.fit(images, labels, verbose=0, callbacks=distributed.callbacks())
    model.fit(images, labels, verbose=0)
    with pytest.raises(CheckFailed, match="different values of cnn/conv1/kernel and 7 more"):
        check_same(model.trainable_variables)


def test_weights_that_one_rank_changed_end_the_step(world: World) -> None:
    """The step itself fails on every rank, without any callback."""
    model = compiled(distributed.optimizer(keras.optimizers.SGD(0.0)))
    model.optimizer.build(model.trainable_variables)
    if world.rank == world.size - 1:
        kernel = model.trainable_variables[0]
        value = kernel.numpy()
        value[0, 0, 0, 0], value[0, 0, 0, 1] = value[0, 0, 0, 1], value[0, 0, 0, 0]
        kernel.assign(value)
    data = share(batch(0), world)
    if world.size == 1:
        model.train_on_batch(*data)
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="hold different weights"):
        model.train_on_batch(*data)


def test_an_optimizer_keeps_its_class_and_settings(world: World) -> None:
    optimizer = keras.optimizers.AdamW(3e-4, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    settings = optimizer.get_config()
    made = distributed.optimizer(optimizer)
    assert made is optimizer
    assert is_distributed(made) == (world.size > 1)
    assert distributed.optimizer(made) is made
    assert type(made).__name__ == "AdamW"
    assert isinstance(made, keras.optimizers.AdamW)
    assert made.get_config() == settings
    bias, kernel = (keras.Variable(np.zeros(2), name=name) for name in ("bias", "kernel"))
    made.build([bias, kernel])
    assert [made._use_weight_decay(variable) for variable in (bias, kernel)] == [False, True]
    with pytest.raises(UsageError, match="not an optimizer of Keras 3"):
        distributed.optimizer("adam")


def test_metrics_are_those_of_all_samples(world: World) -> None:
    """Ranks have different numbers of samples, so the mean of their means would differ."""
    images, labels = batch(7, 61)
    model = compiled(distributed.optimizer(keras.optimizers.SGD(0.0)))
    serial = compiled(keras.optimizers.SGD(0.0))
    bounds = [61 * rank * rank // world.size**2 for rank in range(world.size + 1)]
    share_of_rank = slice(bounds[world.rank], bounds[world.rank + 1])
    rows = images[share_of_rank], labels[share_of_rank]
    results = distributed.evaluate(model, *rows, 8, verbose=0)
    wanted = serial.evaluate(images, labels, 8, verbose=0, return_dict=True)
    assert results["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)
    assert results["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    mine = share((images[:60], labels[:60]), world)
    history = model.fit(
        *mine,
        60 // world.size,
        verbose=0,
        callbacks=distributed.callbacks(),
        validation_data=rows,
    ).history
    assert history["val_accuracy"] == [pytest.approx(wanted["accuracy"], abs=1e-6)]
    first = serial.evaluate(images[:60], labels[:60], 8, verbose=0, return_dict=True)
    assert history["loss"] == [pytest.approx(first["loss"], rel=1e-5)]


@pytest.mark.proof
def test_the_rate_warms_up(world: World) -> None:
    rates: list[float] = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    model = compiled(distributed.optimizer(keras.optimizers.SGD(0.5)))
    warm = distributed.callbacks(warmup_epochs=2)
    images, labels = share(batch(0, 4 * world.size), world)
    model.fit(images, labels, 1, epochs=3, verbose=0, callbacks=[*warm, Note()])
    assert rates[0] == pytest.approx(0.5 / world.size)
    assert rates[8:] == [pytest.approx(0.5)] * 4
    steps = np.diff(rates[:9])
    assert np.allclose(steps, 0.5 * (1 - 1 / world.size) / 8, atol=1e-6)
    rates.clear()
    model.fit(images, labels, 1, epochs=4, initial_epoch=3, verbose=0, callbacks=[*warm, Note()])
    assert rates == [pytest.approx(0.5)] * 4
    rates.clear()
    for epoch in range(2):
        begins = {"epochs": epoch + 1, "initial_epoch": epoch, "steps_per_epoch": 4}
        anew = [*distributed.callbacks(warmup_epochs=2), Note()]
        model.fit(images, labels, 1, verbose=0, callbacks=anew, **begins)
    assert np.allclose(np.diff(rates), 0.5 * (1 - 1 / world.size) / 8, atol=1e-6)


def test_what_the_first_rank_saved_loads_as_it_was(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = world.broadcast(tmp_path_factory.mktemp("saved") / "model.keras")
    model = compiled(distributed.optimizer(keras.optimizers.Adam(0.002)))
    model.fit(*share(batch(0), world), verbose=0, callbacks=distributed.callbacks(save_to=path))
    world.barrier()
    loaded = keras.models.load_model(path)
    assert not is_distributed(loaded.optimizer)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert distance(loaded, model) == 0
    assert [path.name for path in path.parent.iterdir()] == [path.name]


@pytest.mark.proof
def test_bf16_averages_gradients_of_fp32(world: World) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = compiled(distributed.optimizer(keras.optimizers.Adam()), seed=world.rank)
        train(model, [share(batch(seed), world) for seed in range(3)])
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.layers[0].compute_dtype == "bfloat16"
    assert {variable.dtype for variable in model.variables} == {"float32"}
    check_same(model.variables)


@pytest.mark.proof
def test_ranks_agree_on_a_step_that_overflows(world: World) -> None:
    """If one rank's loss is NaN, no rank updates, and all scale the loss down."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(distributed.optimizer(keras.optimizers.SGD(0.1)))
        images, labels = share(batch(0), world)
        before = model.get_weights()
        bad = np.full_like(images, np.inf) if world.rank == world.size - 1 else images
        model.train_on_batch(bad, labels)
        unchanged = zip(before, model.get_weights(), strict=True)
        assert all(np.array_equal(old, new) for old, new in unchanged)
        model.train_on_batch(images, labels)
        assert not np.array_equal(before[0], model.get_weights()[0])
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    check_same(model.variables)
    check_same(model.optimizer.variables)


@pytest.mark.several_ranks
@pytest.mark.usefixtures("world")
def test_a_loss_scaled_outside_of_what_averages_is_refused() -> None:
    inner = distributed.optimizer(keras.optimizers.SGD(0.1))
    model = compiled(keras.optimizers.LossScaleOptimizer(inner))
    with pytest.raises(UsageError, match="a LossScaleOptimizer is around"):
        model.fit(*batch(0), verbose=0, callbacks=distributed.callbacks())


@pytest.mark.several_ranks
@pytest.mark.usefixtures("world")
def test_a_model_that_is_not_built_is_refused() -> None:
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(CLASSES)])
    model.compile(distributed.optimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(UsageError, match="the model is not built"):
        model.fit(*batch(0), verbose=0, callbacks=distributed.callbacks())


@pytest.mark.several_ranks
def test_unlike_numbers_of_steps_are_refused_before_the_first(world: World) -> None:
    model = compiled(distributed.optimizer(keras.optimizers.SGD(0.1)))
    images, labels = batch(0, 8 * (world.rank + 1))
    with pytest.raises(
        UsageError,
        match="rank 1 has another fit than rank 0: steps per epoch is 2 there and 1",
    ):
        model.fit(images, labels, 8, verbose=0, callbacks=distributed.callbacks())


@pytest.mark.several_ranks
def test_unlike_optimizers_are_refused(world: World) -> None:
    kinds = [keras.optimizers.SGD, keras.optimizers.Adam]
    with pytest.raises(UsageError, match="have different classes"):
        distributed.optimizer(kinds[min(world.rank, 1)]())


@pytest.mark.proof
def test_gradients_of_an_embedding_are_averaged(world: World) -> None:
    layers = keras.layers
    model = keras.Sequential([layers.Input((3,)), layers.Embedding(10, 4), layers.Flatten()])
    model.add(layers.Dense(1))
    model.compile(distributed.optimizer(keras.optimizers.SGD(0.1)), "mse")
    words = np.random.default_rng(world.rank).integers(0, 10, (8, 3))
    model.fit(words, np.ones((8, 1)), 4, epochs=2, verbose=0, callbacks=distributed.callbacks())
    check_same(model.variables)


@pytest.mark.proof
def test_two_optimizers_of_one_model_are_both_seen(world: World) -> None:
    class Two(keras.Model):
        def __init__(self, second: Any) -> None:
            super().__init__()
            self.first, self.second = keras.layers.Dense(2), keras.layers.Dense(1)
            self.one = distributed.optimizer(keras.optimizers.SGD(0.1))
            self.two = second

        def call(self, data: Any) -> Any:
            return self.second(self.first(data))

        def train_step(self, data: Any) -> dict[str, Any]:
            images, labels = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(images) - labels) ** 2)
            halves = self.first.trainable_weights, self.second.trainable_weights
            gradients = tape.gradient(loss, [*halves[0], *halves[1]])
            self.one.apply(gradients[:2], halves[0])
            self.two.apply(gradients[2:], halves[1])
            return {"loss": loss}

    draw = np.random.default_rng(world.rank)
    data = draw.standard_normal((16, 3)), draw.standard_normal((16, 1))
    model = Two(distributed.optimizer(keras.optimizers.Adam(0.1)))
    model.compile()
    model(data[0])
    model.fit(*data, 4, verbose=0, callbacks=distributed.callbacks())
    check_same(model.variables)
    if world.size > 1:
        model = Two(keras.optimizers.Adam(0.1))
        model.compile()
        model(data[0])
        with pytest.raises(UsageError, match="averages nothing"):
            model.fit(*data, 4, verbose=0, callbacks=distributed.callbacks())


def test_a_loop_of_ones_own_trains(world: World) -> None:
    """Call `apply` inside a traced step that builds the optimizer itself."""
    model = cnn(CLASSES, SIZE, seed=world.rank)
    optimizer = distributed.optimizer(keras.optimizers.SGD(0.1))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_weights), model.trainable_weights)

    for seed in range(3):
        step(*share(batch(seed), world))
    check_same(model.variables)
