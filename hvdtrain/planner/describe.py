"""The output of the commands for plans: one JSON object, or tables and sentences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.plan.plan import Plan, labels
from hvdtrain.plan.trace import draw
from hvdtrain.planner.agreement import rank_bytes
from hvdtrain.planner.assign import paper_seconds
from hvdtrain.planner.candidate import Candidate
from hvdtrain.planner.cost import Question
from hvdtrain.planner.memory import Memory
from hvdtrain.planner.solve import lower_bound

MIB = 2**20
LONGEST_NAMES = 44
WIDTH = 100  # of the timeline
STAGES = "{:>5}  {:<12} {:<12} {:<6} {:>12} {:>8}  {}"
STAGE_HEADS = ("stage", "ranks", "shares", "label", "parameters", "compute", "components")
MEMORY = "{:>4} " + 5 * "{:>14}"
MEMORY_HEADS = ("rank", *Memory.__dataclass_fields__, "MiB in total")
COMPONENTS = "{:<24}{:>12}{:>12}{:>11}{:>9}{:>9}  {:<7}{}"
COMPONENT_HEADS = ("component", "forward ms", "backward ms", "update ms", "MiB", "out KiB")


@dataclass(frozen=True)
class Description:
    """The output of a command about one plan, or about several if `plan` is None."""

    content: dict[str, Any]
    text: str
    plan: Plan | None = None


def table(form: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table; `form` is the format of one line."""
    return [form.format(*cells).rstrip() for cells in (heads, *rows)]


def describe(candidate: Candidate) -> Description:
    """Describe stages, memory and timeline of a plan."""
    plan, timeline, label_of = candidate.plan, candidate.timeline, labels(candidate.plan)
    stages: list[dict[str, Any]] = [
        {
            "components": list(stage.components),
            "ranks": list(stage.ranks),
            "shares": list(stage.shares),
            "label": label_of[stage.components[0]],
            "parameters": sum(cost.parameters for cost in candidate.costs_of(number)),
            "forward_flops": sum(cost.forward_flops for cost in candidate.costs_of(number)),
            "output_bytes": candidate.costs_of(number)[-1].output_bytes,
        }
        for number, stage in enumerate(plan.stages)
    ]
    flops = sum(stage["forward_flops"] for stage in stages)
    stage_rows = [
        (
            number,
            _joined(stage["ranks"]),
            _joined(stage["shares"]),
            stage["label"],
            f"{stage['parameters']:,}",
            f"{stage['forward_flops'] / flops:.1%}",
            _names(stage["components"]),
        )
        for number, stage in enumerate(stages)
    ]
    memory_rows = [
        (rank, *(f"{size / MIB:,.1f}" for size in (*vars(held).values(), held.total)))
        for rank, held in candidate.memory.items()
    ]
    content = {
        "plan": plan.to_json(),
        "batch_size": candidate.cut.batch_size,
        "microbatches": candidate.cut.microbatches,
        "labels": label_of,
        "stages": stages,
        "memory_bytes": {
            rank: vars(held) | {"total": held.total} for rank, held in candidate.memory.items()
        },
        "bubble_fraction": timeline.bubble_fraction,
        "step": {"duration": timeline.seconds, "unit": candidate.unit},
    }
    lines = [
        *table(STAGES, STAGE_HEADS, stage_rows),
        "",
        *table(MEMORY, MEMORY_HEADS, memory_rows),
        "",
        f"{plan.schedule}, {candidate.cut.batch_size} images in {candidate.cut.microbatches} "
        f"micro-batch(es); a step takes {timeline.seconds:.4g} {candidate.unit}, "
        f"{timeline.bubble_fraction:.1%} of it bubble",
        draw(timeline.events, plan.ranks, WIDTH, candidate.unit),
        *candidate.remarks,
    ]
    return Description(content, "\n".join(lines), plan)


def explain(
    question: Question, candidate: Candidate, reasons: Sequence[str], remark: str
) -> Description:
    """Describe a plan with the costs of its components, and the reasons for it.

    Args:
        reasons: why it was chosen, or how it compares with the best.
    """
    known, plan, described = question.known, candidate.plan, describe(candidate)
    objective = paper_seconds(question, plan)
    rows = []
    for stage in plan.stages:
        samples = -(-question.batch_size * stage.shares[0] // sum(stage.shares))
        for name in stage.components:
            times = known.profile.ranks[stage.ranks[0]].components[name]
            cost = known.by_name[name]
            milliseconds = (times.forward(samples), times.backward(samples), times.update)
            rows.append(
                (
                    name[:23],
                    *(f"{1e3 * seconds:.3f}" for seconds in milliseconds),
                    f"{cost.parameter_bytes / MIB:.2f}",
                    f"{cost.output_bytes / 1024:.1f}",
                    described.content["labels"][name],
                    _joined(stage.ranks),
                )
            )
    content = described.content | {
        "reasons": list(reasons),
        "bound_seconds": lower_bound(question),
        "paper_objective_seconds": objective,
        "rank_bytes": list(candidate.rank_bytes),
        "sent_bytes": list(rank_bytes(known.agreement, plan, known.by_name)),
        "remark": remark,
    }
    lines = [
        described.text,
        "",
        *table(COMPONENTS, (*COMPONENT_HEADS, "label", "ranks"), rows),
        "",
        *reasons,
        f"paper B's sum over components of computing and communicating: {1e3 * objective:.2f} ms",
        remark,
    ]
    return Description(content, "\n".join(lines), plan)


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _names(components: Sequence[str]) -> str:
    text = " ".join(components)
    if len(text) <= LONGEST_NAMES:
        return text
    return f"{components[0]} ... {components[-1]} ({len(components)})"
