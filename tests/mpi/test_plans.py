"""Every plan computes the gradients of the serial step, parameter by parameter.

The error of a tensor is the largest difference divided by the largest reference value, or by a
millionth of the largest gradient of all: at most 1e-12 in fp64 and 1e-4 in fp32. Replicas must
agree to the bit. This is the whole matrix, which takes minutes; test_pairs has a selection.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hvdtrain.check.parity import Parity
from hvdtrain.check.plan import check_plan
from hvdtrain.config import TrainConfig
from hvdtrain.engine import machine
from hvdtrain.options.sections import Precision
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.world import World
from tests.mpi.common import CLASSES, components_of, names
from tests.mpi.plans import PLANS

pytestmark = pytest.mark.proof
SIZES = {"cnn": 16, "vit": 16, "resnet": 8, "resnet18": 8, "resnet50": 16}
# Batch norm needs more than one value per channel, and resnet18 ends in 1 x 1 pixels here.
BATCH_NORM: dict[str, Any] = {"batch_size": 26, "microbatches": 2}
# Built-in models with a plan, by world size.
WHOLE_MODELS = {
    1: [("resnet18", "single")],
    2: [("resnet18", "shares 2:1")],
    3: [("vit_tiny", "2+1"), ("resnet50", "mp")],
    4: [("vit_tiny", "hp:2x2"), ("resnet18", "hp:2x2, shares 2:1 and 1:2")],
}


def parity_of(world: World, plan: str, model: str, **settings: Any) -> Parity:
    """Return the parity of a plan."""
    synchronous, microbatches = settings.pop("synchronous", False), settings.pop("microbatches", 0)
    size, batches = SIZES.get(model, 16), settings.pop("batches", 2)
    components = components_of(model, size)
    made = PLANS[world.size][plan](names(components))
    made = replace(made, microbatches=microbatches or made.microbatches)
    options: dict[str, Any] = {"precision": "fp64", "batch_size": 13, "seed": 3} | settings
    config = TrainConfig(model=model, data="", **options)
    sizes = (config.batch_size, -(-2 * config.batch_size // 3))[:batches]  # a batch and a tail
    with pytest.MonkeyPatch.context() as patch:
        if synchronous:
            patch.setattr(machine, "Exchange", partial(Exchange, synchronous=True))
        return check_plan(config, components, made, size, CLASSES, world, sizes)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `plan` by all plans of this world size, `whole_plan` and `some_plan` by a few.

    `whole_plan` are those without split backward, `some_plan` two of them.
    """
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD.size
    every = list(PLANS[ranks])
    whole = [name for name in every if "zb-h1" not in name]
    some = [whole[0], whole[-1]]
    for name, plans in {"plan": every, "whole_plan": whole, "some_plan": some}.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, plans)
    if "whole_model" in metafunc.fixturenames:
        metafunc.parametrize("whole_model", WHOLE_MODELS[ranks], ids=" under ".join)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("batch", [13, 8, 1])
def test_cnn(world: World, plan: str, precision: Precision, batch: int) -> None:
    parity = parity_of(world, plan, "cnn", precision=precision, batch_size=batch)
    assert parity.is_within, parity


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_vit(world: World, plan: str, precision: Precision) -> None:
    parity = parity_of(world, plan, "vit", precision=precision)
    assert parity.is_within, parity


def test_resnet_with_local_batch_norm(world: World, plan: str) -> None:
    parity = parity_of(world, plan, "resnet", **BATCH_NORM)
    assert parity.is_within, parity


def test_whole_models(world: World, whole_model: tuple[str, str]) -> None:
    model, plan = whole_model
    settings = BATCH_NORM if model == "resnet18" else {"batch_size": 8, "microbatches": 2}
    parity = parity_of(world, plan, model, batches=1, **settings)  # each takes many seconds
    assert parity.is_within, parity
    assert parity.tolerance == {"resnet50": 1e-11}.get(model, 1e-12)


def test_label_smoothing_is_the_serial_steps(world: World, plan: str) -> None:
    parity = parity_of(world, plan, "cnn", loss="cross-entropy:0.1")
    assert parity.is_within, parity


def test_resnet_with_synchronised_batch_norm(world: World, whole_plan: str) -> None:
    parity = parity_of(world, whole_plan, "resnet", batch_norm="sync", **BATCH_NORM)
    assert parity.is_within, parity


@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_resnet_in_single_precision(world: World, some_plan: str, batch_norm: str) -> None:
    parity = parity_of(
        world, some_plan, "resnet", precision="fp32", batch_norm=batch_norm, **BATCH_NORM
    )
    assert parity.is_within, parity


def test_recompute_changes_nothing(world: World, whole_plan: str) -> None:
    parity = parity_of(world, whole_plan, "vit", recompute="*.mlp,embed")
    assert parity.is_within, parity


@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_recompute_leaves_batch_norm_alone(world: World, some_plan: str, batch_norm: str) -> None:
    parity = parity_of(
        world,
        some_plan,
        "resnet",
        batch_norm=batch_norm,
        recompute="layer1.0,layer3.0,stem",
        **BATCH_NORM,
    )
    assert parity.is_within, parity


def test_brain_floats_cross_boundaries(world: World, plan: str) -> None:
    parity = parity_of(world, plan, "vit", precision="bf16")
    assert parity.is_within, parity


def test_no_plan_leans_on_the_buffers_of_mpi(world: World, plan: str) -> None:
    parity = parity_of(world, plan, "cnn", synchronous=True)
    assert parity.is_within, parity
