"""Simulate a schedule on all ranks: times, waits, bubble, memory, deadlocks.

Each rank runs its actions in order. An action waits for conditions, "this rank has reached, or has
ended, this action", and starts at the latest of their times. A condition that is never met is a
deadlock. A rank sums the gradients of one stage at a time, in the order of its backwards, as the
thread of Horovod does; sums by MPI share the network. Other transfers do not compete for it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
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
Need = tuple[int, Action, float]  # a rank, an action that it has ended, and seconds after that


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
        held: the actions of each rank as a set, where any has a backward in halves.
        ended: the end of each action, by rank; of EVERYONE, when all have reached a REDUCE.
        ready: when ranks are ready to start the actions that they start together, by rank.
        waiting: the ranks that wait for a condition.
        runnable: the ranks that may continue.
        reached: when replicas have reached a REDUCE.
        summed: when the gradients of stages are summed.
        earlier: the stage that a rank sums before another, by (rank, stage).
    """

    plan: Plan
    cut: Cut
    costs: Costs
    rendezvous: bool
    synchronised: Set[int]
    held: dict[int, set[Action]]
    ended: dict[int, dict[Action, float]]
    ready: dict[int, dict[Action, float]]
    waiting: dict[Condition, list[int]] = field(default_factory=dict)
    events: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    runnable: deque[int] = field(default_factory=deque)
    reached: dict[Action, list[float]] = field(default_factory=lambda: defaultdict(list))
    summed: dict[int, float] = field(default_factory=dict)
    earlier: dict[tuple[int, int], int] = field(default_factory=dict)

    def release(self, condition: Condition) -> None:
        """Let the ranks continue that wait for a condition."""
        self.runnable.extend(self.waiting.pop(condition, ()))

    def end(self, rank: int, action: Action, time: float) -> None:
        """Note that an action has ended."""
        self.ended[rank][action] = time
        if self.waiting:
            self.release(Condition(rank, action))
        if action.kind == "REDUCE":
            self.reached[action].append(time)
            if len(self.reached[action]) == len(self.plan.stages[action.stage].ranks):
                self.ended[EVERYONE][action] = max(self.reached[action])
                self.release(Condition(EVERYONE, action))

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
        rendezvous: whether a SEND blocks until all its receivers have posted their RECV.
        synchronised: stages whose replicas start each forward and backward together, as with
            synchronised batch norm.

    Raises:
        Deadlock: if ranks wait for each other, or for an action that is never run.
    """
    held = {rank: set(actions) for rank, actions in schedule.items()}
    ended: dict[int, dict[Action, float]] = {rank: {} for rank in (EVERYONE, *plan.ranks)}
    ready: dict[int, dict[Action, float]] = {rank: {} for rank in plan.ranks}
    run = _Run(plan, cut, costs, rendezvous, synchronised, held, ended, ready)
    run.runnable.extend(sorted(schedule))
    replicated = plan.replicated_stages
    for rank, actions in schedule.items():
        if len(replicated.intersection(plan.stages_of(rank))) > 1:
            ends = [action.stage for action in actions if action.kind == "REDUCE"]
            summed = [stage for stage in ends if stage in replicated]
            run.earlier.update(((rank, stage), before) for before, stage in pairwise(summed))
    clock = dict.fromkeys(schedule, 0.0)
    position = dict.fromkeys(schedule, 0)
    stuck: dict[int, tuple[Action, Condition]] = {}
    while run.runnable:
        stuck.pop(rank := run.runnable.popleft(), None)
        for action in islice(schedule[rank], position[rank], None):
            start = _start(run, rank, action, clock[rank])
            if isinstance(start, Condition):
                stuck[rank] = action, start
                run.waiting.setdefault(start, []).append(rank)
                break
            clock[rank] = _perform(run, rank, action, clock[rank], start)
            position[rank] += 1
    if stuck:
        raise Deadlock(
            {
                rank: (action, run.missing(condition))
                for rank, (action, condition) in sorted(stuck.items())
            }
        )
    return Simulation(tuple(event for rank in sorted(schedule) for event in run.events[rank]))


def _start(run: _Run, rank: int, action: Action, now: float) -> float | Condition:
    """Return the time at which an action can start, or the first condition that is not met yet."""
    if action.kind == "STEP":
        summed = _summed(run, action.stage)
        return summed if isinstance(summed, Condition) else max(now, summed)
    for other, needed, delay in _needs(run, rank, action):
        end = run.ended[other].get(needed)
        if end is None:
            return Condition(other, needed)
        if end + delay > now:
            now = end + delay
    if action.stage not in run.synchronised or action.kind not in ("F", "B"):
        return now
    if action not in run.ready[rank]:
        run.ready[rank][action] = now
        run.release(Condition(rank, action, is_start=True))
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


def _perform(run: _Run, rank: int, action: Action, before: float, start: float) -> float:
    """Record the events of an action; return the time at which the rank is free again."""
    events, is_communication = run.events[rank], action.kind in COMMUNICATION
    communicated = start + run.costs.communicate(rank, action)
    end = communicated if is_communication else communicated + run.costs.compute(rank, action)
    if start > before:
        events.append(Event(rank, action, before, start, "wait"))
    if is_communication or communicated > start:
        events.append(Event(rank, action, start, communicated, "communication"))
    if not is_communication:
        events.append(Event(rank, action, communicated, end, "compute"))
    run.end(rank, action, end)
    return end


def _needs(run: _Run, rank: int, action: Action) -> list[Need]:
    """Return what an action waits for."""
    stage, kind, _ = action
    if kind in COMPUTE:
        last = run.plan.last
        needed = [one[0] for one in inputs(action, last)]
        needs: list[Need] = [(rank, other, 0.0) for other in needed if other.stage == stage]
        receipt = receipt_for(action, last)
        return needs + _arrivals(run, rank, receipt) if receipt else needs
    if run.rendezvous and kind in SENDS:
        return [(peer, partner(action), 0.0) for peer in peers(run.cut, rank, action)]
    return []


def _arrivals(run: _Run, rank: int, receipt: Action) -> list[Need]:
    """Return what a user of the received or local data waits for."""
    stage, kind, k = receipt
    needs: list[Need] = []
    send = partner(receipt)
    if senders := peers(run.cut, rank, receipt):
        needs.append((rank, receipt, 0.0))
        needs += [(peer, send, run.costs.hand_over(peer, rank, send)) for peer in senders]
    if (boundary(stage, kind), k, rank) in run.cut.kept:
        other, sent = send.stage, send.kind[-1]
        halves = sent == "B" and Action(other, "I", k) in run.held[rank]
        needs.append((rank, Action(other, "I" if halves else sent, k), 0.0))
    return needs
