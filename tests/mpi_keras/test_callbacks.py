"""Keras's own callbacks on several ranks: who writes files, and when training ends."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvdtrain import keras as distributed
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.keras import ranks
from hvdtrain.keras.ranks import check_same
from hvdtrain.world import World

STEPS = 4


@pytest.fixture
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = world.broadcast(tmp_path_factory.mktemp("files"))
    return path


class Act(keras.callbacks.Callback):
    """Calls a function with the callback at a step of an epoch, or at the end of an epoch (-1)."""

    def __init__(self, act: Any, epoch: int, step: int = -1) -> None:
        super().__init__()
        self.act, self.moment = act, (epoch, step)
        self.epoch, self.steps = 0, 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.steps += 1
        self._look(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._look(-1)

    def _look(self, step: int) -> None:
        if (self.epoch, step) == self.moment:
            self.act(self)


def fit(world: World, *behind: keras.callbacks.Callback, **options: Any) -> keras.Model:
    """Train three epochs of four steps, or as the options say, and return the model."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    is_local = "average_every" in options
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer if is_local else distributed.optimizer(optimizer), "mse")
    values = np.random.default_rng(world.rank).standard_normal((STEPS, 4)).astype(np.float32)
    needed = distributed.callbacks(**options)
    data = values[:, :3], values[:, 3:], 1
    model.fit(*data, epochs=3, shuffle=False, verbose=0, callbacks=[*needed, *behind])
    return model


def test_the_first_rank_alone_writes(world: World, folder: Path) -> None:
    """Each rank has a folder of its own, so that every file shows who wrote it."""
    local, callbacks = folder / str(world.rank), keras.callbacks
    fit(
        world,
        callbacks.ModelCheckpoint(local / "models" / "{epoch}.keras"),
        callbacks.ModelCheckpoint(local / "best.weights.h5", "loss", 0, True, True),
        callbacks.CSVLogger(folder / f"{world.rank}.csv"),
        callbacks.TensorBoard(local / "tensorboard"),
    )
    assert {path.name for path in folder.iterdir()} == {"0", "0.csv"}
    names = {path.name for path in (folder / "0").rglob("*.*")}
    assert names >= {"1.keras", "2.keras", "3.keras", "best.weights.h5"}
    keras.models.load_model(folder / "0" / "models" / "3.keras")


def test_all_ranks_restore_what_the_first_one_wrote(world: World, folder: Path) -> None:
    def backup() -> keras.callbacks.Callback:
        return keras.callbacks.BackupAndRestore(folder / "backup")

    def interrupt(callback: Act) -> None:
        raise KeyboardInterrupt

    whole = fit(world)
    with pytest.raises(KeyboardInterrupt):
        fit(world, backup(), Act(interrupt, epoch=1, step=2))
    world.barrier()
    assert (folder / "backup").exists()
    resumed = fit(world, backup())
    assert resumed.history.epoch == [1, 2]
    assert not (folder / "backup").exists()
    check_same(resumed.variables)
    for one, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        assert one == pytest.approx(other, abs=1e-6)


@pytest.mark.several_ranks
def test_ranks_that_restore_different_epochs_are_refused(world: World, folder: Path) -> None:
    class Restore(keras.callbacks.Callback):
        def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
            self.model._initial_epoch = 1 if world.rank == 0 else 0

    with pytest.raises(UsageError, match="rank 1 starts with epoch 0 and rank 0 with epoch 1"):
        fit(world, Restore())


def test_a_stop_on_one_rank_stops_all(world: World) -> None:
    """Steps of all ranks are one more than those until a stop in an epoch, which all must hear."""

    def stop(callback: Act) -> None:
        callback.model.stop_training = world.rank == world.size - 1

    cases: list[tuple[tuple[int, int], dict[str, int], int]] = [
        ((1, 1), {}, STEPS + 3),
        ((0, STEPS - 1), {}, STEPS),
        ((1, -1), {}, 2 * STEPS),
        ((0, 0), {"average_every": 2}, STEPS),
    ]
    for moment, options, steps in cases:
        act = Act(stop, *moment)
        model = fit(world, act, **options)
        if world.size > 1:
            assert act.steps == steps
        check_same(model.variables)


@pytest.mark.several_ranks
def test_weights_that_differ_at_the_end_are_found(world: World) -> None:
    """EarlyStopping with a local metric restores weights of different epochs."""

    class Restore(keras.callbacks.Callback):
        def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
            self.model.set_weights([value + world.rank for value in self.model.get_weights()])

    with pytest.raises(CheckFailed, match="rank 1 and rank 0 hold different values"):
        fit(world, Restore())


@pytest.mark.several_ranks
def test_weights_are_sent_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI sends less than 2 GiB at once; a model of 2.1 GiB could not start."""
    monkeypatch.setattr(ranks, "PIECE_BYTES", 5)
    values = [np.full((2, 3), 7.0), np.array(3.0), np.zeros((0, 2)), np.arange(9.0)]
    variables = [keras.Variable(value - world.rank) for value in values]
    ranks.broadcast(variables)
    for variable, value in zip(variables, values, strict=True):
        assert np.array_equal(variable.numpy(), value)
