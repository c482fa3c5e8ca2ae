"""Events of a step, simulated or measured, as text and as a Chrome trace.

A Chrome trace opens in https://ui.perfetto.dev and in chrome://tracing.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.host.files import write_text
from hvdtrain.plan.actions import Action

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
