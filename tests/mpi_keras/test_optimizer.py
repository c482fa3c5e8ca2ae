"""Gradients and weights of ranks that train a Keras model together, and who does not."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import tf as distributed
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.tf.agreement import check_same
from hvdtrain.tf.cnn import cnn
from hvdtrain.tf.optimizer import is_distributed
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


def share(data: Data, here: World) -> Data:
    images, labels = data
    return images[here.rank :: here.size], labels[here.rank :: here.size]


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


@pytest.mark.parametrize(
    "kind",
    [
        *("adam", "accumulating"),
        *(pytest.param(kind, marks=pytest.mark.proof) for kind in ("sgd", "adamw, clipped")),
    ],
)
def test_steps_of_all_ranks_are_the_serial_ones(here: World, kind: str) -> None:
    """SGD's first step is the gradient itself; with a negative control on more than one rank."""
    batches = [batch(seed) for seed in range(4)]
    serial = compiled(OPTIMIZERS[kind]())
    train(serial, batches)
    together = compiled(distributed.optimizer(OPTIMIZERS[kind]()))
    train(together, [share(data, here) for data in batches])
    assert distance(together, serial) < 1e-4
    check_same(together.variables)
    alone = compiled(OPTIMIZERS[kind]())
    train(alone, [share(data, here) for data in batches])
    assert (distance(alone, serial) > 0.1) == (here.size > 1)


def test_gradients_are_the_serial_ones(here: World) -> None:
    """By variable, with a rate of 1: what the weights lost is the gradient."""
    data = batch(1)
    found = []
    for optimizer, given in (
        (keras.optimizers.SGD(1.0), data),
        (distributed.optimizer(keras.optimizers.SGD(1.0)), share(data, here)),
    ):
        model = compiled(optimizer)
        before = model.get_weights()
        model.train_on_batch(*given)
        after = model.get_weights()
        found.append([old - new for old, new in zip(before, after, strict=True)])
    largest = max(float(np.max(np.abs(gradient))) for gradient in found[0])
    for serial, together in zip(*found, strict=True):
        scale = max(float(np.max(np.abs(serial))), 1e-6 * largest)
        assert float(np.max(np.abs(together - serial))) / scale < 1e-4


@pytest.mark.proof
def test_ranks_begin_with_the_weights_of_the_first(here: World) -> None:
    model = compiled(distributed.optimizer(keras.optimizers.Adam()), seed=here.rank)
    model.optimizer.build(model.trainable_variables)
    check_same(model.trainable_variables)
    assert distance(model, compiled(keras.optimizers.Adam(), seed=0)) == 0


@pytest.mark.proof
def test_fit_keeps_ranks_together_on_different_data(here: World) -> None:
    model = compiled(distributed.optimizer(keras.optimizers.Adam()), seed=here.rank)
    images, labels = batch(100 + here.rank, 20 * 8)
    model.fit(images, labels, 8, epochs=1, verbose=0, callbacks=distributed.callbacks())
    check_same(model.variables)
    check_same(model.optimizer.variables)


def test_statistics_of_batch_norm_become_those_of_all_ranks(here: World) -> None:
    layers = keras.layers
    norm = layers.BatchNormalization(momentum=0.0)
    model = keras.Sequential([layers.Input((4,)), norm, layers.Dense(1)])
    model.compile(distributed.optimizer(keras.optimizers.SGD(0.1)), "mse")
    values = np.full((8, 4), here.rank, np.float32)
    callbacks = distributed.callbacks()
    model.fit(values, np.zeros((8, 1)), 8, verbose=0, callbacks=callbacks)
    assert norm.moving_mean.numpy() == pytest.approx((here.size - 1) / 2)
    check_same(model.variables)


def test_an_optimizer_that_averages_nothing_is_found_out(here: World) -> None:
    """By the callback before the first step; without it the weights show it."""
    images, labels = batch(200 + here.rank)
    model = compiled(keras.optimizers.Adam())
    if here.size == 1:
        model.fit(images, labels, verbose=0, callbacks=distributed.callbacks())
        return
    with pytest.raises(UsageError, match="averages nothing"):
        model.fit(images, labels, verbose=0, callbacks=distributed.callbacks())
    model.fit(images, labels, verbose=0)
    with pytest.raises(CheckFailed, match="rank 1 and rank 0 hold different values of cnn/conv1/kernel and 7 more"):
        check_same(model.trainable_variables)


