"""Passes over schedules: each adds or merges actions, starting from a compute-only schedule.

All passes keep one total order of all actions, in which a transfer lies between the action that
produces its data and the one that consumes it, and a RECV lies before its SEND. Each rank's list
is a subsequence of that order, so that no rank waits for a later action: there is no deadlock,
even if SENDs block.
"""

from collections.abc import Sequence
from itertools import pairwise

from hvdtrain.plan.actions import (
    WEIGHTS,
    Action,
    Schedule,
    ScheduleError,
    inputs,
    partner,
    peers,
    send_after,
)
from hvdtrain.plan.cut import Cut
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
