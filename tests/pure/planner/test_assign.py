"""The ranks of each component, against trying all assignments, and against simulated steps."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hvdtrain.models.costs import ComponentCost
from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.planner.assign import (
    PAPER_DIVIDED,
    UNFIT,
    Prices,
    Ranks,
    assign,
    assigned_plans,
    groups_of,
    paper_seconds,
    prices_of,
)
from hvdtrain.planner.candidate import play
from hvdtrain.planner.clusters import load, question_of
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.divide import shares_of
from hvdtrain.planner.network import Curve, Line, MeasuredNetwork
from hvdtrain.planner.profile import ComponentTimes, Profile, RankTimes
from hvdtrain.planner.solve import solve
from tests.pure.planner.test_clusters import costs_of

ALL = 4096  # more partial assignments than there are


def random_prices(seed: int, alike: bool, limited: bool) -> Prices:
    """Return random prices of one to five components on one to three ranks."""
    draw = np.random.default_rng(seed)
    components, ranks = int(draw.integers(1, 6)), int(draw.integers(1, 4))
    if ranks == 3:
        components = min(components, 4)
    groups = groups_of(ranks)
    member = np.array([[rank in group for rank in range(ranks)] for group in groups])
    count = member.sum(axis=1)
    work = draw.uniform(0, 1, components) * draw.choice([0, 1, 5], components)
    held = draw.uniform(0, 1, components) * draw.choice([0.1, 3], components)
    slowness = np.ones(ranks) if alike else 1 + draw.uniform(0, 0.5, ranks)
    slowest = np.array([slowness[list(group)].max() for group in groups])
    passing = work[:, None] / count * slowest + 0.02
    either = (member[:, None] | member[None, :]) * ~np.eye(len(groups), dtype=bool)[:, :, None]
    slopes = np.full(either.shape[:2], 0.3) if alike else draw.uniform(0, 1, either.shape[:2])
    received = np.stack([0.01 * either, slopes[:, :, None] * either])
    sizes = draw.uniform(0, 1, components - 1)
    return Prices(
        member=member,
        alike=np.zeros(ranks, int) if alike else np.arange(ranks),
        microbatches=int(draw.choice([1, 2, 4, 8])),
        passing=passing,
        backward=passing * 2 / 3,
        update=0.1 * held[:, None] * np.ones(len(groups)),
        reduction=(count > 1) * held[:, None] * (2 - 2 / count),
        latency=0.05 * (count > 1),
        sizes=np.where(draw.uniform(size=components - 1) < 0.15, UNFIT, sizes),
        change=2 * received.max(axis=-1),
        received=received,
        lasting=3 * held[:, None] * np.ones(len(groups)),
        flight=work[:, None] / count,
        limits=np.full(ranks, 2.1 * held.sum()) if limited else None,
    )


def estimate(prices: Prices, path: tuple[int, ...]) -> float:
    """Return the estimate of an assignment by playing its last backward; UNFIT if it is none."""
    ranks, again = prices.member.shape[1], prices.microbatches - 1
    stages = [(group, list(run)) for group, run in itertools.groupby(path)]
    used = set()
    passing, load, held = 0.0, np.zeros(ranks), np.zeros(ranks)
    start = 0
    places: list[tuple[int, list[int]]] = []
    for number, (group, run) in enumerate(stages):
        mine = prices.member[group]
        used |= set(np.flatnonzero(mine).tolist())
        components = list(range(start, start + len(run)))
        places.append((group, components))
        in_flight = min(prices.microbatches, len(stages) - number)
        for component in components:
            passing += prices.passing[component, group]
            load[mine] += again * prices.passing[component, group]
            load[mine] += prices.update[component, group]
            held[mine] += prices.lasting[component, group]
            held[mine] += in_flight * prices.flight[component, group]
        start += len(run)
        if number + 1 < len(stages):
            size, behind = prices.sizes[start - 1], stages[number + 1][0]
            if not math.isfinite(size):
                return UNFIT
            passing += prices.change[0, group, behind] + size * prices.change[1, group, behind]
            fixed, per_byte = prices.received[:, group, behind]
            load += again * (fixed + size * per_byte)
    if len(used) < ranks or (prices.limits is not None and (held > prices.limits).any()):
        return UNFIT
    now, summed = 0.0, np.zeros(ranks)
    for group, components in reversed(places):
        now += sum(prices.backward[component, group] for component in components)
        mine = prices.member[group]
        if mine.sum() > 1:
            seconds = prices.latency[group] + prices.reduction[components, group].sum()
            summed[mine] = max(now, summed[mine].max()) + seconds
    return passing + float((load + np.maximum(0.0, summed - now)).max())


@pytest.mark.proves(
    "The ranks of each component (all, some or one, in any mix) are the best of all assignments, "
    "by the planner's estimate, on small cases."
)
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("seed", range(50))
def test_the_best_of_all_assignments_is_found(seed: int, alike: bool, limited: bool) -> None:
    prices = random_prices(seed, alike, limited)
    components, groups = prices.passing.shape
    paths = itertools.product(range(groups), repeat=components)
    wanted = min(estimate(prices, path) for path in paths)
    assignments = assign(prices, ALL)
    if wanted == UNFIT:
        assert not assignments
    else:
        assert assignments[0].seconds == pytest.approx(wanted, rel=1e-12)
        assert estimate(prices, assignments[0].groups) == pytest.approx(wanted, rel=1e-12)


def random_question(components: int, ranks: int, seed: int, batch_size: int) -> Question:
    """Return a random model; for odd seeds, all ranks are alike."""
    draw = np.random.default_rng(seed)
    costs = [
        ComponentCost(
            name=f"part{number}",
            parameters=parameters,
            parameter_bytes=4 * parameters,
            buffer_bytes=0,
            forward_flops=float(draw.uniform(1e6, 1e8)),
            output_shape=(output,),
            output_bytes=4 * output,
            saved_bytes=50_000,
        )
        for number, (parameters, output) in enumerate(
            zip(
                draw.integers(25_000, 1_000_000, components).tolist(),
                draw.integers(2_500, 25_000, components).tolist(),
                strict=True,
            )
        )
    ]
    seconds = draw.uniform(1e-5, 1e-4, components)

    def times(slope: float) -> ComponentTimes:
        forward, backward = (Curve.straight(Line(2e-5, n * slope), batch_size) for n in (1.0, 2.0))
        return ComponentTimes(forward, backward, forward, forward, update=1e-5)

    rank = RankTimes({c.name: times(slope) for c, slope in zip(costs, seconds, strict=True)})
    slowness = np.ones(ranks) if seed % 2 else draw.uniform(1, 2, ranks)
    summed = Curve.straight(Line(1e-4, 2e-9), 1e9)
    network = MeasuredNetwork(
        ("here",) * ranks,
        {False: {2: summed, max(3, ranks): summed}},
        {False: Curve.straight(Line(1e-4, 1e-10), 1e9)},
    )
    profile = Profile(tuple(rank.times(float(factor)) for factor in slowness))
    return Question(Known(costs, profile, network), batch_size, "sgd")


def plan_of(question: Question, path: tuple[Ranks, ...], microbatches: int) -> Plan:
    """Return the plan of an assignment of groups of ranks."""
    stages, start = [], 0
    for ranks, run in itertools.groupby(path):
        stop = start + len(list(run))
        shares = shares_of(question, ranks, -(-question.batch_size // microbatches))
        stages.append(Stage(tuple(question.known.profile.names[start:stop]), ranks, shares))
        start = stop
    return Plan(tuple(stages), microbatches)


def plans(question: Question) -> Iterator[Plan]:
    """Yield the plans of all assignments."""
    groups = groups_of(question.ranks)
    for path in itertools.product(groups, repeat=len(question.known.costs)):
        if set(itertools.chain(*path)) == set(range(question.ranks)):
            for microbatches in (1, 2, 4, 8):
                yield plan_of(question, path, microbatches)


@pytest.mark.parametrize(("components", "ranks"), [(4, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_no_assignment_is_simulated_to_be_much_faster_than_the_chosen_plan(
    components: int, ranks: int, seed: int
) -> None:
    """The chosen plan may be slower by what a simpler one is allowed to be, and a little more."""
    question = random_question(components, ranks, seed, [16, 64, 256][seed % 3])
    fastest = min(play(question, plan, "").seconds for plan in plans(question))
    assert solve(question).chosen.seconds < 1.03 * fastest


@pytest.mark.parametrize(("cluster", "batch"), [("16-cpu-10g", 96), ("8-v100", 16)])
def test_of_the_cnn_no_assignment_to_three_ranks_is_much_faster(cluster: str, batch: int) -> None:
    """Estimates leave out that the backward of a stage hides its own first all-reduces."""
    question = question_of(load(cluster, 3), costs_of("cnn"), batch, "adam")
    at_once = (plan for plan in plans(question) if plan.microbatches == 1)
    fastest = min(play(question, plan, "").seconds for plan in at_once)
    assert solve(question).chosen.seconds < 1.016 * fastest


def test_without_other_micro_batches_the_estimate_is_the_simulated_step() -> None:
    """The estimate leaves out micro-batches that wait, and the first bucket of a stage."""
    for seed in range(1, 20, 2):
        question = random_question(4, 3, seed, 64)
        groups = groups_of(3)
        for one in assign(prices_of(question, 1, groups), ALL, 4):
            plan = plan_of(question, tuple(groups[group] for group in one.groups), 1)
            simulated = play(question, plan, "").seconds
            assert 0.93 * one.seconds < simulated < 1.005 * one.seconds


def test_convolutions_on_all_ranks_and_the_dense_layer_on_one() -> None:
    """Krizhevsky (2014): what has few weights is copied, what has many stays in one place."""
    question = random_question(2, 2, 1, 16)
    first, second = question.known.costs
    first = replace(first, parameters=2_500, parameter_bytes=10_000, output_bytes=10_000)
    second = replace(second, parameters=10**7, parameter_bytes=4 * 10**7, output_bytes=40)
    long = question.known.profile.ranks[0].times(20)
    quick = question.known.profile.ranks[0].components[second.name]
    rank = replace(long, components={**long.components, second.name: quick})
    known = replace(question.known, costs=(first, second), profile=Profile((rank, rank)))
    chosen = solve(replace(question, known=known)).chosen.plan
    assert [len(stage.ranks) for stage in chosen.stages] == [2, 1]  # the ranks are alike


def test_of_five_ranks_runs_of_neighbours_lose_little_against_all_sets() -> None:
    ranks = 5
    every = [one for n in range(ranks) for one in itertools.combinations(range(ranks), n + 1)]
    for seed in range(1, 9, 2):
        question = random_question(3, ranks, seed, 64)
        best, among_runs = (
            assign(prices_of(question, 4, groups), ALL)[0].seconds
            for groups in (every, groups_of(ranks))
        )
        assert best <= among_runs < 1.03 * best


def test_many_ranks_are_in_equal_parts() -> None:
    assert [len(groups_of(ranks)) for ranks in (1, 2, 3, 4, 8, 16)] == [1, 3, 7, 15, 36, 31]
    assert groups_of(16)[-3:] == [tuple(range(8)), tuple(range(8, 16)), tuple(range(16))]


def test_five_hundred_components_on_sixty_four_ranks_are_assigned() -> None:
    question = random_question(500, 64, 0, 256)
    (plan,) = assigned_plans(question, 4, 1)
    assert [name for stage in plan.stages for name in stage.components] == [
        *question.known.profile.names
    ]
    assert plan.ranks == tuple(range(64))


def test_the_plan_of_the_papers_objective_has_the_least_of_all() -> None:
    """The printed value of a plan and what is minimised are the same sum."""
    question = random_question(3, 2, 1, 64)
    plan = next(assigned_plans(question, 1, 1, PAPER_DIVIDED))
    everything = [paper_seconds(question, other) for other in plans(question)]
    assert paper_seconds(question, plan) == pytest.approx(min(everything), rel=1e-12)
    assert paper_seconds(question, plan) < max(everything)
