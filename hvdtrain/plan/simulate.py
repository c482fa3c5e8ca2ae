"""Simulate a schedule on all ranks: times, waits, bubble, memory, deadlocks.

Each rank runs its actions in order. An action waits for conditions, "this rank has reached, or has
ended, this action", and starts at the latest of their times. A condition that is never met is a
deadlock. A rank sums the gradients of one stage at a time, in the order of its backwards, as the
thread of Horovod does; sums by MPI share the network. Other transfers do not compete for it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from hvdtrain.plan.cut import (
    COMMUNICATION,
    COMPUTE,
    SENDS,
    WEIGHTS,
    Action,
    Cut,
    Schedule,
    ScheduleError,
    boundary,
    inputs,
    partner,
    peers,
    receipt_for,
)
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.trace import Event


class Reduction(NamedTuple):
    """Seconds of agreeing on the gradients of a stage, and those that its backward leaves.

    Attributes:
        whole: while nothing else is summed.
        exposed: from the time at which all replicas have reached the REDUCE: first buckets are
            summed before.
    """

    whole: float
    exposed: float


NO_REDUCTION = Reduction(0.0, 0.0)


@dataclass(frozen=True)
class Costs:
    """Seconds per action, as functions.

    Attributes:
        compute: of (rank, action), where the action is F, B, I, W, LOAD or STEP.
        hand_over: of a transfer (sender, receiver, action), from the SEND to the arrival.
        reduce: of a stage's REDUCE.
        communicate: of (rank, action), while the rank does nothing else: the overhead of a SEND
            or RECV, or of a compute action that copies arrived data.
    """

    compute: Callable[[int, Action], float]
    hand_over: Callable[[int, int, Action], float] = lambda sender, receiver, action: 0.0
    reduce: Callable[[int], Reduction] = lambda stage: NO_REDUCTION
    communicate: Callable[[int, Action], float] = lambda rank, action: 0.0


def unit_costs(
    forward: float = 1.0,
    input_half: float = 1.0,
    weight_half: float = 1.0,
    hand_over: float = 0.0,
    reduce: float = 0.0,
) -> Costs:
    """Return costs that are the same on every rank and stage.

    A whole backward costs the sum of its halves; LOAD and STEP cost nothing.
    """
    table = {"F": forward, "I": input_half, "W": weight_half, "B": input_half + weight_half}
    return Costs(
        lambda rank, action: table.get(action.kind, 0.0),
        lambda sender, receiver, action: hand_over,
        lambda stage: Reduction(reduce, reduce),
    )


@dataclass(frozen=True)
class Simulation:
    """The events of all ranks: by rank, then in order."""

    events: tuple[Event, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that did something, ascending."""
        return tuple(sorted({event.rank for event in self.events}))

    @cached_property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        start = min((event.start for event in self.events), default=0.0)
        return max((event.end for event in self.events), default=0.0) - start

    @cached_property
    def bubble_fraction(self) -> float:
        """The fraction of all ranks' time in which they do not compute."""
        busy = sum(event.end - event.start for event in self.events if event.kind == "compute")
        total = len(self.ranks) * self.seconds
        return max(total - busy, 0.0) / total if total else 0.0

    @cached_property
    def peak_in_flight(self) -> dict[tuple[int, int], int]:
        """The most micro-batches whose activations are held at once, by (rank, stage).

        Activations are held from the start of F to the end of B or W.
        """
        held: dict[tuple[int, int], int] = defaultdict(int)
        peak: dict[tuple[int, int], int] = defaultdict(int)
        for rank, action, *_, kind in self.events:
            place = rank, action.stage
            if kind == "compute":
                held[place] += (action.kind == "F") - (action.kind in WEIGHTS)
                peak[place] = max(peak[place], held[place])
        return dict(peak)

    def peak(self, size: Callable[[int, Action], float]) -> dict[int, float]:
        """Return the most that each rank holds at once, in the unit of `size`.

        Args:
            size: of the activations that a forward makes: (rank, F action) -> size.
        """
        held: dict[int, float] = dict.fromkeys(self.ranks, 0.0)
        peak = dict(held)
        for rank, action, *_, kind in self.events:
            if kind == "compute" and action.kind == "F":
                held[rank] += size(rank, action)
                peak[rank] = max(peak[rank], held[rank])
            elif kind == "compute" and action.kind in WEIGHTS:
                held[rank] -= size(rank, action._replace(kind="F"))
        return peak


class Condition(NamedTuple):
    """A condition: `rank` has ended `action`, or (`is_start`) is ready to start it."""

    rank: int
    action: Action
    is_start: bool = False


EVERYONE = -1  # the rank of a condition that is met once all replicas have reached a REDUCE


