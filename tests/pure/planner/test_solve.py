"""The solver chooses the right plan in cases where the best one is known."""

import itertools
import random
from dataclasses import replace

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.planner.candidate import play
from hvdtrain.planner.cost import Question
from hvdtrain.planner.divide import (
    Tables,
    division_at,
    limit_of,
    places_of,
    refined,
)
from hvdtrain.planner.solve import lower_bound, solve
from tests.pure.planner.machines import component, known, network, question

MIB = 2**20


def test_data_parallelism_is_chosen_where_sums_cost_nothing() -> None:
    solution = solve(question())
    assert solution.chosen.name == "dp"
    assert solution.chosen.plan.stages[0].shares == (1, 1)
    assert solution.chosen.seconds == pytest.approx(solution.bound)


def test_a_pipeline_is_chosen_where_sums_cost_much() -> None:
    solution = solve(question(reduce_per_byte=1.0))
    assert [len(stage.components) for stage in solution.chosen.plan.stages] == [3, 3]
    assert solution.chosen.plan.microbatches > 8
    assert 0 < solution.gap < 0.1


def test_unlike_ranks_have_unequal_shares_or_stages() -> None:
    solution = solve(question(slowness=[1, 2]))
    assert solution.chosen.plan.stages[0].shares == (22, 10)
    solution = solve(question(slowness=[1, 2], reduce_per_byte=1.0))
    assert [len(stage.components) for stage in solution.chosen.plan.stages] == [4, 2]


def test_one_rank_runs_alone() -> None:
    assert solve(question(1)).chosen.name == "single"


def test_what_a_user_has_set_stays() -> None:
    solution = solve(question(reduce_per_byte=1.0, microbatches=4, schedules=("gpipe",)))
    assert (solution.chosen.plan.microbatches, solution.chosen.plan.schedule) == (4, "gpipe")


def test_a_limit_below_what_replicas_need_gives_stages() -> None:
    costs = [component(number, parameter_bytes=100 * MIB) for number in range(4)]
    machine = known(costs, [1] * 4, [1, 1], network(2))
    free = solve(Question(machine, 8, "adam"))
    assert free.chosen.name == "dp"
    # Weights, gradients, Adam's two moments, half of a checkpoint's copy, Horovod's buffer.
    assert free.chosen.rank_bytes[0] > 2600 * MIB
    limits = [1500 * MIB] * 2
    bound = solve(Question(machine, 8, "adam", limits=limits))
    assert len(bound.chosen.plan.stages) == 2
    assert all(a <= b for a, b in zip(bound.chosen.rank_bytes, limits, strict=True))
    with pytest.raises(UsageError, match=r"no plan fits: the closest, .* lacks 0"):
        solve(Question(machine, 8, "adam", limits=[1300 * MIB] * 2))
    with pytest.raises(UsageError, match=r"part0 alone needs 0.68 GiB, 0.\d\d GiB more than"):
        solve(Question(machine, 8, "adam", limits=[600 * MIB] * 2))


@pytest.mark.parametrize(("schedule", "stop"), [("1f1b", 2), ("gpipe", 3)])
def test_a_division_counts_the_micro_batches_that_its_schedule_holds(
    schedule: str, stop: int
) -> None:
    """Divisions for gpipe counted one micro-batch in the last stage, where it holds all four."""
    costs = [component(number, 0, 0, MIB * (number > 1)) for number in range(4)]
    machine = known(costs, [1] * 4, [1, 1], network(2, 0.0, 0.0, 1.0))
    problem = Question(machine, 4, "sgd", schedules=(schedule,), limits=[4 * MIB] * 2)
    division = division_at(Tables(problem), 4, limit_of(problem, schedule, 4))
    assert division is not None
    assert division.runs[0].stop == stop


def test_the_message_counts_a_whole_micro_batch_unless_it_is_recomputed() -> None:
    """One sample's saved bytes were counted, and also those of recomputed components."""
    costs = [component(number, saved_bytes=MIB) for number in range(2)]
    machine = known(costs, [1] * 2, [1], network(1))
    problem = Question(machine, 64, "sgd", microbatches=2, limits=[16 * MIB])
    with pytest.raises(UsageError, match=r"part0 alone needs 0.03 GiB, 0.02 GiB more than"):
        solve(problem)
    machine = replace(machine, recomputed=("part0", "part1"))
    assert solve(replace(problem, known=machine)).chosen.name == "single"
    with pytest.raises(UsageError, match=r"the closest, single, lacks 0.00 GiB"):
        solve(replace(problem, known=machine, limits=[12_000]))


