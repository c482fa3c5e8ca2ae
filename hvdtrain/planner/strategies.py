"""Predicts table I of paper B: one device, three static strategies and the planner's choice.

Baligodugula and Amsaad, "Optimizing Distributed Training Approaches for Scaling Neural Networks",
arXiv 2503.23186. Accuracy is not predicted: every plan computes the same gradients.
"""

from dataclasses import dataclass, replace

from hvdtrain.plan.plan import Plan, pipeline, replicated
from hvdtrain.planner.candidate import Candidate, play
from hvdtrain.planner.clusters import Cluster
from hvdtrain.planner.cost import Question
from hvdtrain.planner.describe import Description, table
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
        hours: of all epochs.
        speedup: over one rank.
        communication: part of a step that a network without cost would save.
    """

    name: str
    candidate: Candidate
    hours: float
    speedup: float
    communication: float

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of the fullest rank in bytes."""
        return max(self.candidate.rank_bytes)


def five_columns(question: Question) -> list[Column]:
    """Return one device, data, model and hybrid parallelism, and the plan of the planner.

    Raises:
        UsageError: if no plan fits into memory.
    """
    names, limits, profile = question.known.profile.names, question.limits, question.known.profile
    one_rank = replace(question.known, profile=Profile(profile.ranks[:1]))
    alone = replace(question, known=one_rank, limits=limits and limits[:1])
    single = play(alone, replicated(names, 1, None, None), "single")
    strategies = {
        "single": single,
        "DP": play(question, replicated(names, question.ranks, None, None), "DP"),
    }
    staged = pipelines(question)
    for name, shapes in (("MP", staged[:1]), ("hybrid", staged[1:])):
        played = [play(question, plan, name) for plan in shapes]
        if played:
            strategies[name] = min(
                played, key=lambda one: (bool(one.shortage(limits)), one.seconds)
            )
    strategies["chosen"] = solve(question).chosen
    steps = -(-IMAGES // question.batch_size) * EPOCHS
    return [
        Column(
            name,
            candidate,
            steps * candidate.seconds / 3600,
            single.seconds / candidate.seconds,
            communication(alone if name == "single" else question, candidate),
        )
        for name, candidate in strategies.items()
    ]


def describe_columns(model: str, cluster: Cluster, question: Question) -> Description:
    """Describe paper B's table I for a model and a cluster.

    Raises:
        UsageError: if no plan fits into memory.
    """
    columns, bound = five_columns(question), lower_bound(question)
    content = {
        "model": model,
        "ranks": cluster.ranks,
        "batch_size": question.batch_size,
        "images": IMAGES,
        "epochs": EPOCHS,
        "remark": PREDICTED,
        "bound_seconds": bound,
        "columns": [
            {
                "strategy": column.name,
                "plan": column.candidate.plan.to_json(),
                "step_seconds": column.candidate.seconds,
                "hours": column.hours,
                "speedup": column.speedup,
                "peak_bytes": column.peak_bytes,
                "communication_fraction": column.communication,
            }
            for column in columns
        ],
    }
    rows = (
        (f"hours for {EPOCHS} epochs", *(f"{column.hours:.3g}" for column in columns)),
        ("speed-up", *(f"{column.speedup:.2f}" for column in columns)),
        ("ms per step", *(f"{1e3 * column.candidate.seconds:.2f}" for column in columns)),
        ("peak memory GiB", *(f"{column.peak_bytes / GIB:.2f}" for column in columns)),
        ("communication %", *(f"{100 * column.communication:.1f}" for column in columns)),
        ("stages x replicas", *(shape(column.candidate.plan) for column in columns)),
        ("micro-batches", *(column.candidate.plan.microbatches for column in columns)),
    )
    gap = columns[-1].candidate.seconds / bound - 1
    lines = [
        f"{model}, {question.batch_size} images per step, {cluster.ranks} rank(s), "
        f"{cluster.ranks_per_node} per node; {EPOCHS} epochs of {IMAGES:,} images",
        *table("{:<20}" + "{:>14}" * len(columns), ("", *(one.name for one in columns)), rows),
        f"computing alone, in equal parts, would take {1e3 * bound:.2f} ms per step; the chosen "
        f"plan takes {gap:.1%} more",
        PREDICTED,
    ]
    return Description(content, "\n".join(lines))


def shape(plan: Plan) -> str:
    """Return the shape of a plan such as 4x2, or 3:1,1 if stages differ."""
    numbers = [len(stage.ranks) for stage in plan.stages]
    if len(set(numbers)) == 1:
        return f"{len(numbers)}x{numbers[0]}"
    return ":".join(map(str, numbers))


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
