"""Events of a step, simulated or measured, as text and as a Chrome trace, and their seconds.

A Chrome trace opens in https://ui.perfetto.dev and in chrome://tracing.

Seconds of a device are measured by marks in its queue. A GPU computes later than the host asks it
to: between two times of the host lies the time of asking. Between two marks lies what the device
did, and where the host let it wait.
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.host.files import write_text
from hvdtrain.plan.cut import Action

LEGEND = "0-9: forward, a-z: backward or its input half, A-Z: weight half"
FIRST_SIGN = {"F": "0", "B": "a", "I": "a", "W": "A"}  # of micro-batch 0
OTHER, IDLE = "-", "."


class Event(NamedTuple):
    """One action of a rank, simulated or measured, with its start and end in seconds.

    `kind` is "compute", "communication" or "wait" (idle until `action` can start). Events of one
    rank do not overlap.
    """

    rank: int
    action: Action
    start: float
    end: float
    kind: str


def chrome_trace(events: Iterable[Event], unit: str = "s") -> dict[str, Any]:
    """Return the events in Chrome's trace event format, with times from the first event on.

    Args:
        unit: of the events' times. Viewers show seconds only: one unit is shown as one second.
    """
    ordered = sorted(events, key=lambda event: (event.rank, event.start))
    origin = min((event.start for event in ordered), default=0.0)
    threads = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": rank,
            "args": {"name": f"rank {rank}"},
        }
        for rank in sorted({event.rank for event in ordered})
    ]
    spans = [
        {
            "name": str(event.action),
            "cat": event.kind,
            "ph": "X",
            "pid": 0,
            "tid": event.rank,
            "ts": 1e6 * (event.start - origin),
            "dur": 1e6 * (event.end - event.start),
            "args": {"stage": event.action.stage, "microbatch": event.action.microbatch},
        }
        for event in ordered
    ]
    return {
        "traceEvents": threads + spans,
        "displayTimeUnit": "ms",
        "otherData": {"a second shown is": f"1 {unit}"},
    }


def write_trace(path: Path, events: Iterable[Event], unit: str = "s") -> None:
    """Write `chrome_trace` to a file.

    Raises:
        UsageError: if it cannot be written.
    """
    write_text(path, json.dumps(chrome_trace(events, unit)), "the trace")


def draw(events: Iterable[Event], ranks: Sequence[int], width: int = 100, unit: str = "s") -> str:
    """Return the events as text: one line per rank, one sign per slice of time.

    The sign shows what the rank computes in the middle of the slice: `0`, `a` or `A` for
    micro-batch 0, then counting modulo 10 or 26.
    """
    computed = [event for event in events if event.kind == "compute" and event.end > event.start]
    start = min((event.start for event in computed), default=0.0)
    slice_seconds = (max((event.end for event in computed), default=0.0) - start) / width
    times = [start + (column + 0.5) * slice_seconds for column in range(width)]
    margin = max((len(str(rank)) for rank in ranks), default=1)
    lines = [
        f"{rank:>{margin}} {_line([event for event in computed if event.rank == rank], times)}"
        for rank in ranks
    ]
    scale = (
        f"{LEGEND}; {OTHER}: other work, {IDLE}: idle; a character is {slice_seconds:.3g} {unit}"
    )
    return "\n".join([*lines, scale])


def _line(events: Sequence[Event], times: Sequence[float]) -> str:
    """Return the sign of the event that runs at each of `times`."""
    ordered = sorted(events, key=lambda event: event.start)
    starts = [event.start for event in ordered]
    signs = []
    for time in times:
        index = bisect_right(starts, time) - 1
        is_busy = index >= 0 and ordered[index].end > time
        signs.append(_sign(ordered[index]) if is_busy else IDLE)
    return "".join(signs)


def _sign(event: Event) -> str:
    """Return the digit or letter of the event's micro-batch."""
    first = FIRST_SIGN.get(event.action.kind)
    if first is None or event.action.microbatch is None:
        return OTHER
    return chr(ord(first) + event.action.microbatch % (10 if first == "0" else 26))


if TYPE_CHECKING:
    from hvdtrain.device import Mark  # loads PyTorch


class Wait(NamedTuple):
    """A wait for other ranks.

    The device computes nothing between its start and its end.

    Attributes:
        arrived: when all that it waited for was in memory of the host.
        transfer: seconds of the host's wait in which all of it had been sent already.
    """

    start: "Mark"
    arrived: "Mark"
    end: "Mark"
    transfer: float


class Reduction(NamedTuple):
    """The gradient reductions of a stage: their start, and start and end of the wait for them."""

    start: "Mark"
    waiting: "Mark"
    end: "Mark"


class Act(NamedTuple):
    """An action of a kind, with the waits and reductions within it."""

    kind: str
    start: "Mark"
    end: "Mark"
    waits: list[Wait]
    reductions: list[Reduction]

    @property
    def waited(self) -> float:
        """Seconds in which it waited for other ranks."""
        return sum(wait.end - wait.start for wait in self.waits) + sum(
            reduction.end - reduction.waiting for reduction in self.reductions
        )


@dataclass
class StepSeconds:
    """Seconds of the parts of a step on one rank.

    Attributes:
        spent: by kind of action, without waiting.
        reduction: while a reduction is in flight.
        exposed: waiting for reductions.
        bubble: waiting for what was not sent yet.
        transfer: waiting for what was under way.
    """

    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    reduction: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    transfer: float = 0.0


@dataclass
class StepMarks:
    """The marks of one step of one rank."""

    acts: list[Act] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)

    def seconds(self) -> StepSeconds:
        """Return where the time went; the device must have done the step."""
        total = StepSeconds()
        for act in self.acts:
            total.spent[act.kind] += act.end - act.start - act.waited
        for wait in self.waits:
            waited = wait.arrived - wait.start  # the end of the host's wait, which starts earlier
            transfer = min(wait.transfer, waited)
            total.transfer += transfer + (wait.end - wait.arrived)
            total.bubble += waited - transfer
        for reduction in self.reductions:
            total.reduction += reduction.end - reduction.start
            total.exposed += reduction.end - reduction.waiting
        return total