def test_weights_that_one_rank_changed_end_the_step(here: World) -> None:
    """Inside the step: without any callback, on every rank."""
    model = compiled(distributed.optimizer(keras.optimizers.SGD(0.0)))
    model.optimizer.build(model.trainable_variables)
    if here.rank == here.size - 1:
        kernel = model.trainable_variables[0]
        value = kernel.numpy()
        value[0, 0, 0, 0], value[0, 0, 0, 1] = value[0, 0, 0, 1], value[0, 0, 0, 0]
        kernel.assign(value)
    data = share(batch(0), here)
    if here.size == 1:
        model.train_on_batch(*data)
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="hold different weights"):
        model.train_on_batch(*data)


def test_an_optimizer_keeps_its_class_and_settings(here: World) -> None:
    own = keras.optimizers.AdamW(3e-4, weight_decay=0.1)
    own.exclude_from_weight_decay(var_names=["bias"])
    settings = own.get_config()
    made = distributed.optimizer(own)
    assert made is own
    assert is_distributed(made) == (here.size > 1)
    assert distributed.optimizer(made) is made
    assert type(made).__name__ == "AdamW"
    assert isinstance(made, keras.optimizers.AdamW)
    assert made.get_config() == settings
    bias, kernel = (keras.Variable(np.zeros(2), name=name) for name in ("bias", "kernel"))
    made.build([bias, kernel])
    assert [made._use_weight_decay(each) for each in (bias, kernel)] == [False, True]
    with pytest.raises(UsageError, match="not an optimizer of Keras 3"):
        distributed.optimizer("adam")


