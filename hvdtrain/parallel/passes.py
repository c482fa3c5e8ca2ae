"""Passes: each turns a schedule into a schedule, adding what is not computing.

They rest on one total order of all actions: a hand-over stands in it between what produces and
what consumes, the receipt posted before the SEND begins. Each rank's list is a part of that order,
so no rank ever waits for what comes later: nothing can lock up, even if SENDs blocked.
"""

from itertools import pairwise

from hvdtrain.parallel.actions import WEIGHTS, Action, Schedule, ScheduleError, inputs, peers
from hvdtrain.parallel.cut import Cut
from hvdtrain.parallel.plan import Plan

UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}  # time, where nothing has been measured


def merge_halves(schedule: Schedule, plan: Plan) -> Schedule:
    """Make one B of an I and the W that follows it, where no one waits for the I meanwhile.

    A whole backward costs less than its halves, which only serve to hand on gradients sooner. All
    replicas merge the same ones.
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
    """Add SEND and RECV to a compute-only schedule, where samples pass from one rank to another.

    The sender places the receipt: it is posted when the data is there to be sent.
    """
    ends = completions(schedule, plan)
    added: Schedule = {rank: [] for rank in schedule}
    for action in sorted(ends, key=lambda action: ends[action]):
        stage, kind, microbatch = action
        for rank in plan.stages[stage].ranks:
            added[rank].append(action)
        direction, other = ("F", stage + 1) if kind == "F" else ("B", stage - 1)
        if kind == "W" or not 0 <= other <= plan.last:
            continue
        receipt = Action(other, f"RECV_{direction}", microbatch)
        send = Action(stage, f"SEND_{direction}", microbatch)
        for exchange in (receipt, send):
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
    """Add a REDUCE for each stage once its gradients are complete and its last SEND has begun."""
    reduced: Schedule = {}
    for rank, actions in schedule.items():
        last = {a.stage: i for i, a in enumerate(actions) if a.kind in (*WEIGHTS, "SEND_B")}
        reduced[rank] = []
        for index, action in enumerate(actions):
            reduced[rank].append(action)
            if last.get(action.stage) == index:
                reduced[rank].append(Action(action.stage, "REDUCE"))
    return reduced


def add_steps(schedule: Schedule) -> Schedule:
    """Add at the end of each rank a STEP for each of its stages."""
    return {
        rank: actions + [Action(stage, "STEP") for stage in sorted({a.stage for a in actions})]
        for rank, actions in schedule.items()
    }


def completions(schedule: Schedule, plan: Plan) -> dict[Action, int]:
    """When each action of a compute-only schedule ends, at unit costs; hand-overs cost nothing.

    An action begins when all ranks of its stage have come to it and its inputs are there.

    Raises:
        ScheduleError: if one never does.
    """
    ends: dict[Action, int] = {}
    free = dict.fromkeys(schedule, 0)
    position = dict.fromkeys(schedule, 0)
    left = {rank for rank, actions in schedule.items() if actions}
    while left:
        before = len(ends)
        for rank in sorted(left):
            if rank not in left:
                continue
            action = schedule[rank][position[rank]]
            ranks = plan.stages[action.stage].ranks
            if not all(_head(schedule, position, other) == action for other in ranks):
                continue
            found = [[ends[a] for a in needs if a in ends] for needs in inputs(action, plan.last)]
            if not all(found):
                continue
            start = max([free[other] for other in ranks] + [end for e in found for end in e])
            ends[action] = start + UNITS[action.kind]
            for other in ranks:
                free[other] = ends[action]
                position[other] += 1
                if position[other] == len(schedule[other]):
                    left.remove(other)
        if len(ends) == before:
            stuck = (f"rank {rank} at {schedule[rank][position[rank]]}" for rank in sorted(left))
            raise ScheduleError(f"the schedule does not get on: {', '.join(stuck)}")
    return ends


def _head(schedule: Schedule, position: dict[int, int], rank: int) -> Action | None:
    actions = schedule.get(rank, ())
    return actions[position[rank]] if position.get(rank, 0) < len(actions) else None
