"""`plan show --explain` and `plan simulate --cluster`: plans by component, with predictions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.stage import Images
from hvdtrain.planner import clusters, predict
from hvdtrain.planner.clusters import Cluster, ClusterNetwork
from hvdtrain.planner.components import Profile
from hvdtrain.planner.cost import Known
from hvdtrain.planner.explain import component_table, explain, paper_objective
from hvdtrain.planner.options import PlanConfig
from hvdtrain.planner.play import Candidate, play
from hvdtrain.planner.predict import PREDICTED, StrategyTable
from hvdtrain.planner.solve import lower_bound, solve
from hvdtrain.planner.tables import Question
from hvdtrain.training.plancheck import MEAN, STD
from hvdtrain.training.planning import local_times, question, subject_of
from hvdtrain.training.setup import make_plan
from hvdtrain.world import start as start_world

# Assumed network between ranks of one machine; `train --plan auto` measures it.
SHARED_MEMORY = {"latency_microseconds": 20.0, "gbytes": 4.0}


@dataclass(frozen=True)
class Explained:
    """A plan with the costs of its components, and the reasons for it."""

    question: Question
    candidate: Candidate
    reasons: tuple[str, ...]  # why it was chosen, or how it compares with the best
    remark: str

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.candidate.plan

    def as_json(self) -> dict[str, Any]:
        """Return the content as one JSON object."""
        known, plan = self.question.known, self.candidate.plan
        return self.candidate.overview.as_json() | {
            "reasons": list(self.reasons),
            "bound_seconds": lower_bound(self.question),
            "paper_objective_seconds": paper_objective(known, plan, self.question.batch_size),
            "rank_bytes": list(self.candidate.rank_bytes),
            "remark": self.remark,
        }

    def as_text(self) -> str:
        """Return the content as tables and sentences."""
        known, plan = self.question.known, self.candidate.plan
        sum_form = paper_objective(known, plan, self.question.batch_size)
        return "\n".join(
            [
                self.candidate.overview.as_text(),
                "",
                *component_table(self.question, plan),
                "",
                *self.reasons,
                f"paper B's sum over components of computing and communicating: "
                f"{1e3 * sum_form:.2f} ms",
                self.remark,
            ]
        )


def explained(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> Explained:
    """Return the requested or the chosen plan, by component.

    Raises:
        UsageError: if the plan does not fit, or none does.
    """
    question = _question(config, training, components)
    remark = PREDICTED if config.cluster else "All ranks are assumed to be as fast as this one."
    if config.plan == "auto":
        solution = solve(question)
        reasons = tuple(explain(question, solution))
        return Explained(question, solution.chosen, reasons, remark)
    plan = make_plan(training, components, config.image_size, config.classes, config.ranks)
    candidate = play(question, plan, config.plan or "dp")
    return Explained(question, candidate, (_against_the_best(question, plan, candidate),), remark)


def _against_the_best(question: Question, plan: Plan, candidate: Candidate) -> str:
    try:
        best = solve(question).chosen
    except UsageError as error:
        return f"--plan auto would not find a plan: {error}"
    if best.plan == plan:
        return "--plan auto would choose the same plan"
    part = candidate.seconds / best.seconds - 1
    return (
        f"--plan auto would choose {best.name}, {1e3 * best.seconds:.2f} ms per step: this plan "
        f"is {abs(part):.1%} {'slower' if part > 0 else 'faster'}"
    )


def table(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> StrategyTable:
    """Return paper B's five columns for a cluster.

    Raises:
        UsageError: if there is no such cluster, or if no plan fits.
    """
    cluster = clusters.load(config.cluster or "", config.ranks)
    return predict.five_columns(config.model, cluster, _question(config, training, components))


def _question(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> Question:
    images = Images(MEAN, STD, torch.device("cpu"), training.precision)
    subject = subject_of(training, components, config.image_size, config.classes, images)
    costs, recomputed = subject.costs, subject.recomputed
    if config.cluster:
        cluster = clusters.load(config.cluster, config.ranks)
        predicted = predict.question_of(
            *(cluster, costs, config.batch_size, config.optimizer),
            recomputed,
        )
        return replace(question(training, predicted.known, config.ranks), limits=predicted.limits)
    world = start_world()
    torch.set_num_threads(world.threads)
    times = local_times(subject, world)
    machine = Cluster(
        ranks=config.ranks,
        ranks_per_node=config.ranks,
        gflops=1.0,
        memory_gbytes=1.0,
        memory_gib=1.0,
        **SHARED_MEMORY,
    )
    profile = Profile.alike(times, config.ranks)
    known = Known(costs, profile, ClusterNetwork(machine), recomputed)
    return question(training, known, config.ranks)
