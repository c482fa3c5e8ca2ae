"""`--plan adaptive`: rank 0 watches, replans during training, and lets all ranks migrate."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from hvdtrain.backends.pytorch.build import batch_sizes
from hvdtrain.engine.progress import Agreed
from hvdtrain.engine.session import Device, Migration, Session, StepTimes
from hvdtrain.errors import HvdtrainError, UsageError, one_line
from hvdtrain.health.stragglers import own_seconds
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.plan.plan import Plan, is_same_layout
from hvdtrain.plan.validate import prove
from hvdtrain.planner.adapt import (
    ALIKE,
    SETTLING,
    WINDOW,
    Decision,
    Drift,
    Watch,
    calibrated,
    compared,
    decide,
    following,
    seconds_to_migrate,
)
from hvdtrain.planner.candidate import TRANSFER, play
from hvdtrain.planner.cost import Question
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.probe import link_curves
from hvdtrain.planner.solve import Solution, lower_bound, solve

PROFILE_STEPS = 50  # the components are compared with their predictions every 50 steps
LARGEST_DIFFERENCE = 50.0  # of a component from its rank, if it lasts for a survey
SAME_LAYOUT_SECONDS = 0.2  # a migration that moves no component: the loader restarts


@dataclass(frozen=True)
class Replan:
    """The outcome of one replan."""

    cause: str
    question: Question
    solution: Solution
    current_seconds: float  # predicted seconds per step under the current plan
    decision: Decision
    keeps_base: bool = False  # whether ranks and network are as they were


class Survey(NamedTuple):
    """Measurements of all ranks after a drift, for a replan.

    Attributes:
        end: the step under the current plan after which they are read.
        includes_links: whether links between ranks are measured then.
    """

    end: int
    includes_links: bool


@dataclass
class Adapter:
    """One rank's side of replanning and migration; only rank 0 has a `question` and replans.

    Attributes:
        building_seconds: seconds that this rank last took to build its stages of a plan.
        followed: steps under the current plan.
        expected_transfer: predicted transfer seconds per step of each rank under the current
            plan; computed once per plan.
        replanning: the thread that replans, while it runs and until its outcome is read.
        replans: the outcome of that thread, once there is one.
        pending: a plan that all ranks will migrate to.
        is_forced: whether to migrate to another plan, whatever that saves.
        steps_left: steps that the run still has to make.
        drift: what rank 0 has seen, and will replan for after a survey.
        survey: the survey that is under way, on all ranks.
        timed: steps since the times of components were read.
    """

    session: Session
    migration: Migration
    question: Question | None
    building_seconds: float
    followed: int = 0
    expected_transfer: tuple[float, ...] = ()
    watch: Watch = field(default_factory=Watch)
    replanning: threading.Thread | None = None
    replans: list[Replan | Exception] = field(default_factory=list)
    pending: Replan | None = None
    is_forced: bool = False
    steps_left: int = 0
    drift: Drift | None = None
    survey: Survey | None = None
    timed: int = 0

    @property
    def wants_change(self) -> bool:
        """Return whether this rank requests a migration, or a survey, from all ranks."""
        return self.pending is not None or (self.drift is not None and self.survey is None)

    @property
    def open_question(self) -> Question | None:
        """Return the question on rank 0, unless a replan is under way."""
        return None if self.replanning is not None or self.pending is not None else self.question

    @cached_property
    def exchange(self) -> Exchange:
        """Return transfers between all ranks, beside those of training. Collective."""
        return self.migration.exchange()

    def profile(self) -> dict[str, Any] | None:
        """Compare all components with their predictions every PROFILE_STEPS steps. Collective.

        Returns:
            The comparison, on rank 0, which then updates its profile; otherwise None.
        """
        self.followed += 1
        self.timed += 1
        if self.followed == SETTLING:
            self._read_times()  # discards the first steps, which are not typical
        survey = self.survey
        if self.followed != survey.end if survey else self.followed % PROFILE_STEPS:
            return None
        step_times: list[StepTimes] = self.session.world.gather(self._read_times())
        self.survey = None
        if survey is not None and survey.includes_links:
            self._measure_links()
        question, plan = self.open_question, self.session.plan
        if question is None:
            return None
        rank_ratios = compared(question, plan, [times.components for times in step_times])
        # The first comparison under a plan only corrects what was measured before training.
        if survey is None and self.drift is None and self.followed > PROFILE_STEPS:
            self.drift = self.watch.change_of_a_component(rank_ratios)
        if survey is not None and self.drift is not None:
            self.question = following(question, rank_ratios, LARGEST_DIFFERENCE)
            self._start_replan(self.drift, self.question)
        elif self.watch.changed is None and self.drift is None:
            self.question = following(question, rank_ratios)
        if not self.expected_transfer:
            self.expected_transfer = play(question, plan, "current").spent_on(TRANSFER)
        pairs = zip(rank_ratios, step_times, self.expected_transfer, strict=True)
        device = self.session.device
        return {
            "ranks": [
                {
                    "times_predicted": ratios,
                    "transfer_seconds": device.seconds(times.transfer),
                    "transfer_seconds_predicted": device.seconds(transfer),
                }
                for ratios, times, transfer in pairs
            ]
        }

    def begins_survey(self) -> bool:
        """Return whether there is no plan to migrate to: a change was requested for a survey.

        All ranks then measure their components, and their links if the network drifts, for some
        steps. Collective.
        """
        survey = None
        if self.drift is not None and self.survey is None:
            steps = min(PROFILE_STEPS, self.drift.survey_steps)
            survey = Survey(self.followed + steps, self.drift.is_waiting)
        is_pending, survey = self.session.world.broadcast((self.pending is not None, survey))
        if survey is not None:
            self.survey = survey
            self._read_times()  # discards the steps before the drift
        return not is_pending

    def schedule(self, cause: str) -> tuple[bool, list[dict[str, Any]]]:
        """Profile and solve between two epochs, as paper B's algorithm 1 does. Collective.

        Returns:
            Whether the plan changes now, and on rank 0 the decision to keep it.
        """
        world, kept = self.session.world, []
        if not world.broadcast(self.open_question is not None):
            return world.broadcast(self.pending is not None), []
        is_known = self.timed >= WINDOW
        step_times: list[StepTimes] = world.gather(self._read_times())
        self._measure_links()
        self.survey = self.drift = None
        question = self.open_question
        if question is not None:
            if is_known:
                components = [times.components for times in step_times]
                question = following(question, compared(question, self.session.plan, components))
            self._replan(partial(self._decide, self.watch.as_they_are(cause), question))
            kept = self._take_replan()
        return world.broadcast(self.pending is not None), kept

    def _read_times(self) -> StepTimes:
        self.timed = 0
        return self.migration.read_times()

    def _measure_links(self) -> None:
        """Measure which links between ranks are slower than others. Collective."""
        world = self.session.world
        if world.size < 3:  # there is one link
            return
        largest = world.broadcast(self.question and transfer_bytes(self.question))
        links = link_curves(world, self.exchange, largest)
        question = self.question
        if question is not None and isinstance(question.known.network, MeasuredNetwork):
            known = replace(question.known, network=question.known.network.with_links(links))
            self.question = replace(question, known=known)

    def force(self) -> None:
        """Migrate to another plan after the next step, whatever that saves."""
        self.is_forced = True

    def follow(self, agreed: Agreed, steps_left: int) -> list[dict[str, Any]]:
        """Take a step that all ranks have done; return the decisions to keep the plan."""
        self.steps_left = steps_left
        if self.question is None or self.pending is not None:
            return []
        if self.replanning is not None:
            return self._take_replan()
        if self.is_forced:
            self.is_forced = False
            self._replan(partial(self._decide_on_another, self.question))
            return self._take_replan()
        if self.drift is None:
            self.drift = self.watch.add(*own_seconds(agreed.vitals))
        return []

    def _start_replan(self, drift: Drift, question: Question) -> None:
        """Replan in a thread of rank 0, while training continues."""
        self.drift = None
        make_replan = partial(self._decide, drift, question)
        # A daemon thread: the end of a run does not wait for it.
        self.replanning = threading.Thread(target=self._replan, args=(make_replan,), daemon=True)
        self.replanning.start()

    def _take_replan(self) -> list[dict[str, Any]]:
        if not self.replans:
            return []
        replan, self.replanning = self.replans.pop(), None
        if isinstance(replan, Exception):
            # No plan fits the new profile, or replanning has a bug: training keeps its plan.
            self.watch.restart()
            reason = f"no other plan was found ({one_line(replan)})"
            return [{"decision": "stay", "cause": "replanning", "reason": reason}]
        self.question, self.expected_transfer = replan.question, ()
        if replan.decision.change:
            self.pending = replan
            return []
        if not replan.keeps_base:
            self.watch.restart()
        return [decision_record(replan, self.session.device)]

    def _replan(self, make_replan: Callable[[], Replan]) -> None:
        """Put the outcome into `replans`; runs in a thread of rank 0, unless it is forced."""
        try:
            self.replans.append(make_replan())
        except Exception as error:
            self.replans.append(error)

    def _decide(self, drift: Drift, question: Question) -> Replan:
        plan = self.session.plan
        follows_network = drift.is_waiting or drift.is_uniform
        step_seconds = drift.step_seconds if follows_network else None
        updated = question
        if drift.own_seconds:
            updated = calibrated(question, plan, drift.own_seconds, step_seconds)
        kept = play(updated, plan, "current")
        if drift.is_uniform:
            unchanged = Solution(kept, (kept,), lower_bound(updated))
            return Replan(drift.cause, updated, unchanged, kept.seconds, ALIKE)
        current = kept.seconds
        solution = solve(self._keeping_batch_norm(updated, plan))
        chosen = solution.chosen
        on_clock, migration = self.session.device.seconds, self._seconds_to(chosen.plan, updated)
        decision = decide(
            on_clock(current), on_clock(chosen.seconds), self.steps_left, on_clock(migration)
        )
        if decision.change:
            prove(chosen.plan, updated.batch_size, updated.known.is_synchronised)
        return Replan(
            drift.cause, updated, solution, current, decision, keeps_base=drift.is_of_a_component
        )

    def _decide_on_another(self, question: Question) -> Replan:
        """Return the fastest of the other plans, of another layout if there is any."""
        plan = self.session.plan
        current = play(question, plan, "current").seconds
        solution = solve(self._keeping_batch_norm(question, plan))
        others = [candidate for candidate in solution.candidates if candidate.plan != plan]
        others.sort(key=lambda other: is_same_layout(other.plan, plan))  # stable: fastest first
        if not others:
            raise UsageError("this run has one plan only")
        prove(others[0].plan, question.batch_size, question.known.is_synchronised)
        decision = Decision(True, "the fastest of the other plans")
        chosen = replace(solution, chosen=others[0])
        return Replan("--inject replan", question, chosen, current, decision)

    def _keeping_batch_norm(self, question: Question, plan: Plan) -> Question:
        """Return the question for plans that keep the batch norm groups, if they must be kept."""
        if not any(cost.batch_norms for cost in question.known.costs):
            return question
        sizes = batch_sizes(self.session.config, len(self.session.train_rows))
        return replace(question, keeps=(plan, tuple(sizes)), microbatches=plan.microbatches)

    def _seconds_to(self, plan: Plan, question: Question) -> float:
        """Return the seconds that a migration is expected to take."""
        if is_same_layout(self.session.plan, plan):
            return SAME_LAYOUT_SECONDS
        moving = seconds_to_migrate(question, self.session.plan, plan)
        return max(SAME_LAYOUT_SECONDS, self.building_seconds + moving)

    def _stay(self, replan: Replan | None, refusal: str) -> dict[str, Any] | None:
        """Keep the current plan, since the new one cannot train this run."""
        self.pending = None
        self.watch.restart()
        if replan is None:
            return None
        stays = Decision(False, f"the other plan cannot train this run: {refusal}")
        return decision_record(replace(replan, decision=stays), self.session.device)

    def change(self) -> dict[str, Any] | None:
        """Migrate to the plan that rank 0 has chosen. Collective.

        Returns:
            The decision as metrics.jsonl has it, on rank 0; otherwise None.
        """
        replan, world, before = self.pending, self.session.world, self.session.plan
        self.survey = self.drift = None
        plan, refusal = replan.solution.chosen.plan if replan else None, ""
        if plan is not None:
            try:  # not in the thread: no training draws random numbers at this point
                self.migration.check(plan)
            except HvdtrainError as error:
                plan, refusal = None, str(error)
        plan = world.broadcast(plan)
        if plan is None:
            return self._stay(replan, refusal)
        started = time.perf_counter()
        self.migration.change(plan)
        world.barrier()
        seconds = time.perf_counter() - started
        if replan is not None and not is_same_layout(before, plan):
            moving = seconds_to_migrate(replan.question, before, plan)
            self.building_seconds = max(0.0, seconds - moving)
        self.pending, self.followed, self.expected_transfer = None, 0, ()
        self.watch.restart()
        self._read_times()  # discards those of the old plan
        if replan is None:
            return None
        device = self.session.device
        return decision_record(replan, device) | {"change_seconds": device.seconds(seconds)}


def decision_record(replan: Replan, device: Device) -> dict[str, Any]:
    """Return a decision as metrics.jsonl has it, its seconds on the clock of the device."""
    changes = replan.decision.change
    current = device.seconds(replan.current_seconds)
    other = device.seconds(replan.solution.chosen.seconds)
    return {
        "decision": "change" if changes else "stay",
        "cause": replan.cause,
        "reason": replan.decision.reason,
        # The line names the plan that is kept or migrated to; the other seconds are those of the
        # plan before it or of the rejected one.
        "predicted_seconds": other if changes else current,
        "before_seconds" if changes else "other_seconds": current if changes else other,
        "candidates": [
            candidate.to_json() | {"seconds": device.seconds(candidate.seconds)}
            for candidate in replan.solution.candidates
        ],
    }


def transfer_bytes(question: Question) -> float:
    """Return the bytes of the largest transfer between stages."""
    return question.batch_size * max(cost.output_bytes for cost in question.known.costs)
