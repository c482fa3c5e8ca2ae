"""Explains why a plan was chosen, in words and as a table by component."""

from typing import Any

from hvdtrain.plan.plan import Plan, labels
from hvdtrain.planner.candidates import Candidate
from hvdtrain.planner.cost import Known
from hvdtrain.planner.solve import Solution
from hvdtrain.planner.tables import Question

SHOWN = 5  # candidates to list
MIB = 2**20


def explain(question: Question, solution: Solution) -> list[str]:
    """Return lines that compare the chosen plan with the others and with the lower bound."""
    chosen = solution.chosen
    lines = [
        f"chosen: {chosen.name}, {1e3 * chosen.seconds:.2f} ms per step predicted, "
        f"{solution.gap:.1%} above the lower bound of {1e3 * solution.bound:.2f} ms"
    ]
    others = [candidate for candidate in solution.candidates if candidate.plan != chosen.plan]
    for other in others[:SHOWN]:
        lines.append(
            f"  {other.name} ({len(other.plan.stages)} stage(s), {other.plan.microbatches} "
            f"micro-batch(es), {other.plan.schedule}): {1e3 * other.seconds:.2f} ms, "
            f"{why_slower(chosen, other)}"
        )
    return lines


def why_slower(chosen: Candidate, other: Candidate) -> str:
    """Return why another plan is slower."""
    more = other.seconds / chosen.seconds - 1
    bubble = other.overview.timeline.bubble_fraction
    best = chosen.overview.timeline.bubble_fraction
    if more < 0:
        return f"{-more:.1%} faster, but more complex"
    if bubble > best + 0.01:
        return f"{more:.1%} slower: its ranks wait {bubble:.1%} of the step instead of {best:.1%}"
    return f"{more:.1%} slower"


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as JSON for a log."""
    plan = candidate.plan
    return {
        "name": candidate.name,
        "seconds": candidate.seconds,
        "stages": [[len(s.components), list(s.ranks), list(s.shares)] for s in plan.stages],
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
    }


def component_table(question: Question, plan: Plan) -> list[str]:
    """Return a table of the components: times for their samples, bytes, label and ranks."""
    known, label_of = question.known, labels(plan)
    lines = [
        f"{'component':<24}{'forward ms':>12}{'backward ms':>12}{'update ms':>11}"
        f"{'MiB':>9}{'out KiB':>9}  {'label':<7}ranks"
    ]
    for stage in plan.stages:
        rows = -(-question.batch_size * stage.shares[0] // sum(stage.shares))
        for name in stage.components:
            times = known.profile.ranks[stage.ranks[0]].components[name]
            cost = known.by_name[name]
            lines.append(
                f"{name[:23]:<24}{1e3 * times.forward(rows):>12.3f}"
                f"{1e3 * times.backward(rows):>12.3f}{1e3 * times.update:>11.3f}"
                f"{cost.parameter_bytes / MIB:>9.2f}{cost.output_bytes / 1024:>9.1f}  "
                f"{label_of[name]:<7}{','.join(map(str, stage.ranks))}"
            )
    return lines


def paper_objective(known: Known, plan: Plan, batch_size: int) -> float:
    """Return paper B's objective: the sum of computing and communication over all components.

    Baligodugula and Amsaad, arXiv 2503.23186: sum of t_comp(c_i) + t_comm(c_i, s_i), in seconds.
    It knows neither overlap nor the bubble of a pipeline, and runs stages one after another.
    """
    seconds = 0.0
    last = plan.last
    for number, stage in enumerate(plan.stages):
        rows = -(-batch_size // len(stage.ranks))
        for name in stage.components:
            times = known.profile.ranks[stage.ranks[0]].components[name]
            seconds += times.forward(rows) + times.backward(rows)
            if len(stage.ranks) > 1:
                size = known.by_name[name].parameter_bytes
                seconds += known.network.reduce_seconds(stage.ranks, size)
        if number < last:
            size = known.by_name[stage.components[-1]].output_bytes * rows
            behind = plan.stages[number + 1].ranks[0]
            seconds += 2 * known.send_seconds(stage.ranks[0], behind, size)
    return seconds
