"""Schedules: for each rank, the list of actions that make up one step.

One list-scheduling generator makes all compute orders. It simulates a step in discrete time with
unit costs and starts, as soon as ranks are free, the action that a policy prefers; an action of a
stage occupies all its ranks, so that all replicas run a stage's actions in the same order. Passes
then add the actions that do not compute. Nothing in this module knows of processes or tensors.

All passes keep one total order of all actions, in which a transfer lies between the action that
produces its data and the one that consumes it, and a RECV lies before its SEND. Each rank's list
is a subsequence of that order, so that no rank waits for a later action: there is no deadlock,
even if SENDs block.

The program of a rank has the actions of its list with their rows, peers and message tags.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from hvdtrain.plan.cut import (
    RECEIPTS,
    SENDS,
    WEIGHTS,
    Action,
    Cut,
    Range,
    Schedule,
    ScheduleError,
    Share,
    boundary,
    cut,
    inputs,
    is_upstream,
    last_backward,
    offsets,
    partner,
    peers,
    receipt_for,
    send_after,
    tag,
)
from hvdtrain.plan.plan import Plan

UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}  # time units, without measurements


def merge_halves(schedule: Schedule, plan: Plan) -> Schedule:
    """Merge an I and the W that follows it into one B, if no other rank waits for the I.

    A whole backward costs less than its halves, which only serve to send gradients sooner. All
    replicas of a stage merge the same pairs.
    """
    if not any(action.kind == "W" for actions in schedule.values() for action in actions):
        return schedule
    ends = completions(schedule, plan)
    pairs = {pair for actions in schedule.values() for pair in pairwise(actions)}
    broken = {
        second
        for actions in schedule.values()
        for first, second in pairwise([None, *actions])
        if second and second.kind == "W" and first != second._replace(kind="I")
    }

    def is_merged(half: Action) -> bool:
        first, second = half._replace(kind="I"), half._replace(kind="W")
        if (first, second) not in pairs or second in broken:
            return False
        waiting = (Action(half.stage - 1, kind, half.microbatch) for kind in "BI")
        return all(ends[w] - UNITS[w.kind] >= ends[second] for w in waiting if w in ends)

    merged: Schedule = {}
    for rank, actions in schedule.items():
        merged[rank] = []
        for action in actions:
            if action.kind not in "IW" or not is_merged(action):
                merged[rank].append(action)
            elif action.kind == "I":
                merged[rank].append(action._replace(kind="B"))
    return merged


def add_exchange(schedule: Schedule, plan: Plan, cut: Cut) -> Schedule:
    """Add a SEND and a RECV to a compute-only schedule wherever data goes to another rank.

    The sender's action determines the place of both: the RECV is posted when the data is ready.
    """
    ends = completions(schedule, plan)
    added: Schedule = {rank: [] for rank in schedule}
    for action in sorted(ends, key=lambda action: ends[action]):
        for rank in plan.stages[action.stage].ranks:
            added[rank].append(action)
        send = send_after(action, plan.last)
        for exchange in (partner(send), send) if send else ():
            for rank in plan.stages[exchange.stage].ranks:
                if peers(cut, rank, exchange):
                    added[rank].append(exchange)
    return added


def add_loads(schedule: Schedule, plan: Plan) -> Schedule:
    """Add a LOAD before each forward of the first stage (images) and of the last (labels)."""
    loaded: Schedule = {}
    for rank, actions in schedule.items():
        loaded[rank] = []
        for action in actions:
            if action.kind == "F" and action.stage in (0, plan.last):
                loaded[rank].append(action._replace(kind="LOAD"))
            loaded[rank].append(action)
    return loaded


def add_reductions(schedule: Schedule) -> Schedule:
    """Add a REDUCE for each stage after its gradients are complete and its last SEND started."""
    reduced: Schedule = {}
    for rank, actions in schedule.items():
        last = {a.stage: i for i, a in enumerate(actions) if a.kind in (*WEIGHTS, "SEND_B")}
        reduced[rank] = []
        for index, action in enumerate(actions):
            reduced[rank].append(action)
            if last.get(action.stage) == index:
                reduced[rank].append(Action(action.stage, "REDUCE"))
    return reduced


def add_updates(schedule: Schedule) -> Schedule:
    """Add a STEP for each stage at the end of each rank's list."""
    return {
        rank: actions + [Action(stage, "STEP") for stage in sorted({a.stage for a in actions})]
        for rank, actions in schedule.items()
    }


