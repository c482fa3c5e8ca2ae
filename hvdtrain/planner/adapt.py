"""When a plan has to be thought over, and when another one is worth its change."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

WINDOW = 8  # times, of which the medians count
LEAST_SECONDS = 0.15  # of a time: of so many steps the mean, so that a burst is no change
SETTLING = 3  # steps after a change that are like no others
# By so much a rank's own time, or all ranks' waiting, has to change for all of a window. KungFu
# (Mai et al., OSDI 2020) acts where throughput falls to 0.8 of what it was.
DRIFT = 1.2
FLOOR = 1e-3  # seconds: less is noise, however short the steps are
HYSTERESIS = 0.05  # of a step: a smaller gain is no reason for a change
MARGIN = 2.0  # times the cost of a change that it has to bring in


@dataclass(frozen=True)
class Drift:
    """What has changed since the plan was new, in words, and each rank's own seconds a step."""

    cause: str
    own_seconds: tuple[float, ...]
    step_seconds: float
    is_waiting: bool = False  # for the network, or for ranks that wait for each other


@dataclass
class Watch:
    """Follows what ranks take in a step; what the first window took is the base.

    Attributes:
        unaveraged: steps that do not last for LEAST_SECONDS yet.
        times: means of such steps.
    """

    unaveraged: list[NDArray[np.float64]] = field(default_factory=list)
    times: deque[NDArray[np.float64]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    base: NDArray[np.float64] | None = None
    unsettled: int = SETTLING

    def add(self, own_seconds: Sequence[float], step_seconds: float) -> Drift | None:
        """Take a step: each rank's own seconds, without waiting for others, and the whole step's.

        Returns what has drifted, once it has for a whole window.
        """
        if self.unsettled > 0:
            self.unsettled -= 1
            return None
        rest = max(0.0, step_seconds - max(own_seconds))
        self.unaveraged.append(np.array([*own_seconds, rest, step_seconds]))
        if sum(step[-1] for step in self.unaveraged) < LEAST_SECONDS:
            return None
        self.times.append(np.mean(self.unaveraged, axis=0))
        self.unaveraged.clear()
        if len(self.times) < WINDOW:
            return None
        found = np.stack(self.times)
        if self.base is None:
            self.base = np.median(found, axis=0)
            self.times.clear()
            return None
        now = np.median(found, axis=0)
        own, whole = tuple(now[:-2].tolist()), float(now[-1])
        if cause := self._slower_rank(found):
            return Drift(cause, own, whole)
        if cause := self._longer_wait(found):
            return Drift(cause, own, whole, is_waiting=True)
        return None

    def restart(self) -> None:
        """Take what comes now as the base."""
        self.times.clear()
        self.unaveraged.clear()
        self.base, self.unsettled = None, SETTLING

    def _slower_rank(self, found: NDArray[np.float64]) -> str | None:
        """A rank that takes another time, if all times of the window agree on it."""
        assert self.base is not None
        own, base = found[:, :-2], np.maximum(self.base[:-2], 1e-9)
        slower = ((own > DRIFT * base) & (own > base + FLOOR)).all(axis=0)
        faster = ((own < base / DRIFT) & (own < base - FLOOR)).all(axis=0)
        if not (slower | faster).any():
            return None
        ratios = np.median(own, axis=0) / base
        changed = np.where(slower | faster, np.abs(np.log(np.maximum(ratios, 1e-9))), 0.0)
        rank = int(changed.argmax())
        return f"rank {rank} takes {ratios[rank]:.2f} times as long as when the plan was new"

    def _longer_wait(self, found: NDArray[np.float64]) -> str | None:
        """That all wait longer for what no rank computes, if all times of the window agree."""
        assert self.base is not None
        more = found[:, -2] - self.base[-2]
        part = more / self.base[-1]
        if not ((part > DRIFT - 1) & (more > FLOOR)).all():
            return None
        return f"ranks wait {np.median(part):.0%} of a step longer than when the plan was new"


@dataclass(frozen=True)
class Decision:
    """Whether to change to another plan, and why."""

    change: bool
    reason: str


def decide(
    current_seconds: float, other_seconds: float, steps_left: int, change_seconds: float
) -> Decision:
    """Whether another plan brings in more than its change costs.

    Args:
        current_seconds, other_seconds: a step of each, by the same prediction.
        change_seconds: what the change itself takes.
    """
    gain = current_seconds - other_seconds
    part = gain / current_seconds if current_seconds else 0.0
    if part < HYSTERESIS:
        return Decision(False, f"no other plan is {HYSTERESIS:.0%} shorter: {part:.1%} at best")
    whole = gain * steps_left
    said = (
        f"{1e3 * other_seconds:.1f} ms a step instead of {1e3 * current_seconds:.1f} brings in "
        f"{whole:.1f} s over the {steps_left:,} steps left"
    )
    if whole < MARGIN * change_seconds:
        return Decision(
            False, f"{said}, less than {MARGIN:g} times the {change_seconds:.1f} s of the change"
        )
    return Decision(True, f"{said}, and the change takes {change_seconds:.1f} s")
