"""Sides that are measured in turns, and what their figures show.

A round measures every side once, in random order. A round beside which something else used the
cores is measured again; it stays in the record. A ratio is that of two sides of the same round.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.host import counters
from hvdtrain.study import laws
from hvdtrain.study.laws import Estimate

RECORD = "HVDTRAIN_BENCHMARK_RECORD"  # names a file that every comparison is added to
WIDEST = 1.5  # high end of a ratio's interval over its low end; a wider one says too little
RATES = {"images/s", "MiB/s"}  # more is better; all other units are of time
LARGE = 1000  # figures from here on are whole numbers
MOST_ROUNDS = 2  # times the number of rounds, where some are disturbed

Side = Callable[[int], float]


@dataclass(frozen=True)
class Comparison:
    """The figures of sides that took turns.

    Attributes:
        title: what was measured.
        unit: of the figures: one of `RATES`, or a unit of time.
        values: by side, one per round that counts. The ratios are those of the first side.
        disturbed: by side, one per round beside which other programs used the cores.
        other_cores: cores that other programs used, by round that counts.
        goals: how many times as fast as a peer the first side should be, by peer.
    """

    title: str
    unit: str
    values: dict[str, list[float]]
    disturbed: dict[str, list[float]]
    other_cores: list[float]
    goals: dict[str, float] = field(default_factory=dict)

    def faster(self, peer: str) -> Estimate | None:
        """Return how many times faster the first side is, or None if that is not known well."""
        ours, theirs = next(iter(self.values.values())), self.values[peer]
        pairs = zip(ours, theirs, strict=True)
        estimate = laws.median(
            [a / b if self.unit in RATES else b / a for a, b in pairs] if ours else [1.0]
        )
        if estimate.low is None or estimate.high is None or estimate.high > WIDEST * estimate.low:
            return None
        return estimate


def compare(
    title: str,
    unit: str,
    sides: Mapping[str, Side],
    rounds: int,
    warm_up: bool = False,
    goals: Mapping[str, float] | None = None,
) -> Comparison:
    """Measure sides in turns, print their figures, and add them to the record if there is one.

    Args:
        sides: by name; each is called with the number of the round and returns its figure. The
            first is the one that the others are compared with.
        rounds: that count.
        warm_up: call every side once before, for sides of a second or less whose first call reads
            files, starts threads or takes memory from the kernel.
        goals: as of `Comparison`.
    """
    comparison = Comparison(title, unit, {name: [] for name in sides}, {}, [], dict(goals or {}))
    for side in sides.values() if warm_up else ():
        side(MOST_ROUNDS * rounds)
    dice = random.Random(title)
    for number in range(MOST_ROUNDS * rounds):
        before, figures = counters.read_load(), {}
        for name in dice.sample(list(sides), len(sides)):
            figures[name] = sides[name](number)
        beside = counters.disturbance([counters.read_load().since(before)])
        kept = comparison.disturbed if beside.is_large else comparison.values
        for name, figure in figures.items():
            kept.setdefault(name, []).append(figure)
        if not beside.is_large:
            comparison.other_cores.append(beside.other_cores + beside.stolen_cores)
        if len(comparison.other_cores) == rounds:
            break
    report(comparison)
    return comparison


def report(comparison: Comparison) -> None:
    """Print the figures of a comparison, and add them to the record if there is one."""
    print(text(comparison), flush=True)
    _add(record(comparison))


def record(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison with the day and the command, for a file."""
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return {"date": _today(), "command": " ".join(command)} | asdict(comparison)


def add_row(columns: Sequence[str], row: Sequence[str], rounds: int, measured: Any) -> None:
    """Add a row of a table with columns of its own to the record if there is one.

    Args:
        columns: titles, the same for all rows of a table.
        rounds: that the figures are the medians of.
        measured: figures behind the row or the table, for the file.
    """
    shown = {"columns": list(columns), "row": list(row)}
    _add({"date": _today()} | shown | {"rounds": rounds, "measured": measured})


def _add(entry: dict[str, Any]) -> None:
    if RECORD in os.environ:
        with Path(os.environ[RECORD]).open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def text(comparison: Comparison) -> str:
    """Return the figures of a comparison as lines."""
    rounds = len(comparison.other_cores)
    lines = [f"{comparison.title}; {comparison.unit}, {noise(comparison)}:"]
    first = next(iter(comparison.values))
    for side in comparison.values:
        times = "" if side == first else f"; {first} is faster by {ratio(comparison, side)}"
        times += f"; goal {goal}" if (goal := verdict(comparison, side)) else ""
        lines.append(f"{side:>32}: {figure(comparison, side)}{times}")
    if not rounds:
        lines.append("every round was disturbed: run it on a machine that does nothing else")
    return "\n".join(lines)


def noise(comparison: Comparison) -> str:
    """Return in words how many rounds counted, and what ran beside them."""
    again = len(next(iter(comparison.disturbed.values()), []))
    words = f"{len(comparison.other_cores)} rounds"
    if comparison.other_cores:
        words += f" beside {max(comparison.other_cores):.2f} other cores at most"
    return words + (f", {again} more were disturbed" if again else "")


def rows(comparison: Comparison) -> list[list[str]]:
    """Return a row of a table per peer: what was compared, both figures, the ratio, the goal."""
    first, *peers = comparison.values
    ours, title = figure(comparison, first), f"{comparison.title}: {first} against"
    return [
        [
            f"{title} {peer}",
            ours,
            figure(comparison, peer),
            ratio(comparison, peer),
            verdict(comparison, peer),
        ]
        for peer in peers
    ]


def verdict(comparison: Comparison, peer: str) -> str:
    """Return the goal of a ratio, and whether its whole interval reaches it; empty without one."""
    if (goal := comparison.goals.get(peer)) is None:
        return ""
    estimate = comparison.faster(peer)
    if estimate is None or estimate.low is None or estimate.high is None:
        return f"{goal:.2f}: not known"
    reached = "met" if estimate.low >= goal else "missed" if estimate.high < goal else "not shown"
    return f"{goal:.2f}: {reached}"


def ratio(comparison: Comparison, peer: str) -> str:
    """Return how many times faster the first side is, with the interval, if that is known well."""
    estimate = comparison.faster(peer)
    if estimate is None:
        return "not known: the rounds differ too much"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def figure(comparison: Comparison, side: str) -> str:
    """Return the median of a side's rounds, and their range."""
    values, unit = comparison.values[side], comparison.unit
    if not values:
        return "-"
    form = ",.0f" if unit in RATES or median(values) >= LARGE else ".4g"
    return f"{median(values):{form}} {unit} ({min(values):{form}} to {max(values):{form}})"