class Need(NamedTuple):
    """An action of the same micro-batch that `rank` must have ended `delay` seconds before."""

    rank: int
    stage: int
    kind: str
    delay: float = 0.0


class _Work(NamedTuple):
    """The needs and seconds of alike actions: of one rank, stage and kind, and cut alike."""

    needs: tuple[Need, ...]
    communicates: float
    computes: float


class Deadlock(ScheduleError):
    """Ranks that wait for each other.

    Attributes:
        stuck: by rank, its action and the condition that the action waits for.
    """

    def __init__(self, stuck: dict[int, tuple[Action, Condition]]) -> None:
        self.stuck = stuck
        waits = (
            f"rank {rank} at {action} waits for {condition.action} on rank {condition.rank}"
            for rank, (action, condition) in stuck.items()
        )
        super().__init__(f"deadlock: {'; '.join(waits)}")


@dataclass(slots=True)
class _Run:
    """The state of a simulation.

    Attributes:
        works: by rank, then by stage, kind and first micro-batch that is cut alike.
        ended: the end of each action, by rank; of EVERYONE, when all have reached a REDUCE.
        ready: when ranks are ready to start the actions that they start together, by rank.
        clock: when each rank has ended its last action.
        waiting: the ranks that wait for a condition.
        runnable: the ranks that may continue.
        reached: when replicas have reached a REDUCE.
        summed: when the gradients of stages are summed.
        earlier: the stage that a rank sums before another, by (rank, stage).
    """

    schedule: Schedule
    plan: Plan
    cut: Cut
    costs: Costs
    rendezvous: bool
    synchronised: Set[int]
    works: dict[int, dict[tuple[int, str, int | None], _Work]]
    ended: dict[int, dict[tuple[int, str, int | None], float]]
    ready: dict[int, dict[Action, float]]
    clock: dict[int, float]
    events: dict[int, list[Event]]
    waiting: dict[tuple[int, Action, bool], list[int]] = field(default_factory=dict)
    runnable: deque[int] = field(default_factory=deque)
    reached: dict[Action, list[float]] = field(default_factory=lambda: defaultdict(list))
    summed: dict[int, float] = field(default_factory=dict)
    earlier: dict[tuple[int, int], int] = field(default_factory=dict)

    def release(self, condition: tuple[int, Action, bool]) -> None:
        """Let the ranks continue that wait for a condition."""
        self.runnable.extend(self.waiting.pop(condition, ()))

    def missing(self, condition: Condition) -> Condition:
        """Return a condition of one rank that is not met, for any that is not met."""
        if condition.rank != EVERYONE:
            return condition
        ranks = self.plan.stages[condition.action.stage].ranks
        return next(
            Condition(rank, condition.action)
            for rank in ranks
            if condition.action not in self.ended[rank]
        )


def simulate(
    schedule: Schedule,
    plan: Plan,
    cut: Cut,
    costs: Costs,
    *,
    rendezvous: bool = False,
    synchronised: Set[int] = frozenset(),
) -> Simulation:
    """Simulate a schedule.

    Args:
        costs: the same for micro-batches that are cut alike.
        rendezvous: whether a SEND blocks until all its receivers have posted their RECV.
        synchronised: stages whose replicas start each forward and backward together, as with
            synchronised batch norm.

    Raises:
        Deadlock: if ranks wait for each other, or for an action that is never run.
    """
    run = _Run(
        schedule,
        plan,
        cut,
        costs,
        rendezvous,
        synchronised,
        works={rank: {} for rank in schedule},
        ended={rank: {} for rank in (EVERYONE, *plan.ranks)},
        ready={rank: {} for rank in plan.ranks},
        clock=dict.fromkeys(schedule, 0.0),
        events={rank: [] for rank in schedule},
    )
    run.runnable.extend(sorted(schedule))
    replicated = plan.replicated_stages
    for rank, actions in schedule.items():
        if len(replicated.intersection(plan.stages_of(rank))) > 1:
            ends = [action.stage for action in actions if action.kind == "REDUCE"]
            summed = [stage for stage in ends if stage in replicated]
            run.earlier.update(((rank, stage), before) for before, stage in pairwise(summed))
    left = {rank: iter(actions) for rank, actions in schedule.items()}
    stuck: dict[int, tuple[Action, Condition]] = {}
    while run.runnable:
        rank = run.runnable.popleft()
        again = [stuck.pop(rank)[0]] if rank in stuck else []
        if stop := _advance(run, rank, chain(again, left[rank])):
            stuck[rank] = stop
            run.waiting.setdefault(stop[1], []).append(rank)
    if stuck:
        raise Deadlock(
            {
                rank: (action, run.missing(condition))
                for rank, (action, condition) in sorted(stuck.items())
            }
        )
    return Simulation(tuple(event for rank in sorted(schedule) for event in run.events[rank]))


