"""The margin of a memory limit, and the options with which a plan would fit."""

from dataclasses import replace

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.plan.plan import pipeline, replicated
from hvdtrain.planner.candidate import play
from hvdtrain.planner.cost import Question
from hvdtrain.planner.memory import BUFFERS
from hvdtrain.planner.profile import Profile
from hvdtrain.planner.solve import solve, ways_out
from tests.pure.planner.machines import component, known, network

MIB = 2**20


def question(saved_bytes: int = MIB, ranks: int = 2, output_bytes: int = 0) -> Question:
    """Return a question with four equal components and 16 images per step."""
    costs = [component(number, 0, output_bytes, saved_bytes) for number in range(4)]
    return Question(known(costs, [1] * 4, [1] * ranks, network(ranks)), 16, "sgd")


def test_every_rank_is_planned_with_the_memory_of_the_rank_that_needed_most() -> None:
    one = question().known.profile.ranks[0]
    ranks = (
        replace(one, resident_bytes=5, activation_factor=1.3, activation_spread=0.2),
        replace(one, resident_bytes=9, activation_factor=1.4),
    )
    careful = Profile(ranks).with_margin().ranks
    assert [rank.resident_bytes for rank in careful] == [9, 9]
    assert [rank.activation_factor for rank in careful] == [1.5, 1.5]
    assert careful == Profile(careful).with_margin().ranks


def test_a_limit_that_one_rank_would_exceed_by_chance_is_not_reached() -> None:
    """The solver took each rank by its own measurement: 8 and 16 MiB, which 20 MiB allow."""
    problem = question(ranks=2)
    ranks = problem.known.profile.ranks
    uneven = (ranks[0], replace(ranks[1], activation_factor=2.0))
    plan = replicated(problem.known.profile.names, 2, 1, None)
    for profile, most in (
        (Profile(uneven), (32 * MIB, 64 * MIB)),
        (Profile(uneven).with_margin(), (64 * MIB, 64 * MIB)),
    ):
        machine = replace(problem.known, profile=profile)
        assert play(replace(problem, known=machine), plan, "dp").rank_bytes == most


def test_more_microbatches_and_recomputation_are_named_with_what_they_need() -> None:
    problem = question(ranks=1)
    plan = replicated(problem.known.profile.names, 1, 2, None)
    held = play(problem, plan, "").rank_bytes
    assert held == (32 * MIB,)
    assert ways_out(problem, plan, [9 * MIB]) == [
        "--microbatches 8 would need 0.01 GiB",
        "--recompute all would need 0.00 GiB",
    ]


def test_what_would_not_fit_is_not_named() -> None:
    problem = question(ranks=1, output_bytes=4 * MIB)
    plan = replicated(problem.known.profile.names, 1, 16, None)
    assert play(problem, plan, "").rank_bytes == (20 * MIB,)
    assert ways_out(problem, plan, [MIB]) == []


def test_the_message_names_what_would_fit() -> None:
    problem = replace(question(ranks=1), microbatches=1, limits=[40 * MIB])
    with pytest.raises(UsageError, match=r"--microbatches 2 would need 0.03 GiB, --recompute all"):
        solve(problem)


def test_inputs_and_gradients_at_a_boundary_are_counted() -> None:
    """A stage keeps its input for each micro-batch in flight; nobody counted these buffers."""
    output = 1000
    problem = question(saved_bytes=0, output_bytes=output)
    names, rows = problem.known.profile.names, 4
    plan = pipeline(names, [1.0] * 4, 2, 2, 1, 4, "1f1b", "mp")
    first, last = play(problem, plan, "").rank_bytes
    without = play(question(saved_bytes=0), plan, "").rank_bytes
    assert without == (0, 0)
    outputs = 2 * rows * output  # of the two components of a stage, for each one in flight
    assert first == 2 * outputs + BUFFERS * rows * output
    assert last == outputs + (1 + BUFFERS) * rows * output