def completions(schedule: Schedule, plan: Plan) -> dict[Action, int]:
    """Return the end time of each action of a compute-only schedule, at the costs of UNITS.

    An action starts when all ranks of its stage have reached it and its inputs are there;
    transfers take no time.

    Raises:
        ScheduleError: if an action never starts.
    """
    ends: dict[Action, int] = {}
    free = dict.fromkeys(schedule, 0)
    position = dict.fromkeys(schedule, 0)
    members = _representatives(schedule, plan)
    together = {rank for ranks in members for rank in ranks}
    left = {rank for rank in together if schedule[rank]}
    while left:
        before = len(ends)
        for rank in sorted(left):
            if rank not in left:
                continue
            action = schedule[rank][position[rank]]
            ranks = members[action.stage]
            if not all(_head(schedule, position, other) == action for other in ranks):
                continue
            ready = [[ends[a] for a in needs if a in ends] for needs in inputs(action, plan.last)]
            if not all(ready):
                continue
            start = max([free[other] for other in ranks] + [end for e in ready for end in e])
            ends[action] = start + UNITS[action.kind]
            for other in ranks:
                free[other] = ends[action]
                position[other] += 1
                if position[other] == len(schedule[other]):
                    left.remove(other)
        if len(ends) == before:
            stuck = (f"rank {rank} at {schedule[rank][position[rank]]}" for rank in sorted(left))
            raise ScheduleError(f"the schedule hangs: {', '.join(stuck)}")
    return ends


def _representatives(schedule: Schedule, plan: Plan) -> list[tuple[int, ...]]:
    """Return the ranks of each stage; if all of them run the same actions, only the first.

    They do if each of them holds the same stages. A plan may have hundreds of replicas.
    """
    held = [stage.ranks for stage in plan.stages]
    groups = set(held)
    is_shared = sum(map(len, groups)) != len(set().union(*groups))
    if is_shared or any(
        schedule[rank] != schedule[ranks[0]] for ranks in groups for rank in ranks
    ):
        return held
    return [ranks[:1] for ranks in held]


def _head(schedule: Schedule, position: dict[int, int], rank: int) -> Action | None:
    actions = schedule.get(rank, ())
    return actions[position[rank]] if position.get(rank, 0) < len(actions) else None


BUCKET_BYTES = 25 * 2**20
# The first bucket is small, so that reductions start early in backward, as in PyTorch's DDP (Li et
# al., "PyTorch Distributed", VLDB 2020).
FIRST_BUCKET_BYTES = 2**20


def group_by_bytes(sizes: Sequence[int], limit: int, first: int) -> list[list[int]]:
    """Return the indices of `sizes`, in order, in groups of at least `limit` bytes.

    A group is closed as soon as it reaches its limit; the last one may be smaller.

    Args:
        sizes: in bytes.
        limit: of each group but the first, in bytes.
        first: the limit of the first group.
    """
    groups: list[list[int]] = [[]]
    total = 0
    for index, size in enumerate(sizes):
        if total >= (limit if len(groups) > 1 else first):
            groups.append([])
            total = 0
        groups[-1].append(index)
        total += size
    return groups


Preference = tuple[int, ...]
UNLIMITED = 10**9


@dataclass(frozen=True)
class Pipeline:
    """The stages of a plan on groups of ranks; a group is the set of ranks of a stage.

    Attributes:
        microbatches: per step.
        stages: the number of stages.
        groups: the number of different groups.
        group: the group of each stage, numbered in the order of the stages.
    """

    microbatches: int
    stages: int
    groups: int
    group: tuple[int, ...]

    def sharing(self, stage: int) -> list[int]:
        """Return all stages of a stage's group, including itself."""
        return [other for other in range(self.stages) if self.group[other] == self.group[stage]]


def as_pipeline(plan: Plan, microbatches: int) -> Pipeline:
    """Return the stages of a plan on groups of ranks."""
    held = [stage.ranks for stage in plan.stages]
    groups = list(dict.fromkeys(held))
    group = tuple(groups.index(ranks) for ranks in held)
    return Pipeline(microbatches, len(held), len(groups), group)