def test_metrics_are_those_of_all_samples(here: World) -> None:
    """Of unlike numbers of samples: the mean of the ranks' means is another."""
    images, labels = batch(7, 61)
    model = compiled(distributed.optimizer(keras.optimizers.SGD(0.0)))
    serial = compiled(keras.optimizers.SGD(0.0))
    bounds = [61 * rank * rank // here.size**2 for rank in range(here.size + 1)]
    own = slice(bounds[here.rank], bounds[here.rank + 1])
    rows = images[own], labels[own]
    found = distributed.evaluate(model, *rows, 8, verbose=0)
    wanted = serial.evaluate(images, labels, 8, verbose=0, return_dict=True)
    assert found["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    mine = share((images[:60], labels[:60]), here)
    history = model.fit(
        *mine,
        60 // here.size,
        verbose=0,
        callbacks=distributed.callbacks(),
        validation_data=rows,
    ).history
    assert history["val_accuracy"] == [pytest.approx(wanted["accuracy"], abs=1e-6)]
    first = serial.evaluate(images[:60], labels[:60], 8, verbose=0, return_dict=True)
    assert history["loss"] == [pytest.approx(first["loss"], rel=1e-5)]


@pytest.mark.proof
def test_the_rate_warms_up(here: World) -> None:
    rates: list[float] = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    model = compiled(distributed.optimizer(keras.optimizers.SGD(0.5)))
    warm = distributed.callbacks(warmup_epochs=2)
    images, labels = share(batch(0, 4 * here.size), here)
    model.fit(images, labels, 1, epochs=3, verbose=0, callbacks=[*warm, Note()])
    assert rates[0] == pytest.approx(0.5 / here.size)
    assert rates[8:] == [pytest.approx(0.5)] * 4
    steps = np.diff(rates[:9])
    assert np.allclose(steps, 0.5 * (1 - 1 / here.size) / 8, atol=1e-6)
    rates.clear()
    model.fit(images, labels, 1, epochs=4, initial_epoch=3, verbose=0, callbacks=[*warm, Note()])
    assert rates == [pytest.approx(0.5)] * 4
    rates.clear()
    for epoch in range(2):
        begins = {"epochs": epoch + 1, "initial_epoch": epoch, "steps_per_epoch": 4}
        anew = [*distributed.callbacks(warmup_epochs=2), Note()]
        model.fit(images, labels, 1, verbose=0, callbacks=anew, **begins)
    assert np.allclose(np.diff(rates), 0.5 * (1 - 1 / here.size) / 8, atol=1e-6)


def test_what_the_first_rank_saved_loads_as_it_was(
    here: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = here.broadcast(tmp_path_factory.mktemp("saved") / "model.keras")
    model = compiled(distributed.optimizer(keras.optimizers.Adam(0.002)))
    model.fit(*share(batch(0), here), verbose=0, callbacks=distributed.callbacks(save_to=path))
    here.barrier()
    loaded = keras.models.load_model(path)
    assert not is_distributed(loaded.optimizer)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert distance(loaded, model) == 0
    assert [path.name for path in path.parent.iterdir()] == [path.name]


@pytest.mark.proof
def test_bf16_averages_gradients_of_fp32(here: World) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = compiled(distributed.optimizer(keras.optimizers.Adam()), seed=here.rank)
        train(model, [share(batch(seed), here) for seed in range(3)])
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.layers[0].compute_dtype == "bfloat16"
    assert {variable.dtype for variable in model.variables} == {"float32"}
    check_same(model.variables)


@pytest.mark.proof
def test_ranks_agree_on_a_step_that_overflows(here: World) -> None:
    """One rank's loss is no number: no rank takes the step, and all scale the loss down."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(distributed.optimizer(keras.optimizers.SGD(0.1)))
        images, labels = share(batch(0), here)
        before = model.get_weights()
        bad = np.full_like(images, np.inf) if here.rank == here.size - 1 else images
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
@pytest.mark.usefixtures("here")
def test_a_loss_scaled_outside_of_what_averages_is_refused() -> None:
    inner = distributed.optimizer(keras.optimizers.SGD(0.1))
    model = compiled(keras.optimizers.LossScaleOptimizer(inner))
    with pytest.raises(UsageError, match="a LossScaleOptimizer is around"):
        model.fit(*batch(0), verbose=0, callbacks=distributed.callbacks())


@pytest.mark.several_ranks
@pytest.mark.usefixtures("here")
def test_a_model_that_is_not_built_is_refused() -> None:
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(CLASSES)])
    model.compile(distributed.optimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(UsageError, match="the model is not built"):
        model.fit(*batch(0), verbose=0, callbacks=distributed.callbacks())


@pytest.mark.several_ranks
def test_unlike_numbers_of_steps_are_refused_before_the_first(here: World) -> None:
    model = compiled(distributed.optimizer(keras.optimizers.SGD(0.1)))
    images, labels = batch(0, 8 * (here.rank + 1))
    with pytest.raises(
        UsageError, match="rank 1 has different steps per epoch than rank 0 .2 and 1"
    ):
        model.fit(images, labels, 8, verbose=0, callbacks=distributed.callbacks())


@pytest.mark.several_ranks
def test_unlike_optimizers_are_refused(here: World) -> None:
    kinds = [keras.optimizers.SGD, keras.optimizers.Adam]
    with pytest.raises(UsageError, match="have different classes"):
        distributed.optimizer(kinds[min(here.rank, 1)]())


@pytest.mark.proof
def test_gradients_of_an_embedding_are_averaged(here: World) -> None:
    layers = keras.layers
    model = keras.Sequential([layers.Input((3,)), layers.Embedding(10, 4), layers.Flatten()])
    model.add(layers.Dense(1))
    model.compile(distributed.optimizer(keras.optimizers.SGD(0.1)), "mse")
    words = np.random.default_rng(here.rank).integers(0, 10, (8, 3))
    model.fit(words, np.ones((8, 1)), 4, epochs=2, verbose=0, callbacks=distributed.callbacks())
    check_same(model.variables)


@pytest.mark.proof
def test_two_optimizers_of_one_model_are_both_seen(here: World) -> None:
    class Two(keras.Model):
        def __init__(self, second: Any) -> None:
            super().__init__()
            self.first, self.second = keras.layers.Dense(2), keras.layers.Dense(1)
            self.one = distributed.optimizer(keras.optimizers.SGD(0.1))
            self.two = second

        def call(self, given: Any) -> Any:
            return self.second(self.first(given))

        def train_step(self, data: Any) -> dict[str, Any]:
            images, labels = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(images) - labels) ** 2)
            halves = self.first.trainable_weights, self.second.trainable_weights
            found = tape.gradient(loss, [*halves[0], *halves[1]])
            self.one.apply(found[:2], halves[0])
            self.two.apply(found[2:], halves[1])
            return {"loss": loss}

    draw = np.random.default_rng(here.rank)
    given = draw.standard_normal((16, 3)), draw.standard_normal((16, 1))
    model = Two(distributed.optimizer(keras.optimizers.Adam(0.1)))
    model.compile()
    model(given[0])
    model.fit(*given, 4, verbose=0, callbacks=distributed.callbacks())
    check_same(model.variables)
    if here.size > 1:
        model = Two(keras.optimizers.Adam(0.1))
        model.compile()
        model(given[0])
        with pytest.raises(UsageError, match="averages nothing"):
            model.fit(*given, 4, verbose=0, callbacks=distributed.callbacks())


def test_a_loop_of_ones_own_trains(here: World) -> None:
    """`apply` inside a traced step that builds the optimizer itself."""
    model = cnn(CLASSES, SIZE, seed=here.rank)
    optimizer = distributed.optimizer(keras.optimizers.SGD(0.1))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_weights), model.trainable_weights)

    for seed in range(3):
        step(*share(batch(seed), here))
    check_same(model.variables)
