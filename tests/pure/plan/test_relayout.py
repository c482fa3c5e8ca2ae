"""Moves of components from one plan to another."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.plan.plan import Move, Plan, Stage, is_same_layout, moves, replicated

NAMES = ("a", "b", "c", "d")
RANKS = 4


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw a plan in which ranks hold any components and every component has a rank."""
    cuts = sorted(draw(st.sets(st.integers(1, len(NAMES) - 1))))
    edges = [0, *cuts, len(NAMES)]
    stages = []
    for start, stop in itertools.pairwise(edges):
        ranks = sorted(draw(st.sets(st.integers(0, RANKS - 1), min_size=1)))
        stages.append(Stage(NAMES[start:stop], tuple(ranks), (1,) * len(ranks)))
    return Plan(tuple(stages))


def holds(plan: Plan) -> "set[tuple[str, int]]":
    return {(name, rank) for s in plan.stages for name in s.components for rank in s.ranks}


@given(plans(), plans())
def test_ranks_have_what_they_need_and_nothing_is_sent_twice(before: Plan, after: Plan) -> None:
    planned = moves(before, after)
    assert all((move.component, move.sender) in holds(before) for move in planned)
    received = [(move.component, move.receiver) for move in planned]
    assert len(received) == len(set(received))
    assert set(received) == holds(after) - holds(before)


def test_senders_take_turns() -> None:
    before = Plan((Stage(NAMES, (0, 1), (1, 1)),))
    after = Plan((Stage(NAMES[:2], (2,), (1,)), Stage(NAMES[2:], (3,), (1,))))
    assert moves(before, after) == [
        Move("a", 0, 2),
        Move("b", 1, 2),
        Move("c", 0, 3),
        Move("d", 1, 3),
    ]


def test_other_shares_are_the_same_layout() -> None:
    one = replicated(NAMES, 2, 1, None)
    assert is_same_layout(one, Plan((Stage(NAMES, (0, 1), (2, 1)),), 4))
    assert not is_same_layout(one, Plan((Stage(NAMES, (1, 0), (1, 1)),)))