def _advance(run: _Run, rank: int, actions: Iterable[Action]) -> tuple[Action, Condition] | None:
    """Run actions of a rank; return the first one that must wait, and for what."""
    like, works, events = run.cut.like, run.works[rank], run.events[rank]
    now, ends = run.clock[rank], run.ended[rank]
    for action in actions:
        stage, kind, k = action
        key = stage, kind, k if k is None else like[k]
        if (work := works.get(key)) is None:
            work = works[key] = _work(run, rank, action)
        start = _start(run, rank, action, work.needs, now)
        if isinstance(start, Condition):
            run.clock[rank] = now
            return action, start
        if start > now:
            events.append(Event(rank, action, now, start, "wait"))
        now = start + work.communicates
        is_communication = kind in COMMUNICATION
        if is_communication or now > start:
            events.append(Event(rank, action, start, now, "communication"))
        if not is_communication:
            start, now = now, now + work.computes
            events.append(Event(rank, action, start, now, "compute"))
        ends[action] = now
        if kind == "I":
            ends[stage, "B", k] = now  # for what only needs the gradients of the input
        if run.waiting:
            run.release((rank, action, False))
        if kind == "REDUCE":
            run.reached[action].append(now)
            if len(run.reached[action]) == len(run.plan.stages[stage].ranks):
                run.ended[EVERYONE][action] = max(run.reached[action])
                run.release((EVERYONE, action, False))
    run.clock[rank] = now
    return None


def _start(
    run: _Run, rank: int, action: Action, needs: Iterable[Need], now: float
) -> float | Condition:
    """Return the time at which an action can start, or the first condition that is not met yet."""
    stage, kind, k = action
    for other, place, needed, delay in needs:
        end = run.ended[other].get((place, needed, k))
        if end is None:
            return Condition(other, Action(place, needed, k))
        if end + delay > now:
            now = end + delay
    if kind == "STEP":
        summed = _summed(run, stage)
        return summed if isinstance(summed, Condition) else max(now, summed)
    if stage not in run.synchronised or kind not in ("F", "B"):
        return now
    if action not in run.ready[rank]:
        run.ready[rank][action] = now
        run.release((rank, action, True))
    for other in run.plan.stages[action.stage].ranks:
        ready = run.ready[other].get(action)
        if ready is None:
            return Condition(other, action, is_start=True)
        now = max(now, ready)
    return now


def _summed(run: _Run, stage: int) -> float | Condition:
    """Return when the gradients of a stage are summed, or a condition that is not met yet."""
    if stage not in run.summed:
        reached = run.ended[EVERYONE].get(Action(stage, "REDUCE"))
        if reached is None:
            return Condition(EVERYONE, Action(stage, "REDUCE"))
        whole, exposed = run.costs.reduce(stage)
        end = reached + exposed
        for rank in run.plan.stages[stage].ranks:
            if (rank, stage) in run.earlier:
                before = _summed(run, run.earlier[rank, stage])
                if isinstance(before, Condition):
                    return before
                end = max(end, before + whole)
        run.summed[stage] = end
    return run.summed[stage]


def _work(run: _Run, rank: int, action: Action) -> _Work:
    """Return what an action waits for, and its seconds."""
    costs, last, needs = run.costs, run.plan.last, []
    if action.kind in COMPUTE:
        needed = [one[0] for one in inputs(action, last)]
        needs = [Need(rank, other.stage, other.kind) for other in needed if other[0] == action[0]]
        if receipt := receipt_for(action, last):
            needs += _arrivals(run, rank, receipt)
    elif run.rendezvous and action.kind in SENDS:
        needs = [Need(peer, *partner(action)[:2]) for peer in peers(run.cut, rank, action)]
    is_communication = action.kind in COMMUNICATION
    computes = 0.0 if is_communication else costs.compute(rank, action)
    return _Work(tuple(needs), costs.communicate(rank, action), computes)


def _arrivals(run: _Run, rank: int, receipt: Action) -> Iterator[Need]:
    """Yield what a user of the received or local data waits for."""
    stage, kind, k = receipt
    send = partner(receipt)
    if senders := peers(run.cut, rank, receipt):
        yield Need(rank, stage, kind)
        for peer in senders:
            yield Need(peer, send.stage, send.kind, run.costs.hand_over(peer, rank, send))
    if (boundary(stage, kind), k, rank) in run.cut.kept:
        yield Need(rank, send.stage, send.kind[-1])
