"""Generate schedules: for each rank, the list of actions that make up one step.

One list-scheduling generator makes all compute orders. It simulates a step in discrete time with
unit costs; whenever ranks are free, it starts the actions that a policy prefers. An action of a
stage occupies all its ranks, so that all replicas run a stage's actions in the same order. Passes
then add loads, transfers, reductions and updates. Schedules are plain data: nothing here depends
on processes or tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain.parallel import passes
from hvdtrain.parallel.actions import (
    Action,
    Schedule,
    ScheduleError,
    from_csv,
    from_text,
    last_backward,
    parse_action,
    peers,
    tag,
    to_csv,
    to_text,
)
from hvdtrain.parallel.cut import Cut
from hvdtrain.parallel.passes import UNITS
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.policies import FORWARD_ONLY, Key, Pipeline, Policy, as_pipeline, choose

__all__ = [
    "Action",
    "Schedule",
    "ScheduleError",
    "compute_order",
    "evaluation",
    "from_csv",
    "from_text",
    "last_backward",
    "parse_action",
    "peers",
    "tag",
    "to_csv",
    "to_text",
    "training_step",
]


def training_step(plan: Plan, cut: Cut) -> Schedule:
    """Return the schedule of a training step: forwards and backwards, then the updates."""
    schedule = passes.merge_halves(compute_order(plan, cut.microbatches), plan)
    schedule = passes.add_exchange(schedule, plan, cut)
    schedule = passes.add_loads(schedule, plan)
    return passes.add_steps(passes.add_reductions(schedule))


def evaluation(plan: Plan, cut: Cut) -> Schedule:
    """Return a forward-only schedule."""
    schedule = _by_rank(
        plan, _list_schedule(plan, as_pipeline(plan, cut.microbatches), FORWARD_ONLY)
    )
    return passes.add_loads(passes.add_exchange(schedule, plan, cut), plan)


def compute_order(plan: Plan, microbatches: int) -> Schedule:
    """Return only the forwards and backwards of a training step, in the order of each rank."""
    pipeline = as_pipeline(plan, microbatches)
    return _by_rank(plan, _list_schedule(plan, pipeline, choose(plan, pipeline)))


def _by_rank(plan: Plan, actions: list[Action]) -> Schedule:
    return {
        rank: [action for action in actions if rank in plan.stages[action.stage].ranks]
        for rank in plan.ranks
    }


@dataclass
class _Progress:
    """The state of a step under simulation.

    The micro-batches of a stage run each kind of action in order, so that the number of ended
    ones is the next one. A whole backward counts as its two halves.

    Attributes:
        ends: end times of the micro-batches, by kind (F, I, W) and stage.
        busy: the time from which a rank is free, by rank.
    """

    plan: Plan
    pipeline: Pipeline
    policy: Policy
    ends: dict[str, list[list[int]]]
    busy: dict[int, int]

    def next(self, kind: str, stage: int) -> int:
        """Return the next micro-batch of a kind of action on a stage."""
        return len(self.ends["I" if kind == "B" else kind][stage])

    def has_ended(self, kind: str, stage: int, microbatch: int, now: int) -> bool:
        """Return whether an action has ended."""
        ends = self.ends[kind][stage]
        return microbatch < len(ends) and ends[microbatch] <= now

    def is_free(self, stage: int, now: int) -> bool:
        """Return whether all ranks of a stage are free."""
        return all(self.busy[rank] <= now for rank in self.plan.stages[stage].ranks)

    def start(self, action: Action, now: int) -> None:
        """Start an action: all ranks of the stage are busy until it ends."""
        end = now + UNITS[action.kind]
        for kind in "IW" if action.kind == "B" else action.kind:
            self.ends[kind][action.stage].append(end)
        for rank in self.plan.stages[action.stage].ranks:
            self.busy[rank] = end


def _list_schedule(plan: Plan, pipeline: Pipeline, policy: Policy) -> list[Action]:
    """Return all actions by start time, an order that every rank can follow."""
    stages = range(pipeline.stages)
    progress = _Progress(
        *(plan, pipeline, policy),
        ends={kind: [[] for _ in stages] for kind in "FIW"},
        busy=dict.fromkeys(plan.ranks, 0),
    )
    kinds_of_stages = sum(len(_kinds(plan, policy, stage)) for stage in stages)
    order: list[Action] = []
    now = 0
    while len(order) < pipeline.microbatches * kinds_of_stages:
        startable = _startable(progress, now)
        for action in sorted(startable, key=lambda action: _preference(progress, action)):
            if progress.is_free(action.stage, now):
                progress.start(action, now)
                order.append(action)
        # Some rank is always busy: a cap never blocks the actions that would free it.
        now = min(end for end in progress.busy.values() if end > now)
    return order


def _kinds(plan: Plan, policy: Policy, stage: int) -> list[str]:
    """Return the kinds of actions that a stage runs for each micro-batch.

    A backward is split only if other ranks can wait for its input gradients.
    """
    held = {plan.stages[number].ranks for number in range(stage + 1)}
    kinds = "FIW" if policy.splits and len(held) > 1 else "FB"
    return [kind for kind in kinds if kind in policy.priorities]


def _preference(progress: _Progress, action: Action) -> Key:
    policy = progress.policy
    kind = policy.priorities.index(action.kind)
    return kind, *policy.order(progress.pipeline, action)


def _startable(progress: _Progress, now: int) -> Iterator[Action]:
    """Yield the actions that can start now."""
    for stage in range(progress.pipeline.stages):
        if not progress.is_free(stage, now):
            continue
        for kind in _kinds(progress.plan, progress.policy, stage):
            action = Action(stage, kind, progress.next(kind, stage))
            has_room = kind != "F" or _has_room(progress, stage)
            if has_room and _is_ready(progress, action, now) and _has_turn(progress, action):
                yield action


def _is_ready(progress: _Progress, action: Action, now: int) -> bool:
    """Return whether the inputs of an action are there."""
    stage, kind, k = action
    if k is None or k >= progress.pipeline.microbatches:
        return False
    if kind == "F":
        return stage == 0 or progress.has_ended("F", stage - 1, k, now)
    if kind == "W":
        return progress.has_ended("I", stage, k, now)
    if progress.policy.forwards_first and not _did_all_forwards(progress, stage):
        return False
    is_last = stage == progress.plan.last
    return progress.has_ended("F", stage, k, now) and (
        is_last or progress.has_ended("I", stage + 1, k, now)
    )


def _did_all_forwards(progress: _Progress, stage: int) -> bool:
    """Return whether every rank of a stage has done the forwards of all the stages it holds."""
    ranks = set(progress.plan.stages[stage].ranks)
    return all(
        progress.next("F", other) == progress.pipeline.microbatches
        for other, held in enumerate(progress.plan.stages)
        if ranks & set(held.ranks)
    )


def _has_room(progress: _Progress, stage: int) -> bool:
    """Return whether the caps allow one more forward."""
    policy, pipeline = progress.policy, progress.pipeline
    in_flight = sum(
        progress.next("F", other) - progress.next("I", other)
        for other in (pipeline.sharing(stage) if policy.is_grouped else [stage])
    )
    unfinished = progress.next("F", stage) - progress.next("W", stage)
    return in_flight < policy.cap(pipeline, stage) and unfinished < policy.unfinished(pipeline)


def _has_turn(progress: _Progress, action: Action) -> bool:
    """Return whether no other stage of the group comes first in the group's order."""
    if not progress.policy.is_grouped:
        return True
    others = (
        Action(stage, action.kind, progress.next(action.kind, stage))
        for stage in progress.pipeline.sharing(action.stage)
    )
    return all(
        other.microbatch == progress.pipeline.microbatches
        or _preference(progress, action) <= _preference(progress, other)
        for other in others
    )
