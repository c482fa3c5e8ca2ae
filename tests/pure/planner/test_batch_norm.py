"""The groups of samples that batch norm normalises: reported, and kept if requested."""

from dataclasses import replace

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.plan.cut import is_same
from hvdtrain.plan.plan import Plan, Stage, replicated
from hvdtrain.planner.candidate import counted
from hvdtrain.planner.cost import Question
from hvdtrain.planner.solve import solve
from tests.pure.planner.machines import component, known, network

COSTS = [replace(component(number), batch_norms=number % 2) for number in range(6)]
NAMES = [cost.name for cost in COSTS]
SIZES = (32, 7)


def question(slowness: list[float], keeps: Plan | None = None) -> Question:
    machine = known(COSTS, [1] * 6, slowness, network(len(slowness)))
    kept = (keeps, SIZES) if keeps else None
    number = keeps.microbatches if keeps else None
    return Question(machine, 32, "sgd", microbatches=number, keeps=kept)


@pytest.mark.proves(
    "An adaptive plan keeps what batch norm computes and can take every batch of the run; "
    "`plan show` says where batch norm differs from one rank's."
)
def test_shares_do_not_change_what_batch_norm_computes_unless_that_is_wanted() -> None:
    """A slow rank once got fewer samples, and batch norm other groups, without a message."""
    equal = replicated(NAMES, 2, 1, None)
    assert solve(question([1, 2])).chosen.plan.stages[0].shares == (22, 10)
    solution = solve(question([1, 2], equal))
    normed = [cost.name for cost in COSTS if cost.batch_norms]
    assert all(
        is_same(equal, candidate.plan, SIZES, normed, False) for candidate in solution.candidates
    )
    assert solution.chosen.plan == equal


def test_where_every_other_plan_changes_it_none_is_found() -> None:
    unequal = Plan((Stage(tuple(NAMES), (0, 1), (5, 2)),))
    with pytest.raises(UsageError, match="over which samples batch norm normalises"):
        solve(question([2, 1], unequal))


def test_a_stage_may_take_other_components_with_the_same_samples() -> None:
    def staged(first: int) -> Plan:
        stages = (Stage(tuple(NAMES[:first]), (0,), (1,)), Stage(tuple(NAMES[first:]), (1,), (1,)))
        return Plan(stages, 4)

    assert is_same(staged(3), staged(4), SIZES, NAMES, False)
    assert not is_same(staged(3), replace(staged(3), microbatches=8), SIZES, NAMES, False)
    assert not is_same(staged(3), replicated(NAMES, 2, 4, None), SIZES, NAMES, False)
    assert is_same(staged(3), replicated(NAMES, 2, 4, None), [32], NAMES, True)
    assert is_same(staged(3), replicated(NAMES, 2, 1, None), SIZES, [], False)


@pytest.mark.parametrize(
    ("plan", "is_synchronised", "remark"),
    [
        (replicated(NAMES, 1, None, None), False, ""),
        (replicated(NAMES, 2, None, None), False, "over 16 samples here, over 32 on one rank"),
        (replicated(NAMES, 2, None, None), True, ""),
        (replicated(NAMES, 3, 2, None), False, "over 5 to 6 samples here, over 32 on one rank"),
        (replicated(NAMES, 2, 4, None), True, "over 8 samples here, over 32 on one rank"),
    ],
)
def test_a_plan_that_changes_it_is_shown_with_that(
    plan: Plan, is_synchronised: bool, remark: str
) -> None:
    remarks = counted(plan, COSTS, 32, "sgd", is_synchronised=is_synchronised).remarks
    assert [remark in line for line in remarks[1:]] == [True] * bool(remark)
    without = [replace(cost, batch_norms=0) for cost in COSTS]
    assert len(counted(plan, without, 32, "sgd", is_synchronised=is_synchronised).remarks) == 1
