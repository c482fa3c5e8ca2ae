"""Cluster files: their numbers, and events that make devices or links slow during some steps."""

from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass
from math import prod
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError, on_one_line
from hvdtrain.options.nearest import nearest, unknown_key

DEVICES, LINKS = "devices", "links"
KEYS = ("slows", "factor", "ranks", "from_step", "to_step")
REQUIRED = ("gbytes", "gflops", "memory_gbytes", "memory_gib", "ranks", "ranks_per_node")
SLOWEST = 1000.0  # factor
SMALLEST, LARGEST = 1e-9, 1e12  # limits of every number: sums and quotients stay finite


@dataclass(frozen=True)
class Event:
    """A slowdown of devices or links.

    Attributes:
        slows: "devices" or "links".
        factor: how many times longer everything takes; below 1 for a faster device or link.
        ranks: whose devices, or whose links to all other ranks; None: all.
        from_step, to_step: the first step, counted from 1, and the first one after it; None: to
            the end.
    """

    slows: str
    factor: float
    ranks: tuple[int, ...] | None = None
    from_step: int = 0
    to_step: int | None = None

    def concerns(self, slows: str, ranks: Iterable[int], step: int) -> bool:
        """Return whether it slows a device or link of one of these ranks in this step."""
        if slows != self.slows or step < self.from_step:
            return False
        if self.to_step is not None and step >= self.to_step:
            return False
        return self.ranks is None or not set(self.ranks).isdisjoint(ranks)


def slowdown(events: Iterable[Event], slows: str, ranks: Iterable[int], step: int) -> float:
    """Return how many times longer a device, or a transfer among ranks, takes in a step.

    The factors of events at the same time multiply.
    """
    ranks = tuple(ranks)
    return prod(event.factor for event in events if event.concerns(slows, ranks, step))


def check_numbers(path: Path, content: Mapping[str, Any], valid: Iterable[Field[Any]]) -> None:
    """Refuse numbers of a cluster file that are unknown, out of range or missing.

    Args:
        valid: the fields that a file may set.

    Raises:
        UsageError: naming the file and the key.
    """
    known = {item.name: item for item in valid}
    for key, value in content.items():
        _check_number(path, key, value, known)
    for key in ("compute_contention", "reduce_contention"):
        if content.get(key, 1) < 1:
            raise UsageError(f"{path}: {key} must be at least 1, not {content[key]}")
    for key in REQUIRED:
        if not content.get(key):
            raise UsageError(f"{path}: {key} is missing, or zero")


def _check_number(path: Path, key: str, value: object, known: Mapping[str, Field[Any]]) -> None:
    if key not in known:
        raise unknown_key(path, key, known)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{path}: {key} must be a number of at least 0, not {value!r}")
    if not 0 <= value < float("inf"):
        raise UsageError(f"{path}: {key} must be a number of at least 0, not {value!r}")
    if value and not SMALLEST <= value <= LARGEST:
        raise UsageError(
            f"{path}: {key} must be between {SMALLEST:g} and {LARGEST:g}, not {value:g}"
        )
    if known[key].type is int and (not isinstance(value, int) or value < 1):
        raise UsageError(f"{path}: {key} must be a whole number above 0, not {value!r}")


def check_ranks(source: str, events: Iterable[Event], ranks: int) -> None:
    """Refuse events of ranks that a cluster does not have.

    Raises:
        UsageError: naming the source of the events.
    """
    for event in events:
        absent = [rank for rank in event.ranks or () if rank >= ranks]
        if absent:
            raise UsageError(
                f"{source}: an event slows {event.slows} of rank {absent[0]}, and the cluster has "
                f"ranks 0 to {ranks - 1}: change its ranks, or --ranks"
            )


def parse_events(path: Path, content: object) -> tuple[Event, ...]:
    """Return the events in the value of the key `events` of a cluster file.

    Raises:
        UsageError: naming the file and the event.
    """
    if not isinstance(content, list):
        raise UsageError(f"{path}: events must be a list, not {on_one_line(content, 60)}")
    return tuple(_event(f"{path}: event {place + 1}", item) for place, item in enumerate(content))


def _event(source: str, content: object) -> Event:
    if not isinstance(content, dict):
        raise UsageError(f"{source} must have the keys slows and factor")
    for key in content:
        if key not in KEYS:
            raise unknown_key(source, key, KEYS)
    slows, factor = content.get("slows"), content.get("factor")
    if slows not in (DEVICES, LINKS):
        raise UsageError(
            f"{source}: slows must be devices or links, not {on_one_line(slows, 60)}"
            f"{nearest(str(slows), (DEVICES, LINKS)) if slows else ''}"
        )
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not is_number or not 1 / SLOWEST <= float(factor or 0) <= SLOWEST:
        raise UsageError(
            f"{source}: factor must be a number between {1 / SLOWEST:g} and {SLOWEST:g}, "
            f"not {on_one_line(factor, 60)}"
        )
    start, stop = _step(source, content, "from_step") or 0, _step(source, content, "to_step")
    if stop is not None and stop <= start:
        raise UsageError(f"{source}: to_step must be above from_step {start}, not {stop}")
    return Event(slows, float(factor or 0), _ranks(source, content), start, stop)


def _step(source: str, content: dict[str, Any], key: str) -> int | None:
    step = content.get(key)
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise UsageError(
            f"{source}: {key} must be a step, 0 or above, not {on_one_line(step, 60)}"
        )
    return step


def _ranks(source: str, content: dict[str, Any]) -> tuple[int, ...] | None:
    ranks = content.get("ranks")
    if ranks is None:
        return None
    if not isinstance(ranks, list) or not ranks:
        raise UsageError(f"{source}: ranks must be a list of ranks, not {on_one_line(ranks, 60)}")
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise UsageError(f"{source}: {on_one_line(rank, 60)} is not a rank: use 0 or above")
    return tuple(ranks)
