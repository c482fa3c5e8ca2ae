"""`--sync auto`: predicts a step with each way to send gradients, and chooses one.

This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.options.syncrequest import CHOICES
from hvdtrain.plan.plan import Plan
from hvdtrain.planner.agreement import NONE, Agreement, rank_bytes
from hvdtrain.planner.candidate import Candidate, play
from hvdtrain.planner.cost import Question
from hvdtrain.planner.solve import BETTER, Solution, solve

NOTHING_TO_SETTLE = "--sync auto: exact, because no stage of the plan has several ranks"
WORTH = 0.95  # an approximation must shorten the predicted step to this part, or less


@dataclass(frozen=True)
class Prospect:
    """A predicted step with one way to send gradients.

    Attributes:
        method: a value of `--compress`.
        question: that the prediction answers.
        candidate: the plan, with its predicted step.
        sent_bytes: per step, of the rank that sends most to agree with other replicas.
        solution: all candidates, if the plan was chosen for this method.
    """

    method: str
    question: Question
    candidate: Candidate
    sent_bytes: float
    solution: Solution | None = None

    @property
    def name(self) -> str:
        """The method in words."""
        return "exact" if self.method == NONE else self.method

    def as_text(self) -> str:
        """Return the prediction in words."""
        return f"{self.name} {1e3 * self.candidate.seconds:.1f} ms and {size(self.sent_bytes)}"


@dataclass(frozen=True)
class Settled:
    """The choice of `--sync auto`.

    Attributes:
        prospects: of all methods, the most exact one first.
        reason: one line.
    """

    chosen: Prospect
    prospects: tuple[Prospect, ...]
    reason: str

    def as_json(self) -> dict[str, object]:
        """Return the choice and all predictions for a log."""
        return {
            "chosen": self.chosen.method,
            "reason": self.reason,
            "predictions": {
                one.method: {"seconds": one.candidate.seconds, "sent_bytes": one.sent_bytes}
                for one in self.prospects
            },
        }


def prospect(question: Question, method: str, plan: Plan | None = None) -> Prospect:
    """Return the prediction for one method.

    Args:
        plan: of the run; None: the best one for this method.

    Raises:
        UsageError: if no plan fits.
    """
    known = replace(question.known, agreement=Agreement(compress=method))
    question, solution = replace(question, known=known), None
    if plan is None:
        solution = solve(question)
        candidate = solution.chosen
    else:
        candidate = play(question, plan, "the plan")
    sent = rank_bytes(known.agreement, candidate.plan, known.by_name)
    return Prospect(method, question, candidate, max(sent), solution)


def settle(question: Question, allows_approximate: bool, plan: Plan | None = None) -> Settled:
    """Return the method with the shortest predicted step, or exact sums.

    An approximation is preferred to a more exact method only if its step is shorter by a margin
    that the error of a prediction does not reach easily.

    Args:
        allows_approximate: whether an approximation may be chosen.
        plan: of the run; None: the best one for each method.

    Raises:
        UsageError: if no plan fits.
    """
    prospects = [prospect(question, method, plan) for method in CHOICES]
    return choose(with_plans_of_all(prospects) if plan is None else prospects, allows_approximate)


def with_plans_of_all(prospects: Sequence[Prospect]) -> list[Prospect]:
    """Return the prospects, each with the fastest of the plans that were chosen for any of them.

    The search for a plan is not exhaustive: without this, a method could win by a plan that was
    missed for another method and does not even send anything.
    """
    plans = {one.candidate.plan: one.candidate.name for one in prospects}
    return [_with_fastest(one, plans) for one in prospects]


def _with_fastest(one: Prospect, plans: Mapping[Plan, str]) -> Prospect:
    others = {plan: name for plan, name in plans.items() if plan != one.candidate.plan}
    played = [play(one.question, plan, name) for plan, name in others.items()]
    fitting = [other for other in played if not other.shortage(one.question.limits)]
    best = min(fitting, key=lambda other: other.seconds, default=one.candidate)
    if best.seconds > BETTER * one.candidate.seconds:
        return one
    solution = one.solution
    if solution is not None:
        solution = replace(solution, chosen=best, candidates=(best, *solution.candidates))
    known = one.question.known
    sent = rank_bytes(known.agreement, best.plan, known.by_name)
    return replace(one, candidate=best, sent_bytes=max(sent), solution=solution)


def choose(prospects: Sequence[Prospect], allows_approximate: bool) -> Settled:
    """Return the choice among prospects; the first one is exact."""
    exact, best = prospects[0], prospects[0]
    for other in prospects[1:]:
        if other.candidate.seconds <= WORTH * best.candidate.seconds:
            best = other
    chosen = best if allows_approximate else exact
    return Settled(chosen, tuple(prospects), _reason(prospects, best, allows_approximate))


def _reason(prospects: Sequence[Prospect], best: Prospect, allows_approximate: bool) -> str:
    exact = prospects[0]
    listed = "; ".join(one.as_text() for one in prospects)
    steps = f"per step and rank: {listed}"
    if not any(one.sent_bytes for one in prospects):
        return NOTHING_TO_SETTLE
    if best is exact:
        return f"--sync auto: exact, which no approximation beats by {1 - WORTH:.0%}; {steps}"
    ratio = exact.candidate.seconds / best.candidate.seconds
    if allows_approximate:
        return f"--sync auto: --compress {best.method}, {ratio:.2f}x faster than exact; {steps}"
    return (
        f"--sync auto: exact, without --allow-approximate; {best.method} is {ratio:.2f}x faster; "
        f"{steps}"
    )


def size(count: float) -> str:
    """Return a number of bytes in words."""
    return f"{count / 1e6:.3g} MB" if count >= 1e5 else f"{count / 1e3:.3g} kB"
