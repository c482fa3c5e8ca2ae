"""Regressions and models of pixels compute the gradients of the serial step under every plan."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from hvdtrain.backends.pytorch import build
from hvdtrain.check.parity import Parity
from hvdtrain.check.plan import check_plan
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import InputSize
from hvdtrain.models.component import Component
from hvdtrain.models.losses import Loss
from hvdtrain.world import World
from tests.mpi.common import CLASSES, components_of, names
from tests.mpi.plans import PLANS

SIZE, BATCH, TAIL = 16, 13, 9
PLAN_NAMES = {
    1: ["single"],
    2: ["shares 2:1", "mp", "one, then replicas"],
    3: ["dp", "mp, zb-h1", "1+2, shares 2:1"],
    4: ["dp", "hp:2x2, shares 2:1 and 1:2", "3+1, shares 3:2:1"],
}


def conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.Tanh())


FIELD = [
    Component("stem", partial(conv, 3, 8)),
    Component("middle", partial(conv, 8, 8)),
    Component("head", partial(nn.Conv2d, 8, CLASSES, 1)),
]


def cubic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss per sample that weighs samples by their own targets."""
    return (outputs - targets).abs().pow(3).mean(1) * (1 + targets.sum(1))


def check(
    world: World,
    plan: str,
    loss: object,
    components: list[Component],
    size: InputSize = SIZE,
) -> Parity:
    made = replace(PLANS[world.size][plan](names(components)), microbatches=3)
    config = TrainConfig(
        model="cnn", data="", precision="fp64", batch_size=BATCH, seed=3, loss=loss
    )
    return check_plan(config, components, made, size, CLASSES, world, (BATCH, TAIL))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `plan` by plans of this world size."""
    from mpi4py import MPI

    if "plan" in metafunc.fixturenames:
        metafunc.parametrize("plan", PLAN_NAMES[MPI.COMM_WORLD.size])


@pytest.mark.proves(
    "Under data, model and hybrid parallelism, with unequal shares, micro-batches and an uneven "
    "tail, regressions and models of pixels have the gradients of one rank: 1e-12 in fp64."
)
@pytest.mark.parametrize("loss", ["mse", "l1", "binary-cross-entropy", cubic])
def test_regression(world: World, plan: str, loss: object) -> None:
    assert check(world, plan, loss, components_of("cnn", SIZE)).largest <= 1e-12


@pytest.mark.parametrize("loss", ["pixel-cross-entropy", "mse"])
def test_pixels(world: World, plan: str, loss: str) -> None:
    assert check(world, plan, loss, FIELD).largest <= 1e-12


def test_inputs_of_another_shape(world: World, plan: str) -> None:
    channels, height, width = 2, 6, 10
    field = [Component("stem", partial(conv, channels, 8)), *FIELD[1:]]
    assert check(world, plan, "mse", field, (channels, height, width)).largest <= 1e-12


@pytest.mark.several_ranks
def test_a_mean_over_the_share_of_a_replica_fails(
    world: World, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_of = build.loss_of

    def averaging(config: TrainConfig) -> Loss:
        loss = loss_of(config)

        def total(outputs: Tensor, targets: Tensor) -> Tensor:
            return loss(outputs, targets).mean() * BATCH / 3 / world.size

        return replace(loss, total=total)

    monkeypatch.setattr(build, "loss_of", averaging)
    parity: Any = check(world, plan, "mse", components_of("cnn", SIZE))
    assert parity.largest > 1e-3
