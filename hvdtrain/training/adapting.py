"""`--plan adaptive`: rank 0 watches, thinks beside training, and has all ranks change the plan."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hvdtrain.errors import HvdtrainError, UsageError, one_line
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.relayout import is_same_layout
from hvdtrain.parallel.validate import prove
from hvdtrain.planner.adapt import SETTLING, Decision, Drift, Watch, decide, moving_seconds
from hvdtrain.planner.explain import in_short
from hvdtrain.planner.follow import compared, following
from hvdtrain.planner.play import calibrated, play
from hvdtrain.planner.solve import Solution, solve
from hvdtrain.planner.tables import Question
from hvdtrain.training.batches import batch_sizes
from hvdtrain.training.control import Agreed
from hvdtrain.training.session import Session, StepTimes
from hvdtrain.training.vitals import own_seconds

PROFILE_STEPS = 50  # after which components are compared with what was predicted of them
SAME_LAYOUT_SECONDS = 0.2  # of a change that moves nothing: a loader that starts again


@dataclass(frozen=True)
class Thought:
    """What came of thinking a plan over."""

    cause: str
    question: Question
    solution: Solution
    current_seconds: float  # of a step under the plan that was, as predicted
    decision: Decision


@dataclass
class Adapter:
    """One rank's side of changing plans; only rank 0 has a `question`, and thinks.

    Attributes:
        building_seconds: of this rank's part of a plan, the last time.
        followed: steps under this plan.
        expected_transfer: of each rank in a step of this plan; played through once.
    """

    session: Session
    question: Question | None
    building_seconds: float
    followed: int = 0
    expected_transfer: tuple[float, ...] = ()
    watch: Watch = field(default_factory=Watch)
    thinking: threading.Thread | None = None
    thoughts: list[Thought | Exception] = field(default_factory=list)  # one, once it is thought
    wanted: Thought | None = None
    is_forced: bool = False  # to take another plan, whatever it saves: a fault to rehearse

    @property
    def wishes(self) -> bool:
        """Whether this rank asks all others to come together."""
        return self.wanted is not None

    def profile(self) -> dict[str, Any] | None:
        """Every so many steps, compare all components with their predictions. Collective.

        Returns what was found, on rank 0, whose profile then follows it.
        """
        self.followed += 1
        if self.followed == SETTLING:
            self.session.read_times()  # the first steps are like no others
        if self.followed % PROFILE_STEPS:
            return None
        taken: list[StepTimes] = self.session.world.gather(self.session.read_times())
        if self.question is None or self.thinking is not None or self.wanted is not None:
            return None
        question, plan = self.question, self.session.plan
        found = compared(question, plan, [each.components for each in taken])
        self.question = following(question, found)
        if not self.expected_transfer:
            self.expected_transfer = play(question, plan, "the plan that is").transfer_seconds
        pairs = zip(found, taken, self.expected_transfer, strict=True)
        return {
            "ranks": [
                {
                    "times_predicted": ratios,
                    "transfer_seconds": each.transfer,
                    "transfer_seconds_predicted": transfer,
                }
                for ratios, each, transfer in pairs
            ]
        }

    def follow(
        self, agreed: Agreed, steps_left: int, is_forced: bool = False
    ) -> list[dict[str, Any]]:
        """Take a step that all ranks have done, and return what was decided against since.

        Args:
            is_forced: whether to take another plan at once, whatever it saves.
        """
        self.is_forced |= is_forced
        if self.question is None or self.wanted is not None:
            return []
        if self.thinking is not None:
            return self._take_thought()
        if self.is_forced:
            self.is_forced = False
            self._think(partial(self._forced, self.question))
            return self._take_thought()
        own, whole = own_seconds(agreed.vitals)
        drift = self.watch.add(own, whole)
        if drift is not None:
            # A daemon: the end of a run waits for no thought.
            think = partial(self._thought, drift, self.question, steps_left)
            self.thinking = threading.Thread(target=self._think, args=(think,), daemon=True)
            self.thinking.start()
        return []

    def _take_thought(self) -> list[dict[str, Any]]:
        if not self.thoughts:
            return []
        thought, self.thinking = self.thoughts.pop(), None
        if isinstance(thought, Exception):
            # Nothing fits what is known now, or a fault of ours: training goes on as it is.
            self.watch.restart()
            reason = f"no other plan was found ({one_line(thought)})"
            return [{"decision": "stay", "cause": "the plan was thought over", "reason": reason}]
        self.question, self.expected_transfer = thought.question, ()
        if thought.decision.change:
            self.wanted = thought
            return []
        self.watch.restart()
        return [said(thought)]

    def _think(self, think: Callable[[], Thought]) -> None:
        """Keep what comes of it, or why nothing does."""
        try:
            self.thoughts.append(think())
        except Exception as error:
            self.thoughts.append(error)

    def _thought(self, drift: Drift, question: Question, steps_left: int) -> Thought:
        plan = self.session.plan
        whole = drift.step_seconds if drift.is_waiting else None
        asked = calibrated(question, plan, drift.own_seconds, whole)
        current = play(asked, plan, "the plan that is").seconds
        solution = solve(self._keeping_batch_norm(asked, plan))
        chosen = solution.chosen
        decision = decide(
            current, chosen.seconds, steps_left, self._seconds_to(chosen.plan, asked)
        )
        if decision.change:
            prove(chosen.plan, asked.batch_size, asked.known.is_synchronised)
        return Thought(drift.cause, asked, solution, current, decision)

    def _forced(self, question: Question) -> Thought:
        """Return the fastest of the other plans, if there is any of another layout."""
        plan = self.session.plan
        current = play(question, plan, "the plan that is").seconds
        solution = solve(self._keeping_batch_norm(question, plan))
        others = [each for each in solution.candidates if each.plan != plan]
        others.sort(key=lambda each: is_same_layout(each.plan, plan))  # stable: fastest first
        if not others:
            raise UsageError("this run has one plan only")
        prove(others[0].plan, question.batch_size, question.known.is_synchronised)
        decision = Decision(True, "the fastest of the other plans")
        chosen = replace(solution, chosen=others[0])
        return Thought("--inject replan", question, chosen, current, decision)

    def _keeping_batch_norm(self, question: Question, plan: Plan) -> Question:
        """Ask for plans alone under which batch norm computes what it does, if that is wanted."""
        session = self.session
        has_any = any(cost.batch_norms for cost in question.known.costs)
        if session.config.change_batch_norm or not has_any:
            return question
        sizes = batch_sizes(session.config, len(session.train_rows))
        return replace(question, keeps=(plan, tuple(sizes)), microbatches=plan.microbatches)

    def _seconds_to(self, plan: Plan, question: Question) -> float:
        """What a change is expected to take."""
        if is_same_layout(self.session.plan, plan):
            return SAME_LAYOUT_SECONDS
        moving = moving_seconds(question, self.session.plan, plan)
        return max(SAME_LAYOUT_SECONDS, self.building_seconds + moving)

    def _stay(self, thought: Thought | None, refusal: str) -> dict[str, Any] | None:
        """Go on as it is, since the run cannot be trained under the plan that was wanted."""
        self.wanted = None
        self.watch.restart()
        if thought is None:
            return None
        stays = Decision(False, f"the other plan cannot train this run: {refusal}")
        return said(replace(thought, decision=stays))

    def change(self) -> dict[str, Any] | None:
        """Go on under the plan that rank 0 wants; on rank 0 what to say of it. Collective."""
        thought, here, before = self.wanted, self.session.world, self.session.plan
        plan, refusal = thought.solution.chosen.plan if thought else None, ""
        if plan is not None:
            try:  # here, where no training draws random numbers meanwhile
                self.session.check_plan(plan)
            except HvdtrainError as error:
                plan, refusal = None, str(error)
        plan = here.broadcast(plan)
        if plan is None:
            return self._stay(thought, refusal)
        began = time.perf_counter()
        self.session.change_plan(plan)
        here.barrier()
        seconds = time.perf_counter() - began
        if thought is not None and not is_same_layout(before, plan):
            moving = moving_seconds(thought.question, before, plan)
            self.building_seconds = max(0.0, seconds - moving)
        self.wanted, self.followed, self.expected_transfer = None, 0, ()
        self.watch.restart()
        self.session.read_times()  # those of the plan that was
        if thought is None:
            return None
        return said(thought) | {"change_seconds": seconds}


def said(thought: Thought) -> dict[str, Any]:
    """A decision, as metrics.jsonl has it."""
    changes, other = thought.decision.change, thought.solution.chosen.seconds
    return {
        "decision": "change" if changes else "stay",
        "cause": thought.cause,
        "reason": thought.decision.reason,
        # Of the plan that this line names, and of the one that was, or would have been, instead.
        "predicted_seconds": other if changes else thought.current_seconds,
        "before_seconds" if changes else "other_seconds": (
            thought.current_seconds if changes else other
        ),
        "candidates": [in_short(each) for each in thought.solution.candidates],
    }
