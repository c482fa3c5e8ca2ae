"""Replicas with local steps, against parameters that were recorded (histories.py)."""

import json

import numpy as np
import pytest

from hvdtrain.world import World
from tests.mpi.apart import METHODS, SIZE, Trainer, config_of, unequal
from tests.mpi.common import components_of
from tests.mpi.histories import FILE, STEPS, projection

BOUND = 1e-9  # processors and versions of PyTorch round differently
SEEN = 1e-5


def largest_difference(world: World, method: str, like: str) -> float:
    """Return the largest difference of this rank from the recorded history of `like`.

    It is relative to the change of the weights over the whole history.
    """
    _, sync, options = METHODS[method]
    components = components_of("cnn", SIZE)
    trainer = Trainer(config_of(sync, **options), unequal(world.size), components, world)
    history_of_all = json.loads(FILE.read_text())[f"{like}, {world.size} ranks"]
    trained = trainer.runtime.parts[0].model.parameters()
    history = [
        projection({name: weights[name] for name in trained})
        for weights in trainer.train(0, STEPS)
    ]
    assert len(history) == len(history_of_all)
    expected = np.array(history_of_all)[:, world.rank]
    return float(np.abs(expected - history).max() / np.ptp(expected))


@pytest.mark.several_ranks
@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_as_recorded(world: World, method: str) -> None:
    assert largest_difference(world, method, like=method) <= BOUND


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    ("method", "like"),
    [
        ("local", "diloco"),
        ("elastic", "local"),
    ],
)
def test_another_method_is_noticed(world: World, method: str, like: str) -> None:
    assert largest_difference(world, method, like) > SEEN
