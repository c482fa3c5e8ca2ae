"""`--plan adaptive`: rank 0 watches, thinks beside training, and has all ranks change the plan."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.relayout import is_same_layout
from hvdtrain.planner.adapt import Decision, Watch, decide
from hvdtrain.planner.explain import in_short
from hvdtrain.planner.solve import Question, Solution, calibrated, play, solve
from hvdtrain.training.control import Agreed
from hvdtrain.training.session import Session
from hvdtrain.training.vitals import own_seconds

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
        change_seconds: what the last change, or the first building, took.
    """

    session: Session
    question: Question | None
    change_seconds: float
    watch: Watch = field(default_factory=Watch)
    thinking: "Future[Thought] | None" = None
    wanted: Thought | None = None
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @property
    def wishes(self) -> bool:
        """Whether this rank asks all others to come together."""
        return self.wanted is not None

    def follow(self, agreed: Agreed, steps_left: int) -> list[dict[str, Any]]:
        """Take a step that all ranks have done; what was decided against since."""
        if self.question is None or self.wanted is not None:
            return []
        if self.thinking is not None:
            return self._take_thought()
        own, whole = own_seconds(agreed.vitals)
        drift = self.watch.add(own, whole)
        if drift is not None:
            self.thinking = self.pool.submit(
                self._think, drift.cause, self.question, drift.own_seconds, steps_left
            )
        return []

    def _take_thought(self) -> list[dict[str, Any]]:
        assert self.thinking is not None
        if not self.thinking.done():
            return []
        thought = self.thinking.result()
        self.thinking, self.question = None, thought.question
        if thought.decision.change:
            self.wanted = thought
            return []
        self.watch.restart()
        return [said(thought)]

    def _think(
        self, cause: str, question: Question, own: tuple[float, ...], steps_left: int
    ) -> Thought:
        """In a thread of rank 0."""
        plan = self.session.plan
        asked = calibrated(question, plan, own)
        current = play(asked, plan, "the plan that is").seconds
        solution = solve(asked)
        decision = decide(
            current, solution.chosen.seconds, steps_left, self._seconds_to(solution.chosen.plan)
        )
        return Thought(cause, asked, solution, current, decision)

    def _seconds_to(self, plan: Plan) -> float:
        if is_same_layout(self.session.plan, plan):
            return SAME_LAYOUT_SECONDS
        return max(SAME_LAYOUT_SECONDS, self.change_seconds)

    def change(self) -> dict[str, Any] | None:
        """Go on under the plan that rank 0 wants; on rank 0 what to say of it. Collective."""
        thought, here = self.wanted, self.session.world
        plan = here.broadcast(thought.solution.chosen.plan if thought else None)
        began = time.perf_counter()
        self.session.change_plan(plan)
        here.barrier()
        seconds = time.perf_counter() - began
        self.wanted = None
        self.watch.restart()
        if thought is None:
            return None
        return said(thought) | {"change_seconds": seconds}


def said(thought: Thought) -> dict[str, Any]:
    """A decision, as metrics.jsonl has it."""
    return {
        "decision": "change" if thought.decision.change else "stay",
        "cause": thought.cause,
        "reason": thought.decision.reason,
        "before_seconds": thought.current_seconds,
        "predicted_seconds": thought.solution.chosen.seconds,
        "candidates": [in_short(each) for each in thought.solution.candidates],
    }