@dataclass(frozen=True)
class Policy:
    """The rules in which one schedule differs from another.

    Attributes:
        cap: the most micro-batches in flight (forward started, backward not ended) at a stage.
        priorities: kinds of actions, the most urgent first.
        order: sort key of the actions of one kind.
        is_grouped: whether the stages of a group of ranks share one cap and follow `order`
            strictly: a stage waits until it is its turn.
        splits: whether the backward is split where other ranks wait for its input gradients.
        unfinished: the most micro-batches whose weight gradients are not done, including those
            in flight.
        forwards_first: whether a rank does all its forwards before any backward.
    """

    cap: Callable[[Pipeline, int], int]
    priorities: str
    order: Callable[[Pipeline, Action], Preference]
    is_grouped: bool = False
    splits: bool = False
    unfinished: Callable[[Pipeline], int] = lambda pipeline: UNLIMITED
    forwards_first: bool = False


def later_stage_first(pipeline: Pipeline, action: Action) -> Preference:
    """Return the sort key that prefers later stages, then earlier micro-batches."""
    return -action.stage, action.microbatch or 0


def no_cap(pipeline: Pipeline, stage: int) -> int:
    """Return a cap that is never reached."""
    return UNLIMITED


def remaining_stages(pipeline: Pipeline, stage: int) -> int:
    """Return the cap of 1F1B: one micro-batch for this stage and for each later one."""
    return pipeline.stages - stage


