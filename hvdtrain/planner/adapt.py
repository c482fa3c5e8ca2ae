"""Decides when to replan, and whether another plan is worth its migration."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, moves
from hvdtrain.planner.candidate import WORK, play
from hvdtrain.planner.cost import Question, stage_seconds
from hvdtrain.planner.memory import held_memory
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.profile import Profile, RankTimes

WINDOW = 8  # steps that a drift must last, at least; the base is the median of as many times
LONG_SECONDS, FEW = 4.0, 4  # a drift of that many seconds and steps has lasted long enough, too
LEAST_SECONDS = 0.15  # one time is the mean over as many steps as take this long
SETTLING = 3  # steps to ignore after a migration: they are slower than usual
# A rank's own time, or the time that all ranks wait, must change by this factor. KungFu (Mai et
# al., OSDI 2020) acts when throughput falls below 0.8 of its former value.
DRIFT = 1.2
UNIFORM = 1.1  # the ratios of ranks and step differ by less than this if the machine drifts
# A drift counts when the sum of log(ratio / DRIFT) x seconds reaches this value (Page, "Continuous
# inspection schemes", Biometrika 1954): after 1 s at a ratio of 2, after 4 s at 1.35. A processor
# whose speed fluctuates does not cause a migration.
EVIDENCE = 0.5
MOST = 2.5  # larger ratios count as this one, so that one long step is not enough evidence
FLOOR = 1e-3  # seconds: smaller differences are noise, even if steps are short
HYSTERESIS = 0.05  # part of a step: a smaller gain does not justify a migration
LITTLE = 0.1  # part of a step below which a rank's time says nothing about its speed
MOST_SLOWER = 10.0  # a network may be this many times slower, or faster, than measured
MARGIN = 2.0  # a migration must save this multiple of its own cost


@dataclass(frozen=True)
class Drift:
    """A change of the machine since the plan was made.

    Attributes:
        cause: the change in words.
        own_seconds: seconds per step of each rank, without waiting for other ranks.
        step_seconds: seconds per step.
        is_waiting: the ranks wait longer, for the network or for each other.
        is_uniform: all ranks, and the whole step, are slower or faster by about the same factor.
        is_of_a_component: a component changed against the others of its rank.
    """

    cause: str
    own_seconds: tuple[float, ...]
    step_seconds: float
    is_waiting: bool = False
    is_uniform: bool = False
    is_of_a_component: bool = False

    @property
    def survey_steps(self) -> int:
        """The steps that the survey after this drift measures: as many as a drift must last."""
        seconds = max(self.step_seconds, 1e-9)
        lasting = max(FEW, min(WINDOW, math.ceil(LONG_SECONDS / seconds)))
        return max(lasting, math.ceil(LEAST_SECONDS / seconds))


@dataclass
class Watch:
    """Compares the times of each step with the base: the first times after a plan starts.

    Attributes:
        unaveraged: steps that together do not last LEAST_SECONDS yet.
        times: means over such steps: own seconds of each rank, the rest of the step, the step;
            since some kind of drift started.
        latest: the last of these means, with or without a drift.
        changed: the component that changed most in the last comparison, its rank, and whether it
            became slower; None if none did.
        evidence, lasted, seconds: for each kind of drift (rank slower, rank faster, all waiting),
            the evidence as in EVIDENCE, and the steps and seconds without a break.
    """

    unaveraged: list[NDArray[np.float64]] = field(default_factory=list)
    times: list[NDArray[np.float64]] = field(default_factory=list)
    latest: deque[NDArray[np.float64]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    base: NDArray[np.float64] | None = None
    unsettled: int = SETTLING
    changed: tuple[int, str, bool] | None = None
    evidence: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    lasted: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    seconds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def add(self, own_seconds: Sequence[float], step_seconds: float) -> Drift | None:
        """Add one step and return the drift, if there is enough evidence of one.

        Args:
            own_seconds: seconds of each rank, without waiting for other ranks.
            step_seconds: seconds of the whole step.
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
        self.latest.append(time)
        if self.base is None:
            self._set_base()
            return None
        self._weigh(time, steps)
        return self._drift()

    def as_they_are(self, cause: str) -> Drift:
        """Return the ranks and the network as the latest steps show them, if there are any."""
        if not self.latest:
            return Drift(cause, (), 0.0)
        now = np.median(self.latest, axis=0)
        return Drift(cause, tuple(now[:-2].tolist()), float(now[-1]), is_waiting=True)

    def change_of_a_component(self, ratios: Sequence[Mapping[str, float]]) -> Drift | None:
        """Return the drift if a component changed against the others of its rank, twice in a row.

        Args:
            ratios: of the measured times to those of a profile that follows the steps, by rank.
        """
        before, self.changed, change = self.changed, None, changed_component(ratios)
        if change is None:
            return None
        rank, name, ratio = change
        self.changed = rank, name, ratio > 1
        if self.changed != before:
            return None
        self.changed = None
        speed = f"{ratio:.2f}x slower" if ratio > 1 else f"{1 / ratio:.2f}x faster"
        cause = f"{name} on rank {rank} is {speed}, beside its other components, than before"
        return replace(self.as_they_are(cause), is_waiting=False, is_of_a_component=True)

    def restart(self) -> None:
        """Start a new base from the next steps."""
        self.times.clear()
        self.latest.clear()
        self.unaveraged.clear()
        self.base, self.unsettled = None, SETTLING

    def _set_base(self) -> None:
        """Set the base if there are enough times for it."""
        if len(self.times) < WINDOW:
            return
        self.base = np.maximum(np.median(self.times, axis=0), 1e-9)
        self.times.clear()
        kinds = 2 * (len(self.base) - 2) + 1
        self.evidence, self.lasted, self.seconds = (np.zeros(kinds) for _ in range(3))

    def _weigh(self, time: NDArray[np.float64], steps: int) -> None:
        """Add to the evidence of the kinds that differ, and clear that of the others."""
        assert self.base is not None
        seconds, base = np.maximum(time[:-2], 1e-9), self.base[:-2]
        waiting = max(0.0, time[-2] - self.base[-2])
        ratios = np.array([*(seconds / base), *(base / seconds), 1 + waiting / self.base[-1]])
        more = np.array([*(seconds - base), *(base - seconds), waiting])
        differs = (ratios > DRIFT) & (more > FLOOR)
        beyond = np.log(np.clip(ratios, DRIFT, MOST)) - np.log(DRIFT)
        self.evidence = np.where(differs, self.evidence + beyond * steps * time[-1], 0.0)
        self.lasted = np.where(differs, self.lasted + steps, 0.0)
        self.seconds = np.where(differs, self.seconds + steps * time[-1], 0.0)
        if not differs.any():
            self.times.clear()

    def _drift(self) -> Drift | None:
        """Return the drift with the most evidence, if the evidence is sufficient."""
        is_long = (self.lasted >= FEW) & (self.seconds >= LONG_SECONDS)
        evidence = np.where(is_long | (self.lasted >= WINDOW), self.evidence, 0.0)
        kind = int(evidence.argmax())
        if evidence[kind] < EVIDENCE:
            return None
        assert self.base is not None
        now = np.median(self.times[-WINDOW:], axis=0)
        ranks = len(now) - 2
        own_seconds, step_seconds = tuple(now[:-2].tolist()), float(now[-1])
        if kind == 2 * ranks:
            part = (now[-2] - self.base[-2]) / self.base[-1]
            cause = f"ranks wait {part:.0%} of a step longer than the plan assumed"
            return Drift(cause, own_seconds, step_seconds, is_waiting=True)
        ratios = np.append(now[:-2], now[-1]) / np.append(self.base[:-2], self.base[-1])
        is_uniform = bool(ratios.max() < UNIFORM * ratios.min())
        rank = kind % ranks
        ratio = ratios[-1] if is_uniform else ratios[rank]
        speed = f"{ratio:.2f}x slower" if ratio > 1 else f"{1 / ratio:.2f}x faster"
        who = "all ranks are" if is_uniform else f"rank {rank} is"
        cause = f"{who} {speed} than the plan assumed"
        return Drift(cause, own_seconds, step_seconds, is_uniform=is_uniform)


