"""`plan show --explain` and `plan simulate --cluster`: plans by component, and by prediction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hvdtrain import world
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
from hvdtrain.training.planning import own_times, question, subject_of
from hvdtrain.training.setup import make_plan

# Between ranks of one machine; `train --plan auto` measures it.
SHARED_MEMORY = {"latency_microseconds": 20.0, "gbytes": 4.0}


@dataclass(frozen=True)
class Explained:
    """A plan with what each of its components takes, and why it is this one."""

    question: Question
    candidate: Candidate
    reasons: tuple[str, ...]  # of a choice
    remark: str

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.candidate.plan

    def as_json(self) -> dict[str, Any]:
        """As one JSON object."""
        known, plan = self.question.known, self.candidate.plan
        return self.candidate.overview.as_json() | {
            "reasons": list(self.reasons),
            "bound_seconds": lower_bound(self.question),
            "paper_objective_seconds": paper_objective(known, plan, self.question.batch_size),
            "rank_bytes": list(self.candidate.rank_bytes),
            "remark": self.remark,
        }

    def as_text(self) -> str:
        """As tables and sentences."""
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
    """The plan that is asked for, or the chosen one, by component.

    Raises:
        UsageError: if the plan does not fit, or none does.
    """
    asked = _question(config, training, components)
    remark = PREDICTED if config.cluster else "Ranks are taken to be as fast as this one, alone."
    if config.plan == "auto":
        solution = solve(asked)
        reasons = tuple(explain(asked, solution))
        return Explained(asked, solution.chosen, reasons, remark)
    plan = make_plan(training, components, config.image_size, config.classes, config.ranks)
    candidate = play(asked, plan, config.plan or "dp")
    return Explained(asked, candidate, (_against_the_best(asked, plan, candidate),), remark)


def _against_the_best(asked: Question, plan: Plan, candidate: Candidate) -> str:
    try:
        best = solve(asked).chosen
    except UsageError as error:
        return f"--plan auto would find none that fits: {error}"
    if best.plan == plan:
        return "--plan auto would choose the same"
    part = candidate.seconds / best.seconds - 1
    return (
        f"--plan auto would choose {best.name}, {1e3 * best.seconds:.2f} ms a step: this plan "
        f"takes {abs(part):.1%} {'longer' if part > 0 else 'less'}"
    )


def table(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> StrategyTable:
    """Paper B's five columns for a cluster.

    Raises:
        UsageError: for a cluster that there is not, or if nothing fits.
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
        asked = predict.question_of(
            *(cluster, costs, config.batch_size, config.optimizer),
            recomputed,
        )
        return replace(question(training, asked.known, config.ranks), limits=asked.limits)
    here = world.start()
    torch.set_num_threads(here.threads)
    times = own_times(subject, here)
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
