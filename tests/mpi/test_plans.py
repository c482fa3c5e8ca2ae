"""Every plan computes the gradients of the serial step, parameter by parameter.

The measure is the design's: per tensor, the largest difference over the largest reference value
(or a millionth of the largest gradient anywhere): at most 1e-12 in fp64 and 1e-4 in fp32. Replicas
must agree to the bit.
"""

from dataclasses import replace
from typing import Any

import pytest

from hvdtrain import models
from hvdtrain.config import Precision, TrainConfig
from hvdtrain.training.plancheck import Parity, check_plan
from hvdtrain.world import World
from tests.mpi.plans import PLANS

CLASSES = 7
SIZES = {"cnn": 16, "vit_tiny": 16, "resnet18": 8, "resnet50": 16, "vit_b16": 16}
# Batch norm needs more than one value a channel, and resnet18 ends in 1 x 1 pixels here.
BATCH_NORM: dict[str, Any] = {"batch_size": 26, "microbatches": 2}


def parity_of(
    here: World, plan: str, model: str, blocks: int | None = None, **settings: Any
) -> Parity:
    """The parity of a plan; `blocks` cuts a transformer, whose blocks are two components each.

    Of resnet18 the first block of each layer is enough: the second ones are alike.
    """
    synchronous, microbatches = settings.pop("synchronous", False), settings.pop("microbatches", 0)
    components = models.components(model, CLASSES, SIZES[model])
    if blocks is not None:
        components = [*components[: 1 + 2 * blocks], components[-1]]
    if model == "resnet18":
        components = [part for part in components if not part.name.endswith(".1")]
    made = PLANS[here.size][plan]([part.name for part in components])
    made = replace(made, microbatches=microbatches or made.microbatches)
    options: dict[str, Any] = {"precision": "fp64", "batch_size": 13, "seed": 3} | settings
    config = TrainConfig(model=model, data="", **options)
    return check_plan(
        config, components, SIZES[model], CLASSES, here, made, synchronous=synchronous
    )


# The large models, by the number of ranks: each rank computes the serial step, too.
PLAIN = {1: ["single"], 2: ["dp", "mp"], 3: ["dp"], 4: ["mp"]}
BLOCKS = 3  # of the transformer that every plan is tried with


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All plans of this number of ranks; `whole_plan` are those that leave backward whole,
    `some_plan` are two of these, and `plain_plan` those of PLAIN.
    """
    from mpi4py import MPI

    names = list(PLANS[MPI.COMM_WORLD.size])
    if "plan" in metafunc.fixturenames:
        metafunc.parametrize("plan", names)
    whole = [name for name in names if "zb-h1" not in name]
    if "whole_plan" in metafunc.fixturenames:
        metafunc.parametrize("whole_plan", whole)
    if "some_plan" in metafunc.fixturenames:
        metafunc.parametrize("some_plan", [whole[0], whole[-1]])
    if "plain_plan" in metafunc.fixturenames:
        metafunc.parametrize("plain_plan", PLAIN[MPI.COMM_WORLD.size])


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("batch", [13, 8, 1])
def test_cnn(here: World, plan: str, precision: Precision, batch: int) -> None:
    parity = parity_of(here, plan, "cnn", precision=precision, batch_size=batch)
    assert parity.is_within, parity


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_vit(here: World, plan: str, precision: Precision) -> None:
    parity = parity_of(here, plan, "vit_tiny", BLOCKS, precision=precision)
    assert parity.is_within, parity


def test_resnet_with_local_batch_norm(here: World, plan: str) -> None:
    parity = parity_of(here, plan, "resnet18", **BATCH_NORM)
    assert parity.is_within, parity


@pytest.mark.parametrize("model", ["resnet50", "vit_b16"])
def test_the_large_models(here: World, model: str, plain_plan: str) -> None:
    parity = parity_of(here, plain_plan, model, batch_size=8, microbatches=2)
    assert parity.is_within, parity
    assert parity.tolerance == {"resnet50": 1e-11, "vit_b16": 1e-12}[model]


def test_label_smoothing_is_the_serial_steps(here: World, plan: str) -> None:
    parity = parity_of(here, plan, "cnn", label_smoothing=0.1)
    assert parity.is_within, parity


def test_resnet_with_synchronised_batch_norm(here: World, whole_plan: str) -> None:
    parity = parity_of(here, whole_plan, "resnet18", batch_norm="sync", **BATCH_NORM)
    assert parity.is_within, parity


@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_resnet_in_single_precision(here: World, some_plan: str, batch_norm: str) -> None:
    parity = parity_of(
        here, some_plan, "resnet18", precision="fp32", batch_norm=batch_norm, **BATCH_NORM
    )
    assert parity.is_within, parity


def test_recompute_changes_nothing(here: World, whole_plan: str) -> None:
    parity = parity_of(here, whole_plan, "vit_tiny", BLOCKS, recompute="*.mlp,embed")
    assert parity.is_within, parity


@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_recompute_leaves_batch_norm_alone(here: World, some_plan: str, batch_norm: str) -> None:
    parity = parity_of(
        here,
        some_plan,
        "resnet18",
        batch_norm=batch_norm,
        recompute="layer1.0,layer3.0,stem",
        **BATCH_NORM,
    )
    assert parity.is_within, parity


def test_brain_floats_cross_boundaries(here: World, plan: str) -> None:
    parity = parity_of(here, plan, "vit_tiny", BLOCKS, precision="bf16")
    assert parity.is_within, parity


def test_no_plan_leans_on_the_buffers_of_mpi(here: World, plan: str) -> None:
    parity = parity_of(here, plan, "cnn", synchronous=True)
    assert parity.is_within, parity
