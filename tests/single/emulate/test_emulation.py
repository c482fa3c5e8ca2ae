"""The dilation of an emulation: the runtime itself must be a small part of a step."""

import pytest

from hvdtrain.emulate.clock import Clock
from hvdtrain.emulate.device import Hardware
from hvdtrain.emulate.emulation import Emulation, low_dilation, sufficient_dilation
from hvdtrain.plan.plan import pipeline, replicated
from hvdtrain.planner.clusters import load, question_of
from tests.pure.planner.test_clusters import costs_of


def emulation(dilation: float, ranks: int = 2) -> Emulation:
    cluster, costs = load("8-v100", ranks), costs_of("resnet50")
    hardware = Hardware(cluster, 0, Clock(dilation))
    return Emulation("8-v100", hardware, question_of(cluster, costs, 64, "sgd"), [])


def test_a_low_dilation_is_reported_with_a_sufficient_one() -> None:
    plan = replicated([cost.name for cost in costs_of("resnet50")], 2, None, None)
    enough = sufficient_dilation(emulation(1), plan, 2)
    assert enough > 2
    assert low_dilation(emulation(enough), plan, 2) == ()
    (line,) = low_dilation(emulation(enough / 10), plan, 2)
    assert f"with {enough:g} it adds 3%" in line
    assert "adds about 30% to a step" in line


@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_on_the_same_cores_need_a_larger_dilation(ranks: int) -> None:
    costs = costs_of("resnet50")
    names, work = [cost.name for cost in costs], [cost.forward_flops for cost in costs]

    def enough(number: int) -> float:
        plan = pipeline(names, work, number, number, 1, None, "1f1b")
        return sufficient_dilation(emulation(1, number), plan, number)

    assert enough(ranks) > enough(ranks // 2)
