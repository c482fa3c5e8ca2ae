"""Plays a schedule through on all ranks, without any: times, waits, bubble, memory, deadlocks.

Each rank does its actions in order. What an action has to wait for is a list of marks, "this rank
has come to, or has ended, this action"; times are the largest of these, and a mark that never
comes is a deadlock. Nothing competes for the network.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hvdtrain.parallel.actions import (
    BACKWARD,
    COMMUNICATION,
    SENDS,
    WEIGHTS,
    Action,
    Schedule,
    ScheduleError,
    boundary,
    peers,
    receipt_for,
    send_of,
)
from hvdtrain.parallel.cut import Cut
from hvdtrain.parallel.plan import Plan


class Event(NamedTuple):
    """What a rank did, simulated or measured, in seconds.

    `kind` is "compute", "communication" or "wait" (idle until `action` can begin). Events of one
    rank do not overlap.
    """

    rank: int
    action: Action
    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class Costs:
    """Seconds of everything.

    Attributes:
        compute: of (rank, action): F, B, I, W, LOAD or STEP.
        hand_over: of (sender, receiver, action), from a SEND to the arrival.
        reduce: of a stage's REDUCE, from the time when all its replicas have come to it.
        communicate: of (rank, action), in which the rank does nothing else: of SEND and RECV, and
            of a compute action whose data has arrived, to take it in.
    """

    compute: Callable[[int, Action], float]
    hand_over: Callable[[int, int, Action], float] = lambda sender, receiver, action: 0.0
    reduce: Callable[[int], float] = lambda stage: 0.0
    communicate: Callable[[int, Action], float] = lambda rank, action: 0.0


def unit_costs(
    forward: float = 1.0,
    input_half: float = 1.0,
    weight_half: float = 1.0,
    hand_over: float = 0.0,
    reduce: float = 0.0,
) -> Costs:
    """The same costs everywhere; a whole backward costs its halves, LOAD and STEP nothing."""
    table = {"F": forward, "I": input_half, "W": weight_half, "B": input_half + weight_half}
    return Costs(
        lambda rank, action: table.get(action.kind, 0.0),
        lambda sender, receiver, action: hand_over,
        lambda stage: reduce,
    )


@dataclass(frozen=True)
class Timeline:
    """What all ranks did: the events of each rank in order, by rank."""

    events: tuple[Event, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that did something, ascending."""
        return tuple(sorted({event.rank for event in self.events}))

    @cached_property
    def seconds(self) -> float:
        """From the first start to the last end."""
        start = min((event.start for event in self.events), default=0.0)
        return max((event.end for event in self.events), default=0.0) - start

    @cached_property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute."""
        busy = sum(event.end - event.start for event in self.events if event.kind == "compute")
        total = len(self.ranks) * self.seconds
        return (total - busy) / total if total else 0.0

    @cached_property
    def peak_in_flight(self) -> dict[tuple[int, int], int]:
        """Micro-batches of which (rank, stage) holds activations at once, at most.

        They are held from the start of F to the end of B or W.
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
        """The most that each rank holds at once, if the activations of F have size(rank, F)."""
        held: dict[int, float] = dict.fromkeys(self.ranks, 0.0)
        peak = dict(held)
        for rank, action, *_, kind in self.events:
            if kind == "compute" and action.kind == "F":
                held[rank] += size(rank, action)
                peak[rank] = max(peak[rank], held[rank])
            elif kind == "compute" and action.kind in WEIGHTS:
                held[rank] -= size(rank, action._replace(kind="F"))
        return peak


class Mark(NamedTuple):
    """That `rank` has ended `action`, or (`is_start`) has come to it with all its inputs."""

    rank: int
    action: Action
    is_start: bool = False


class Deadlock(ScheduleError):
    """Ranks that wait for each other; `stuck` are, by rank, its action and what that waits for."""

    def __init__(self, stuck: dict[int, tuple[Action, Mark]]) -> None:
        self.stuck = stuck
        waits = (
            f"rank {rank} at {action} waits for {mark.action} on rank {mark.rank}"
            for rank, (action, mark) in stuck.items()
        )
        super().__init__(f"deadlock: {'; '.join(waits)}")


@dataclass
class _Run:
    """A simulation under way."""

    plan: Plan
    cut: Cut
    costs: Costs
    rendezvous: bool
    synchronised: Set[int]
    held: dict[int, set[Action]]  # what each rank does, to look up
    marks: dict[Mark, float] = field(default_factory=dict)
    waiting: dict[Mark, list[int]] = field(default_factory=lambda: defaultdict(list))
    events: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    runnable: deque[int] = field(default_factory=deque)

    def set(self, mark: Mark, time: float) -> None:
        """Let those go on that wait for a mark."""
        self.marks[mark] = time
        self.runnable.extend(self.waiting.pop(mark, ()))


