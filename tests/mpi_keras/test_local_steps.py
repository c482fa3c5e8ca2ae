"""Keras models whose ranks make local steps and average their weights after every few steps."""

from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import keras as distributed
from hvdtrain.errors import UsageError
from hvdtrain.keras.optimizer import is_distributed
from hvdtrain.world import World
from tests.mpi_keras.test_optimizer import batch, compiled, distance, share

STEPS, SHARE = 4, 6


class Compared(keras.callbacks.Callback):
    """Notes after each step whether all ranks hold the same weights."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.equal = world, list[bool]()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        everywhere = self.world.gather(self.model.get_weights())
        self.equal.append(
            all(
                np.array_equal(theirs, first)
                for weights in everywhere
                for theirs, first in zip(weights, everywhere[0], strict=True)
            )
        )


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def fit(model: keras.Model, world: World, *callbacks: keras.callbacks.Callback) -> None:
    data = [share(batch(seed, SHARE * world.size), world) for seed in range(STEPS)]
    images, labels = (np.concatenate(values) for values in zip(*data, strict=True))
    model.fit(images, labels, SHARE, epochs=1, shuffle=False, verbose=0, callbacks=[*callbacks])


def test_averages_after_every_step_are_the_exact_run(world: World) -> None:
    exact, local = compiled(distributed.optimizer(sgd())), compiled(sgd())
    fit(exact, world, *distributed.callbacks())
    fit(local, world, *distributed.callbacks(average_every=1))
    assert not is_distributed(local.optimizer)
    assert distance(local, exact) < 1e-4
    other = compiled(sgd())
    fit(other, world, *distributed.callbacks(average_every=STEPS))
    assert (distance(other, exact) > 1e-3) == (world.size > 1), "the bound has an effect"


def test_ranks_differ_until_they_average(world: World) -> None:
    compared, model = Compared(world), compiled(sgd())
    fit(model, world, *distributed.callbacks(average_every=2), compared)
    assert compared.equal == [world.size == 1, True, world.size == 1, True]


def test_an_execution_of_several_steps_ends_at_an_average(world: World) -> None:
    """Executions were counted as steps, so that periods of 4 steps ended after 16."""
    compared, model = Compared(world), compiled(sgd(), steps_per_execution=2)
    fit(model, world, *distributed.callbacks(average_every=2), compared)
    assert compared.equal == [True, True]
    with pytest.raises(UsageError, match="average_every=3 is not a multiple of steps_per_exec"):
        fit(model, world, *distributed.callbacks(average_every=3))


@pytest.mark.several_ranks
def test_an_optimizer_that_averages_gradients_is_refused(world: World) -> None:
    model = compiled(distributed.optimizer(sgd()))
    with pytest.raises(UsageError, match="leave average_every out"):
        fit(model, world, *distributed.callbacks(average_every=2))


def test_a_period_without_steps_is_refused() -> None:
    with pytest.raises(UsageError, match="use at least 1"):
        distributed.callbacks(average_every=0)
