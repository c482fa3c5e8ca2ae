"""Predicts table I of paper B: one device, three static strategies and the planner's choice.

Baligodugula and Amsaad, "Optimizing Distributed Training Approaches for Scaling Neural Networks",
arXiv 2503.23186. Accuracy is not predicted: every plan computes the same gradients.
"""

from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.plan.plan import Plan, pipeline, replicated
from hvdtrain.planner.candidate import Candidate, play
from hvdtrain.planner.clusters import Cluster
from hvdtrain.planner.cost import Question
from hvdtrain.planner.memory import GIB
from hvdtrain.planner.network import FreeNetwork
from hvdtrain.planner.profile import Profile
from hvdtrain.planner.solve import lower_bound, numbers_of_stages, solve

IMAGES, EPOCHS = 50_000, 100  # CIFAR-100, as in paper B
PREDICTED = "These are predictions from typical rates of such machines, not measurements."


@dataclass(frozen=True)
class Column:
    """One strategy of the table.

    Attributes:
        communication: part of a step that a network without cost would save.
    """

    name: str
    candidate: Candidate
    communication: float

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of the fullest rank in bytes."""
        return max(self.candidate.rank_bytes)


@dataclass(frozen=True)
class StrategyTable:
    """Paper B's table I for a model and a cluster."""

    model: str
    cluster: Cluster
    batch_size: int
    columns: tuple[Column, ...]
    bound: float

    def as_json(self) -> dict[str, Any]:
        """Return the table as one JSON object."""
        return {
            "model": self.model,
            "ranks": self.cluster.ranks,
            "batch_size": self.batch_size,
            "images": IMAGES,
            "epochs": EPOCHS,
            "remark": PREDICTED,
            "bound_seconds": self.bound,
            "columns": [
                {
                    "strategy": column.name,
                    "plan": column.candidate.plan.to_json(),
                    "step_seconds": column.candidate.seconds,
                    "hours": self.hours(column),
                    "speedup": self.speedup(column),
                    "peak_bytes": column.peak_bytes,
                    "communication_fraction": column.communication,
                }
                for column in self.columns
            ],
        }

    def as_text(self) -> str:
        """Return the table as text."""
        rows = {
            f"hours for {EPOCHS} epochs": [f"{self.hours(column):.3g}" for column in self.columns],
            "speed-up": [f"{self.speedup(column):.2f}" for column in self.columns],
            "ms per step": [f"{1e3 * column.candidate.seconds:.2f}" for column in self.columns],
            "peak memory GiB": [f"{column.peak_bytes / GIB:.2f}" for column in self.columns],
            "communication %": [f"{100 * column.communication:.1f}" for column in self.columns],
            "stages x replicas": [shape(column.candidate.plan) for column in self.columns],
            "micro-batches": [str(column.candidate.plan.microbatches) for column in self.columns],
        }
        heads = "".join(f"{column.name:>14}" for column in self.columns)
        lines = [
            f"{self.model}, {self.batch_size} images per step, {self.cluster.ranks} rank(s), "
            f"{self.cluster.ranks_per_node} per node; {EPOCHS} epochs of {IMAGES:,} images",
            f"{'':<20}{heads}",
        ]
        lines += [
            f"{name:<20}" + "".join(f"{cell:>14}" for cell in cells)
            for name, cells in rows.items()
        ]
        gap = self.columns[-1].candidate.seconds / self.bound - 1
        lines.append(
            f"lower bound for any plan: {1e3 * self.bound:.2f} ms per step; the chosen plan is "
            f"{gap:.1%} above it"
        )
        return "\n".join([*lines, PREDICTED])

    def hours(self, column: Column) -> float:
        """Return the hours of all epochs."""
        steps = -(-IMAGES // self.batch_size) * EPOCHS
        return steps * column.candidate.seconds / 3600

    def speedup(self, column: Column) -> float:
        """Return the speed-up over one rank."""
        return self.columns[0].candidate.seconds / column.candidate.seconds


def shape(plan: Plan) -> str:
    """Return the shape of a plan such as 4x2, or 3:1,1 if stages differ."""
    numbers = [len(stage.ranks) for stage in plan.stages]
    if len(set(numbers)) == 1:
        return f"{len(numbers)}x{numbers[0]}"
    return ":".join(map(str, numbers))


def five_columns(model: str, cluster: Cluster, question: Question) -> StrategyTable:
    """Return one device, data, model and hybrid parallelism, and the plan of the planner.

    Raises:
        UsageError: if no plan fits into memory.
    """
    solution = solve(question)
    alone = _on_one(question, cluster)
    one_rank = replicated(alone.known.profile.names, 1, None, None)
    strategies = [("single", alone, play(alone, one_rank, "single"))]
    names, limits = question.known.profile.names, question.limits
    plan = replicated(names, question.ranks, None, None)
    strategies.append(("DP", question, play(question, plan, "DP")))
    staged = pipelines(question)
    for name, shapes in (("MP", staged[:1]), ("hybrid", staged[1:])):
        played = [play(question, plan, name) for plan in shapes]
        if played:
            fastest = min(played, key=lambda one: (bool(one.shortage(limits)), one.seconds))
            strategies.append((name, question, fastest))
    strategies.append(("chosen", question, solution.chosen))
    columns = tuple(
        Column(name, candidate, communication(of_column, candidate))
        for name, of_column, candidate in strategies
    )
    return StrategyTable(model, cluster, question.batch_size, columns, lower_bound(question))


def _on_one(question: Question, cluster: Cluster) -> Question:
    one = replace(question.known, profile=Profile(question.known.profile.ranks[:1]))
    return replace(question, known=one, limits=(cluster.memory_gib * GIB,))


def pipelines(question: Question) -> list[Plan]:
    """Return the pipelines that use all ranks: the one with the most stages, then hybrids."""
    names, ranks = question.known.profile.names, question.ranks
    work = [cost.forward_flops for cost in question.known.costs]
    return [
        pipeline(names, work, ranks, number, ranks // number, question.microbatches, "1f1b")
        for number in reversed(numbers_of_stages(question))
    ]


def communication(question: Question, candidate: Candidate) -> float:
    """Return the part of a step that the same plan would save on a network without cost."""
    free = replace(question.known, network=FreeNetwork(question.known.network.hosts))
    seconds = play(replace(question, known=free), candidate.plan, "").seconds
    return 1 - seconds / candidate.seconds