def test_a_process_that_exceeds_the_limit_is_named() -> None:
    """The message blamed a component that needed 0.00 GiB."""
    machine = known([component(0)], [1], [1], network(1))
    ranks = tuple(replace(rank, resident_bytes=300 * MIB) for rank in machine.profile.ranks)
    machine = replace(machine, profile=replace(machine.profile, ranks=ranks))
    with pytest.raises(UsageError, match=r"process of rank 0 alone holds 0.29 GiB, and only 0.10"):
        solve(Question(machine, 8, "sgd", limits=[100 * MIB]))


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_shorter_than_the_bound_and_few_than_the_chosen(seed: int) -> None:
    """All divisions of small models into stages are tried, for several micro-batches."""
    draw = random.Random(seed)
    n, ranks = draw.randint(2, 4), draw.randint(2, 3)
    costs = [
        component(number, draw.choice([100, 10_000]), draw.choice([10, 1000]))
        for number in range(n)
    ]
    slowness = [draw.choice([1.0, 1.0, 1.5]) for _ in range(ranks)]
    between = network(
        ranks,
        latency=draw.choice([0.0, 0.1]),
        per_byte=draw.choice([0.0, 1e-4]),
        reduce_per_byte=draw.choice([0.0, 1e-3]),
    )
    machine = known(costs, [0.1 + draw.random() for _ in range(n)], slowness, between)
    problem = Question(machine, 12, "sgd")
    solution = solve(problem)
    assert solution.bound == lower_bound(problem)
    times = []
    for plan in all_plans([cost.name for cost in costs], ranks):
        seconds = play(problem, plan, "any").seconds
        assert seconds >= solution.bound * (1 - 1e-9)
        times.append(seconds)
    assert solution.chosen.seconds <= 1.03 * min(times)


def all_plans(names: "list[str]", ranks: int) -> "list[Plan]":
    """Return all plans with equal shares: every division into stages."""
    plans = []
    for stages in range(1, min(len(names), ranks) + 1):
        for cuts in itertools.combinations(range(1, len(names)), stages - 1):
            for parts in itertools.combinations(range(1, ranks), stages - 1):
                edges, bounds = (0, *cuts, len(names)), (0, *parts, ranks)
                divided = tuple(
                    Stage(tuple(names[a:b]), tuple(range(c, d)), (1,) * (d - c))
                    for (a, b), (c, d) in zip(
                        itertools.pairwise(edges), itertools.pairwise(bounds), strict=True
                    )
                )
                plans += [Plan(divided, number) for number in ([1] if stages == 1 else [2, 4])]
    return plans


def test_of_many_components_neighbours_are_kept_together_at_first() -> None:
    """The division of a hundred components is not worse than one with all places."""
    draw = random.Random(1)
    costs = [component(number, draw.choice([100, 9000])) for number in range(100)]
    machine = known(costs, [draw.uniform(1, 3) for _ in costs], [1] * 4, network(4, 0.0, 0.0, 1.0))
    problem = Question(machine, 32, "sgd", microbatches=8)
    whole = Tables(problem)
    places = places_of(problem)
    fine = division_at(whole, 8, None)
    coarse = division_at(Tables(problem, places), 8, None)
    assert len(places) < 60
    assert fine is not None
    assert coarse is not None
    stages = [(whole.times_of(8, run.first, run.number), run[:2]) for run in coarse.runs]
    total = sum(float(times.passing[place]) for times, place in stages)
    slowest = max(float(times.pace[place]) for times, place in stages)
    assert total + slowest == pytest.approx(coarse.seconds)
    better = refined(whole, 8, None, coarse)
    assert better.seconds <= coarse.seconds
    assert better.seconds <= 1.005 * fine.seconds


def test_a_plan_that_only_a_fine_division_fits_is_found() -> None:
    """One component takes nearly all of the time, the others nearly all of the memory."""
    costs = [component(number, parameter_bytes=MIB) for number in range(100)]
    machine = known(costs, [1e-9] * 99 + [1.0], [1, 1], network(2))
    problem = Question(machine, 8, "sgd", limits=[300 * MIB] * 2, microbatches=4)
    solution = solve(problem)
    assert all(held <= 300 * MIB for held in solution.chosen.rank_bytes)