def turns(pipeline: Pipeline) -> int:
    """Return the number of turns: sets of micro-batches that go through a group's stages in turn.

    Each turn has at least as many micro-batches as there are groups, if there are enough, so that
    it fills the pipeline. For whole multiples of the groups, the only numbers that Megatron
    accepts, the turns are the same as Megatron's.
    """
    return max(1, pipeline.microbatches // pipeline.groups)


def megatron_order(pipeline: Pipeline, action: Action) -> Preference:
    """Return the sort key that runs all micro-batches of a turn on one stage, then on the next.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, 2.2.
    """
    microbatch = action.microbatch or 0
    stage = action.stage if action.kind == "F" else -action.stage
    return microbatch * turns(pipeline) // pipeline.microbatches, stage, microbatch


def megatron_cap(pipeline: Pipeline, stage: int) -> int:
    """Return the cap of interleaved 1F1B: the group's warm-up forwards and one more."""
    behind = pipeline.groups - pipeline.group[stage] - 1
    longest_turn = -(-pipeline.microbatches // turns(pipeline))
    return 2 * behind + (pipeline.stages // pipeline.groups - 1) * longest_turn + 1


ONE_F_ONE_B = Policy(remaining_stages, "BF", later_stage_first)
POLICIES = {
    "gpipe": Policy(no_cap, "BF", later_stage_first, forwards_first=True),
    "1f1b": ONE_F_ONE_B,
    "interleaved": Policy(megatron_cap, "FB", megatron_order, is_grouped=True),
    # Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, 2.3. Forwards come first: otherwise
    # the backwards of the first stages, which arrive twice as fast, would delay them.
    "zb-h1": Policy(
        remaining_stages,
        "FBIW",
        later_stage_first,
        splits=True,
        unfinished=lambda pipeline: pipeline.stages,
    ),
}
FORWARD_ONLY = Policy(no_cap, "F", later_stage_first)


def choose(plan: Plan, pipeline: Pipeline) -> Policy:
    """Return the policy of a plan's schedule; 1F1B's if the schedule does not fit the stages.

    With one group there is no bubble to fill, and interleaving needs stages that repeat the groups
    in the same order.
    """
    if plan.schedule != "gpipe" and pipeline.groups == 1:
        return ONE_F_ONE_B
    if plan.schedule == "interleaved" and not plan.repeats_groups():
        return ONE_F_ONE_B
    return POLICIES[plan.schedule]


def most_in_flight(schedule: str, stages: int, stage: int, microbatches: int) -> int:
    """Return the most micro-batches whose activations a stage holds at once.

    Each stage has ranks of its own, so an interleaved schedule is 1F1B. If the backward is split,
    a stage holds the activations until the weight gradients are done; the first stage runs whole
    backwards.
    """
    policy = ONE_F_ONE_B if schedule == "interleaved" else POLICIES[schedule]
    pipeline = Pipeline(microbatches, stages, stages, tuple(range(stages)))
    is_split = policy.splits and stage > 0
    cap = policy.unfinished(pipeline) if is_split else policy.cap(pipeline, stage)
    return min(cap, microbatches)


def training_step(plan: Plan, cut: Cut) -> Schedule:
    """Return the schedule of a training step: forwards and backwards, then the updates."""
    schedule = merge_halves(compute_order(plan, cut.microbatches), plan)
    schedule = add_exchange(schedule, plan, cut)
    schedule = add_loads(schedule, plan)
    return add_updates(add_reductions(schedule))


def evaluation(plan: Plan, cut: Cut) -> Schedule:
    """Return a forward-only schedule."""
    schedule = _by_rank(
        plan, _list_schedule(plan, as_pipeline(plan, cut.microbatches), FORWARD_ONLY)
    )
    return add_loads(add_exchange(schedule, plan, cut), plan)


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
        kinds: the kinds of actions of each stage.
        groups: by stage, all stages of its group.
        overlapping: by stage, all stages that have a rank of it, including itself.
        caps: by stage, the most micro-batches in flight.
        ends: end times of the micro-batches, by kind and stage; those of B are those of I.
        free: the time from which all ranks of a stage are free, by stage.
    """

    pipeline: Pipeline
    policy: Policy
    kinds: list[list[str]]
    groups: list[list[int]]
    overlapping: list[list[int]]
    caps: list[int]
    ends: dict[str, list[list[int]]]
    free: list[int]

    def next(self, kind: str, stage: int) -> int:
        """Return the next micro-batch of a kind of action on a stage."""
        return len(self.ends[kind][stage])

    def has_ended(self, kind: str, stage: int, microbatch: int, now: int) -> bool:
        """Return whether an action has ended; that of I also as a part of B."""
        ends = self.ends[kind][stage]
        return microbatch < len(ends) and ends[microbatch] <= now

    def start(self, action: Action, now: int) -> None:
        """Start an action: all ranks of the stage are busy until it ends."""
        end = now + UNITS[action.kind]
        for kind in "IW" if action.kind == "B" else action.kind:
            self.ends[kind][action.stage].append(end)
        for stage in self.overlapping[action.stage]:
            self.free[stage] = max(self.free[stage], end)


def _list_schedule(plan: Plan, pipeline: Pipeline, policy: Policy) -> list[Action]:
    """Return all actions by start time, an order that every rank can follow."""
    stages = range(pipeline.stages)
    held = [set(stage.ranks) for stage in plan.stages]
    ends: dict[str, list[list[int]]] = {kind: [[] for _ in stages] for kind in "FIW"}
    progress = _Progress(
        pipeline,
        policy,
        kinds=[_kinds(plan, policy, stage) for stage in stages],
        groups=[pipeline.sharing(stage) for stage in stages],
        overlapping=[[other for other in stages if held[other] & held[stage]] for stage in stages],
        caps=[policy.cap(pipeline, stage) for stage in stages],
        ends={**ends, "B": ends["I"]},
        free=[0] * pipeline.stages,
    )
    kinds_of_stages = sum(map(len, progress.kinds))
    order: list[Action] = []
    now = 0
    while len(order) < pipeline.microbatches * kinds_of_stages:
        startable = _startable(progress, now)
        for action in sorted(startable, key=lambda action: _preference(progress, action)):
            if progress.free[action.stage] <= now:
                progress.start(action, now)
                order.append(action)
        # Some rank is always busy: a cap never blocks the actions that would free it.
        now = min(end for end in progress.free if end > now)
    return order


def _kinds(plan: Plan, policy: Policy, stage: int) -> list[str]:
    """Return the kinds of actions that a stage runs for each micro-batch.

    A backward is split only if other ranks can wait for its input gradients.
    """
    held = {plan.stages[number].ranks for number in range(stage + 1)}
    kinds = "FIW" if policy.splits and len(held) > 1 else "FB"
    return [kind for kind in kinds if kind in policy.priorities]


def _preference(progress: _Progress, action: Action) -> Preference:
    policy = progress.policy
    kind = policy.priorities.index(action.kind)
    return kind, *policy.order(progress.pipeline, action)


def _startable(progress: _Progress, now: int) -> Iterator[Action]:
    """Yield the actions that can start now."""
    for stage, kinds in enumerate(progress.kinds):
        if progress.free[stage] > now:
            continue
        for kind in kinds:
            k = progress.next(kind, stage)
            if k < progress.pipeline.microbatches and _is_ready(progress, stage, kind, k, now):
                action = Action(stage, kind, k)
                if (kind != "F" or _has_room(progress, stage)) and _is_next(progress, action):
                    yield action


def _is_ready(progress: _Progress, stage: int, kind: str, k: int, now: int) -> bool:
    """Return whether the inputs of an action are there, as `cut.inputs` has them."""
    if kind == "F":
        return stage == 0 or progress.has_ended("F", stage - 1, k, now)
    if kind == "W":
        return progress.has_ended("I", stage, k, now)
    if progress.policy.forwards_first and not all(
        progress.next("F", other) == progress.pipeline.microbatches
        for other in progress.overlapping[stage]
    ):
        return False
    return progress.has_ended("F", stage, k, now) and (
        stage == progress.pipeline.stages - 1 or progress.has_ended("I", stage + 1, k, now)
    )


def _has_room(progress: _Progress, stage: int) -> bool:
    """Return whether the caps allow one more forward."""
    policy = progress.policy
    in_flight = sum(
        progress.next("F", other) - progress.next("I", other)
        for other in (progress.groups[stage] if policy.is_grouped else [stage])
    )
    unfinished = progress.next("F", stage) - progress.next("W", stage)
    return in_flight < progress.caps[stage] and unfinished < policy.unfinished(progress.pipeline)


def _is_next(progress: _Progress, action: Action) -> bool:
    """Return whether no other stage of the group comes first in the group's order."""
    if not progress.policy.is_grouped:
        return True
    others = (
        Action(stage, action.kind, progress.next(action.kind, stage))
        for stage in progress.groups[action.stage]
    )
    return all(
        other.microbatch == progress.pipeline.microbatches
        or _preference(progress, action) <= _preference(progress, other)
        for other in others
    )


VERBOSE = {
    "LOAD": "loading",
    "F": "forward",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
    "SEND_F": "sending activations",
    "RECV_F": "receiving activations",
    "SEND_B": "sending gradients",
    "RECV_B": "receiving gradients",
    "REDUCE": "starting the reduction",
    "STEP": "waiting for the reduction, and updating",
}
EVALUATION_IMAGES = 256  # per replica and forward pass

Key = tuple[int, int]  # (stage, micro-batch)


class Lane(NamedTuple):
    """Rows that this rank and `peer` have in common at a boundary.

    Attributes:
        local: the rows, relative to this rank's range of the micro-batch.
        remote: the same rows, relative to the peer's range.
    """

    peer: int
    local: Range
    remote: Range


class Task(NamedTuple):
    """An action with everything that a rank needs to run it.

    Attributes:
        line: the action in words.
        key: of its tensors.
        samples: this rank's samples of the micro-batch in the stage, as a range of the batch.
        lanes: the sources of the rows of a RECV, F, B or I; the receivers of a SEND.
        tag: of the messages.
    """

    action: Action
    line: str
    key: Key
    samples: Range
    lanes: tuple[Lane, ...]
    tag: int

    @property
    def rows(self) -> int:
        """The number of samples."""
        return self.samples[1] - self.samples[0]


@dataclass(frozen=True)
class Program:
    """The actions of one rank for batches of one size.

    Attributes:
        cut: of the batch.
        tasks: in order.
        completing: the last backward of each stage; sums start during it if it is a B, and after
            it if it is a W.
        shares: this rank's share of the batch, by stage.
        images: the range of each micro-batch in this rank's images.
        labels: the range of each micro-batch in this rank's labels.
        output_uses: how many actions of this rank use a stage's output, by (stage, micro-batch).
        gradient_uses: how many use the gradient of a stage's input.
    """

    cut: Cut
    tasks: tuple[Task, ...]
    completing: frozenset[Action]
    shares: dict[int, Share]
    images: tuple[Range, ...]
    labels: tuple[Range, ...]
    output_uses: Counter[Key]
    gradient_uses: Counter[Key]


@lru_cache(maxsize=64)
def program_of(plan: Plan, batch_size: int, rank: int, is_training: bool) -> Program:
    """Return the actions of one rank for a batch of that size."""
    used = plan_for(plan, is_training)
    pieces = cut(used, batch_size)
    make = training_step if is_training else evaluation
    return program(used, pieces, make(used, pieces).get(rank, []), rank)


def program(plan: Plan, cut: Cut, actions: Sequence[Action], rank: int) -> Program:
    """Return the program of a rank's list of actions."""
    held = plan.stages_of(rank)
    tasks = tuple(_task(plan, cut, action, rank) for action in actions)
    ends = {last_backward(actions, stage) for stage in held}
    output_uses, gradient_uses = Counter[Key](), Counter[Key]()
    for task in tasks:
        (stage, k), kind = task.key, task.action.kind
        has_local_lane = any(lane.peer == rank for lane in task.lanes)
        output_uses[task.key] += kind in ("B", "I", "SEND_F")
        gradient_uses[task.key] += kind == "SEND_B"
        if has_local_lane and kind == "F":
            output_uses[stage - 1, k] += 1
        if has_local_lane and kind in ("B", "I"):
            gradient_uses[stage + 1, k] += 1
    return Program(
        cut,
        tasks,
        completing=frozenset(action for action in ends if action is not None),
        shares={stage: cut.share(stage, rank) for stage in held},
        images=tuple(offsets(cut.parts[0].get(rank, ()))),
        labels=tuple(offsets(cut.parts[plan.last].get(rank, ()))),
        output_uses=output_uses,
        gradient_uses=gradient_uses,
    )


@lru_cache(maxsize=8)
def plan_for(plan: Plan, is_training: bool) -> Plan:
    """Return the plan with the micro-batches of training or evaluation.

    In evaluation a pipeline has enough micro-batches to keep its stages busy, other plans one.
    """
    stages = len(plan.stages)
    return plan if is_training else replace(plan, microbatches=2 * stages if stages > 1 else 1)


def evaluation_images(plan: Plan, batch_size: int | None = None) -> int:
    """Return the images of an evaluation step, over all ranks.

    Args:
        batch_size: the training batch size, to limit a replica to the images of a training
            micro-batch.
    """
    replicas, images = max(len(stage.ranks) for stage in plan.stages), EVALUATION_IMAGES
    if batch_size is not None:
        images = max(1, min(images, batch_size // (plan.microbatches * replicas)))
    return images * replicas * plan_for(plan, is_training=False).microbatches


def _task(plan: Plan, cut: Cut, action: Action, rank: int) -> Task:
    stage, kind, k = action
    if k is None:
        return Task(
            action, _line(plan, action, rank, ()), (stage, -1), samples=(0, 0), lanes=(), tag=0
        )
    is_exchange = kind in (*SENDS, *RECEIPTS)
    exchange = action if is_exchange else receipt_for(action, plan.last)
    lanes = _lanes(cut, rank, exchange) if exchange else ()
    if is_exchange:
        lanes = tuple(lane for lane in lanes if lane.peer != rank)
    return Task(
        action,
        line=_line(plan, action, rank, lanes),
        key=(stage, k),
        samples=cut.parts[stage][rank][k],
        lanes=lanes,
        tag=tag(stage, kind, k, cut.microbatches) if is_exchange else 0,
    )


def _lanes(cut: Cut, rank: int, exchange: Action) -> tuple[Lane, ...]:
    """Return the lanes of a rank at the boundary that a SEND or RECV crosses."""
    assert exchange.microbatch is not None
    pieces = cut.pieces[boundary(exchange.stage, exchange.kind), exchange.microbatch]
    if is_upstream(exchange):
        return tuple(Lane(p.receiver, p.sent, p.received) for p in pieces if p.sender == rank)
    return tuple(Lane(p.sender, p.received, p.sent) for p in pieces if p.receiver == rank)


def _line(plan: Plan, action: Action, rank: int, lanes: tuple[Lane, ...]) -> str:
    """Return an action in words, for messages about a rank that fails or hangs in it."""
    where = f"stage {action.stage}"
    if action.microbatch is not None:
        where += f", micro-batch {action.microbatch}"
    peers = sorted({lane.peer for lane in lanes} - {rank})
    if action.kind in ("REDUCE", "STEP"):
        peers = [other for other in plan.stages[action.stage].ranks if other != rank]
    with_peers = f", with rank {' and '.join(map(str, peers))}" if peers else ""
    return f"{action}: {VERBOSE[action.kind]} ({where}{with_peers})"