def calibrated(
    question: Question,
    plan: Plan,
    own_seconds: Sequence[float],
    step_seconds: float | None = None,
) -> Question:
    """Return the question with ranks and network as slow as measured steps of `plan` show.

    So a profile includes the cost of sharing the machine with other processes, which short
    measurements of components do not show.

    Args:
        own_seconds: seconds per step of each rank, without waiting for other ranks.
        step_seconds: seconds of the whole step, to adapt the network to the waiting time.
    """
    known, predicted = question.known, play(question, plan, "")
    # A rank that computes next to nothing only shows the overhead of a step.
    factors = [
        measured / expected if expected > LITTLE * predicted.seconds else 1.0
        for measured, expected in zip(own_seconds, predicted.spent_on(WORK), strict=True)
    ]
    scaled = replace(question, known=replace(known, profile=known.profile.scaled(factors)))
    if step_seconds is None:
        return scaled
    again = play(scaled, plan, "")
    waited = step_seconds - max(own_seconds)
    expected = again.seconds - max(again.spent_on(WORK))
    if not isinstance(known.network, MeasuredNetwork) or expected <= 0 or waited <= 0:
        return scaled
    slower = min(MOST_SLOWER, max(1 / MOST_SLOWER, waited / expected))
    network = known.network.scaled(slower)
    return replace(scaled, known=replace(scaled.known, network=network))


def seconds_to_migrate(question: Question, before: Plan, after: Plan) -> float:
    """Return the seconds that moving weights, statistics and optimizer state to a new plan takes.

    A rank sends or receives one component at a time.
    """
    known = question.known
    busy = dict.fromkeys(range(question.ranks), 0.0)
    for move in moves(before, after):
        memory = held_memory([known.by_name[move.component]], question.optimizer)
        size = memory.parameters + memory.optimizer
        seconds = known.send_seconds(move.sender, move.receiver, size)
        busy[move.sender] += seconds
        busy[move.receiver] += seconds
    return max(busy.values())