def simulate(
    schedule: Schedule,
    plan: Plan,
    cut: Cut,
    costs: Costs,
    *,
    rendezvous: bool = False,
    synchronised: Set[int] = frozenset(),
) -> Timeline:
    """Run a schedule.

    Args:
        rendezvous: whether a SEND blocks until all its receivers have posted their RECV.
        synchronised: stages whose replicas start each forward and backward together, as with
            synchronised batch norm.

    Raises:
        Deadlock: if ranks wait for each other, or for what never happens.
    """
    held = {rank: set(actions) for rank, actions in schedule.items()}
    run = _Run(plan, cut, costs, rendezvous, synchronised, held)
    run.runnable.extend(sorted(schedule))
    clock = dict.fromkeys(schedule, 0.0)
    position = dict.fromkeys(schedule, 0)
    stuck: dict[int, tuple[Action, Mark]] = {}
    while run.runnable:
        stuck.pop(rank := run.runnable.popleft(), None)
        while position[rank] < len(schedule[rank]):
            action = schedule[rank][position[rank]]
            start = _start(run, rank, action, clock[rank])
            if isinstance(start, Mark):
                stuck[rank] = action, start
                run.waiting[start].append(rank)
                break
            clock[rank] = _perform(run, rank, action, clock[rank], start)
            position[rank] += 1
    if stuck:
        raise Deadlock(dict(sorted(stuck.items())))
    return Timeline(tuple(event for rank in sorted(schedule) for event in run.events[rank]))


def _start(run: _Run, rank: int, action: Action, now: float) -> float | Mark:
    """When an action can start; or the mark that it has to wait for first."""
    for mark, delay in _needs(run, rank, action):
        if mark not in run.marks:
            return mark
        now = max(now, run.marks[mark] + delay)
    if action.stage not in run.synchronised or action.kind not in ("F", "B"):
        return now
    own = Mark(rank, action, is_start=True)
    if own not in run.marks:
        run.set(own, now)
    for other in run.plan.stages[action.stage].ranks:
        mark = Mark(other, action, is_start=True)
        if mark not in run.marks:
            return mark
        now = max(now, run.marks[mark])
    return now


def _perform(run: _Run, rank: int, action: Action, before: float, start: float) -> float:
    """Note what happens; return when the rank is free again."""
    is_communication = action.kind in COMMUNICATION
    handed = start + run.costs.communicate(rank, action)
    end = handed if is_communication else handed + run.costs.compute(rank, action)
    if start > before:
        run.events[rank].append(Event(rank, action, before, start, "wait"))
    if is_communication or handed > start:
        run.events[rank].append(Event(rank, action, start, handed, "communication"))
    if not is_communication:
        run.events[rank].append(Event(rank, action, handed, end, "compute"))
    run.set(Mark(rank, action), end)
    return end


def _needs(run: _Run, rank: int, action: Action) -> list[tuple[Mark, float]]:
    """What has to have happened before an action can start, and how long before."""
    stage, kind, k = action
    if kind == "F" or kind in BACKWARD:
        forward = [] if kind == "F" else [(Mark(rank, Action(stage, "F", k)), 0.0)]
        receipt = receipt_for(action, run.plan.last)
        return forward + (_arrivals(run, rank, receipt) if receipt else [])
    if kind == "W":
        return [(Mark(rank, Action(stage, "I", k)), 0.0)]
    if kind in SENDS and run.rendezvous:
        other = stage + 1 if kind == "SEND_F" else stage - 1
        receipt = Action(other, kind.replace("SEND", "RECV"), k)
        return [(Mark(peer, receipt), 0.0) for peer in peers(run.cut, rank, action)]
    if kind == "STEP":
        seconds, reduction = run.costs.reduce(stage), Action(stage, "REDUCE")
        return [(Mark(other, reduction), seconds) for other in run.plan.stages[stage].ranks]
    return []


def _arrivals(run: _Run, rank: int, receipt: Action) -> list[tuple[Mark, float]]:
    """What the user of received data waits for; or of data that the rank itself has made."""
    stage, kind, k = receipt
    send = send_of(receipt)
    other, sent = send.stage, send.kind[-1]
    senders = peers(run.cut, rank, receipt)
    needs = [(Mark(rank, receipt), 0.0)] if senders else []
    needs += [(Mark(peer, send), run.costs.hand_over(peer, rank, send)) for peer in senders]
    if (boundary(stage, kind), k, rank) in run.cut.kept:
        halves = sent == "B" and Action(other, "I", k) in run.held[rank]
        needs.append((Mark(rank, Action(other, "I" if halves else sent, k)), 0.0))
    return needs
