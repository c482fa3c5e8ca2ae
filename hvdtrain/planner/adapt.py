"""When a plan has to be thought over, and when another one is worth its change."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.relayout import moves
from hvdtrain.planner.overview import OPTIMIZER_COPIES
from hvdtrain.planner.tables import Question

WINDOW = 8  # steps, at least, that a change has to last; and times of which the base is made
LEAST_SECONDS = 0.15  # of a time: of so many steps the mean
SETTLING = 3  # steps after a change that are like no others
# By so much a rank's own time, or all ranks' waiting, has to change. KungFu (Mai et al., OSDI
# 2020) acts where throughput falls to 0.8 of what it was.
DRIFT = 1.2
# A change counts once the logarithm of what is beyond DRIFT, times its seconds, has come to this
# (Page, "Continuous inspection schemes", Biometrika 1954): twice as long for a second, 1.35 times
# for four. So a processor whose speed comes and goes is not followed.
EVIDENCE = 0.5
MOST = 2.5  # times: what is more counts as this, so that one long step is no evidence
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
    """Follows what ranks take in a step; what the first times took is the base.

    Attributes:
        unaveraged: steps that do not last for LEAST_SECONDS yet.
        times: means of such steps: each rank's own seconds, what remains of the step, the step.
        evidence, lasted: of each kind of change (ranks slower, ranks faster, all waiting), for as
            long as it was there without a break: as EVIDENCE, and in steps.
    """

    unaveraged: list[NDArray[np.float64]] = field(default_factory=list)
    times: list[NDArray[np.float64]] = field(default_factory=list)
    base: NDArray[np.float64] | None = None
    unsettled: int = SETTLING
    evidence: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    lasted: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def add(self, own_seconds: Sequence[float], step_seconds: float) -> Drift | None:
        """Take a step: each rank's own seconds, without waiting for others, and the whole step's.

        Returns what has drifted, once there is evidence of it.
        """
        if self.unsettled > 0:
            self.unsettled -= 1
            return None
        rest = max(0.0, step_seconds - max(own_seconds))
        self.unaveraged.append(np.array([*own_seconds, rest, step_seconds]))
        if sum(step[-1] for step in self.unaveraged) < LEAST_SECONDS:
            return None
        time, steps = np.mean(self.unaveraged, axis=0), len(self.unaveraged)
        self.unaveraged.clear()
        self.times.append(time)
        if self.base is None:
            self._begin()
            return None
        self._weigh(time, steps)
        return self._drift()

    def restart(self) -> None:
        """Take what comes now as the base."""
        self.times.clear()
        self.unaveraged.clear()
        self.base, self.unsettled = None, SETTLING

    def _begin(self) -> None:
        """Take the base, if there are enough times for it."""
        if len(self.times) < WINDOW:
            return
        self.base = np.maximum(np.median(self.times, axis=0), 1e-9)
        self.times.clear()
        kinds = 2 * (len(self.base) - 2) + 1
        self.evidence, self.lasted = np.zeros(kinds), np.zeros(kinds)

    def _weigh(self, time: NDArray[np.float64], steps: int) -> None:
        """Add to the evidence of what differs, and forget that of what does not."""
        assert self.base is not None
        own, base = np.maximum(time[:-2], 1e-9), self.base[:-2]
        waiting = max(0.0, time[-2] - self.base[-2])
        ratios = np.array([*(own / base), *(base / own), 1 + waiting / self.base[-1]])
        more = np.array([*(own - base), *(base - own), waiting])
        differs = (ratios > DRIFT) & (more > FLOOR)
        beyond = np.log(np.clip(ratios, DRIFT, MOST)) - np.log(DRIFT)
        self.evidence = np.where(differs, self.evidence + beyond * steps * time[-1], 0.0)
        self.lasted = np.where(differs, self.lasted + steps, 0.0)
        if not differs.any():
            self.times.clear()

    def _drift(self) -> Drift | None:
        """What there is most evidence of, if there is enough."""
        found = np.where(self.lasted >= WINDOW, self.evidence, 0.0)
        kind = int(found.argmax())
        if found[kind] < EVIDENCE:
            return None
        assert self.base is not None
        now = np.median(self.times[-WINDOW:], axis=0)
        ranks = len(now) - 2
        own, whole = tuple(now[:-2].tolist()), float(now[-1])
        if kind == 2 * ranks:
            part = (now[-2] - self.base[-2]) / self.base[-1]
            cause = f"ranks wait {part:.0%} of a step longer than when the plan was new"
            return Drift(cause, own, whole, is_waiting=True)
        rank = kind % ranks
        ratio = now[rank] / self.base[rank]
        cause = f"rank {rank} takes {ratio:.2f} times as long as when the plan was new"
        return Drift(cause, own, whole)


def moving_seconds(question: Question, before: Plan, after: Plan) -> float:
    """What handing over weights, statistics and optimizer state takes in a change of plans.

    A rank sends or receives one component at a time.
    """
    known, copies = question.known, 1 + OPTIMIZER_COPIES[question.optimizer]
    busy = dict.fromkeys(range(question.ranks), 0.0)
    for move in moves(before, after):
        cost = known.by_name[move.component]
        size = copies * cost.parameter_bytes + cost.buffer_bytes
        seconds = known.hand_over_seconds(move.sender, move.receiver, size)
        busy[move.sender] += seconds
        busy[move.receiver] += seconds
    return max(busy.values())


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
