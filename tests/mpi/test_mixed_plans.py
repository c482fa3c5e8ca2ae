"""Plans of the planner that give components other ranks compute the gradients of the serial step.

As in test_plans; a rank may be in several stages, and some components are on all ranks.
"""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from hvdtrain.check.plan import check_plan
from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component
from hvdtrain.models.costs import component_costs
from hvdtrain.plan.plan import Plan
from hvdtrain.planner.assign import assigned_plans
from hvdtrain.planner.clusters import load, question_of
from hvdtrain.world import World
from tests.mpi.common import CLASSES, components_of
from tests.mpi.test_odd_models import KINDS, components_with

pytestmark = [pytest.mark.proof, pytest.mark.several_ranks]
# Pixels, images of a batch, micro-batches of the plans. A batch norm needs several samples.
MODELS = {
    "cnn": (16, 13, (1, 2)),
    "resnet18": (8, 8, (1,)),
    "vit_tiny": (16, 8, (1,)),
    "tied_weights": (8, 13, (1, 2)),
    "Dropping": (8, 13, (1, 2)),
}


def mixed_plans(
    components: list[Component], size: int, batch: int, numbers: Sequence[int], ranks: int
) -> list[Plan]:
    """Return the best plans, on a slow network, with neighbours on ranks that differ and overlap.

    Those of the most groups of ranks come first, for each number of micro-batches in turn.
    """
    costs = component_costs(components, size, classes=CLASSES)
    question = question_of(load("16-cpu-10g", ranks), costs, batch, "sgd")
    plans = [
        plan
        for number in numbers
        for plan in assigned_plans(question, number, 40)
        if any(
            first.ranks != then.ranks and set(first.ranks) & set(then.ranks)
            for first, then in pairwise(plan.stages)
        )
    ]
    plans.sort(key=lambda plan: -len({stage.ranks for stage in plan.stages}))
    return [next(plan for plan in plans if plan.microbatches == number) for number in numbers]


@pytest.mark.proves("Plans that mix data, model and hybrid parallelism compute serial gradients.")
@pytest.mark.parametrize("model", MODELS)
def test_mixed_plans_of_the_planner(world: World, model: str) -> None:
    size, batch, numbers = MODELS[model]
    components = components_with(KINDS[model]) if model in KINDS else components_of(model, size)
    config = TrainConfig(model=model, data="", precision="fp64", batch_size=batch, seed=3)
    plans: list[Plan] = world.broadcast(
        mixed_plans(components, size, batch, numbers, world.size) if world.rank == 0 else None
    )
    for plan in plans:
        parity = check_plan(config, components, plan, size, CLASSES, world, (batch,))
        assert parity.is_within, (plan, parity)