@dataclass(frozen=True)
class Decision:
    """A decision for or against a migration, with its reason in words."""

    change: bool
    reason: str


def decide(
    current_seconds: float, other_seconds: float, steps_left: int, migration_seconds: float
) -> Decision:
    """Return whether another plan saves more than its migration costs.

    Args:
        current_seconds, other_seconds: seconds per step of each plan, by the same prediction.
        steps_left: steps that the run still has to make.
        migration_seconds: seconds that the migration takes.
    """
    gain = current_seconds - other_seconds
    part = gain / current_seconds if current_seconds else 0.0
    if part < HYSTERESIS:
        return Decision(
            False, f"no other plan saves {HYSTERESIS:.0%} of a step: {part:.1%} at best"
        )
    saved = gain * steps_left
    comparison = (
        f"{1e3 * other_seconds:.1f} ms per step instead of {1e3 * current_seconds:.1f} saves "
        f"{saved:.1f} s over the {steps_left:,} steps left"
    )
    if saved < MARGIN * migration_seconds:
        return Decision(
            False,
            f"{comparison}, less than {MARGIN:g}x the {migration_seconds:.1f} s of the migration",
        )
    return Decision(True, f"{comparison}, and the migration takes {migration_seconds:.1f} s")


ALIKE = Decision(
    False, "all ranks and the network drift alike: the profile follows, no plan gains by it"
)

MOST_DIFFERENCE = (
    2.0  # a component may deviate from its rank by this factor; more is a disturbance
)
LEAST_MEASURED_SECONDS = 1e-4  # seconds per step: less is below the accuracy of the clock


def predicted_components(question: Question, plan: Plan, rank: int) -> dict[str, float]:
    """Return the seconds per step, forward and backward, of each component that a rank holds."""
    pieces = cut(plan, question.batch_size)
    seconds = {}
    for stage in plan.stages_of(rank):
        rows = [pieces.rows(stage, rank, k) for k in range(pieces.microbatches)]
        for name in plan.stages[stage].components:
            seconds[name] = sum(
                stage_seconds(question.known, rank, [name], kind, count)
                for kind in ("F", "B")
                for count in rows
                if count
            )
    return seconds


def compared(
    question: Question, plan: Plan, measured: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    """Return the measured time of each component divided by the predicted one, by rank.

    Args:
        measured: seconds per step by component, for each rank.
    """
    ratios = []
    for rank, seconds in enumerate(measured):
        expected = predicted_components(question, plan, rank)
        ratios.append(
            {
                name: seconds[name] / expected[name]
                for name in seconds
                if expected.get(name, 0.0) > LEAST_MEASURED_SECONDS
            }
        )
    return ratios


def changed_component(ratios: Sequence[Mapping[str, float]]) -> tuple[int, str, float] | None:
    """Return the rank and component whose time changed most against the others of its rank.

    Returns:
        With them the ratio to the median of the rank; None if no ratio differs by DRIFT from 1.
    """
    relative = [
        (rank, name, ratio)
        for rank, rank_ratios in enumerate(ratios)
        for name, ratio in _relative_ratios(rank_ratios, math.inf).items()
        if ratio > 0
    ]
    if not relative:
        return None
    # Of two components of a rank, each differs as much from their median.
    most = max(relative, key=lambda one: (round(abs(math.log(one[2])), 6), ratios[one[0]][one[1]]))
    return None if 1 / DRIFT <= most[2] <= DRIFT else most


def following(
    question: Question, ratios: Sequence[Mapping[str, float]], most: float = MOST_DIFFERENCE
) -> Question:
    """Return the question with components adapted to their measured ratios on each rank.

    Ratios count relative to the median of their rank. How fast a rank is as a whole is up to
    `calibrated`. A component that a rank does not hold gets the median of the ranks that hold
    it.

    Args:
        most: factor by which a component may deviate; a larger one counts as a disturbance.
    """
    relative = [_relative_ratios(rank_ratios, most) for rank_ratios in ratios]
    seen: dict[str, list[float]] = {}
    for rank_ratios in relative:
        for name, ratio in rank_ratios.items():
            seen.setdefault(name, []).append(ratio)
    others = {name: statistics.median(values) for name, values in seen.items()}
    profile = question.known.profile
    ranks = tuple(
        _scaled(rank, others | rank_ratios)
        for rank, rank_ratios in zip(profile.ranks, relative, strict=True)
    )
    return replace(question, known=replace(question.known, profile=Profile(ranks)))


def _relative_ratios(
    ratios: Mapping[str, float], most: float = MOST_DIFFERENCE
) -> dict[str, float]:
    """Return the ratios of a rank relative to their median."""
    logs = [math.log(ratio) for ratio in ratios.values() if ratio > 0]
    if not logs:
        return {}
    median = math.exp(statistics.median(logs))  # of two, as far from one as from the other
    return {name: min(most, max(1 / most, ratio / median)) for name, ratio in ratios.items()}


def _scaled(rank: RankTimes, factors: Mapping[str, float]) -> RankTimes:
    components = {
        name: times.times(factors[name]) if name in factors else times
        for name, times in rank.components.items()
    }
    return replace(rank, components=components)
