"""The seconds that all-reduces add to a backward that hides a part of them."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """A part of a backward: its seconds alone, and its slowdown beside an all-reduce."""

    seconds: float
    slowdown: float


class Sum(NamedTuple):
    """An all-reduce: the number of parts after which it can start, and its seconds alone."""

    after: int
    seconds: float


def exposed_seconds(parts: Sequence[Part], sums: Sequence[Sum], slowdown: float) -> float:
    """Return the seconds that all-reduces add to a backward.

    One all-reduce runs at a time. Galvatron (Miao et al., VLDB 2023) reports that predictions are
    off by 15 % without the slowdowns; there they are the same for all parts.

    Args:
        parts: in the order in which they run.
        sums: in the order in which they start.
        slowdown: of an all-reduce beside a part.
    """
    waiting = deque(sums)
    now = in_flight = 0.0  # seconds since the start; seconds alone that the all-reduce still takes
    for done, part in enumerate(parts):
        left = part.seconds
        while left > 0:
            while not in_flight and waiting and waiting[0].after <= done:
                in_flight = waiting.popleft().seconds
            if not in_flight:
                now, left = now + left, 0.0
            elif left * part.slowdown <= in_flight * slowdown:
                now += left * part.slowdown
                in_flight -= left * part.slowdown / slowdown
                left = 0.0
            else:
                now += in_flight * slowdown
                left -= in_flight * slowdown / part.slowdown
                in_flight = 0.0
    now += in_flight + sum(one.seconds for one in waiting)
    return now - sum(part.seconds for part in parts)
