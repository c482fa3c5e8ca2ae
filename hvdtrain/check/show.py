"""The commands `plan show`, `plan simulate` and `plan check`, and the predictions they print."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvdtrain import models
from hvdtrain.backends.pytorch.measured import subject_of
from hvdtrain.backends.pytorch.parts import build_parts_alone, probe_forms
from hvdtrain.backends.pytorch.setup import make_plan
from hvdtrain.check.parity import Parity
from hvdtrain.check.plan import MEAN, STD, check_plan, target_form
from hvdtrain.config import TrainConfig
from hvdtrain.device import choose_device
from hvdtrain.errors import UsageError
from hvdtrain.host.files import check_target, write_text
from hvdtrain.models.component import Component
from hvdtrain.models.costs import component_costs
from hvdtrain.models.losses import Loss
from hvdtrain.models.shapes import boundaries
from hvdtrain.options.optimisationoptions import CROSS_ENTROPY
from hvdtrain.options.planrequest import AUTO
from hvdtrain.options.syncrequest import Server
from hvdtrain.parallel.boundary import Boundaries
from hvdtrain.parallel.runtime import Observer, Runtime, Settings
from hvdtrain.parallel.stage import AUTOCAST, DTYPES, Images
from hvdtrain.plan import planfile
from hvdtrain.plan.actions import to_csv
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.planfile import recomputed_components
from hvdtrain.plan.simulate import Costs
from hvdtrain.plan.trace import write_trace
from hvdtrain.planner import clusters
from hvdtrain.planner.actiontimes import Table, measured_costs, profile_parts
from hvdtrain.planner.agreement import (
    EXACT,
    NONE,
    Agreement,
    agreement_of,
    rank_bytes,
    size,
)
from hvdtrain.planner.candidate import (
    Candidate,
    Overview,
    component_table,
    overview,
    paper_objective,
    play,
)
from hvdtrain.planner.choose import local_times, predicted_question, question
from hvdtrain.planner.clusters import Cluster, ClusterNetwork
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.options import PlanConfig
from hvdtrain.planner.profile import Profile
from hvdtrain.planner.solve import lower_bound, solve
from hvdtrain.planner.strategies import PREDICTED, StrategyTable, five_columns
from hvdtrain.planner.subject import Subject
from hvdtrain.planner.sweep import Sweep, check_alike, sweep
from hvdtrain.planner.sweep import check as check_sweep
from hvdtrain.world import World
from hvdtrain.world import start as start_world
from hvdtrain.world import stop as stop_world

# Assumed network between ranks of one machine; `train --plan auto` measures it.
SHARED_MEMORY: dict[str, Any] = {"latency_microseconds": 20.0, "gbytes": 4.0}


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
            "sent_bytes": list(rank_bytes(known.agreement, plan, known.by_name)),
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


def _explained(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> Explained:
    """Return the requested or the chosen plan, by component, and write the requested files.

    Raises:
        UsageError: if the plan does not fit, or none does.
    """
    question = _question(config, training, components)
    remark = PREDICTED if config.cluster else "All ranks are assumed to be as fast as this one."
    plan = None
    if training.plan_request != AUTO:
        plan = make_plan(training, components, config.image_size, config.ranks)
    lines: list[str] = []
    if plan is None:
        solution = solve(question)
        candidate = solution.chosen
        lines += solution.reasons()
    else:
        candidate = play(question, plan, config.plan or "dp")
        lines.append(_against_the_best(question, plan, candidate))
    if question.known.agreement != EXACT:
        lines.append(_sent(question.known.agreement, candidate.overview))
    _write(config, candidate.overview)
    return Explained(question, candidate, tuple(lines), remark)


def _sent(agreement: Agreement, shown: Overview) -> str:
    """Return the bytes that the ranks of a plan send to agree, in words."""
    sent = rank_bytes(agreement, shown.plan, shown.costs)
    return f"To agree, a rank sends up to {size(max(sent))} per step."


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


def _table(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> StrategyTable:
    """Return paper B's five columns for a cluster.

    Raises:
        UsageError: if there is no such cluster, or if no plan fits.
    """
    cluster = clusters.load(config.cluster or "", config.ranks)
    return five_columns(config.model, cluster, _question(config, training, components))


def _question(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> Question:
    training = replace(training, plan="auto")  # with every schedule, to compare a given plan with
    subject = _subject(config, training, components)
    costs, recomputed = subject.costs, subject.recomputed
    if config.cluster:
        return predicted_question(subject, config.cluster, config.ranks)
    world = start_world()
    torch.set_num_threads(world.threads)
    times = local_times(subject, world, replicas=config.ranks)
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


def _subject(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> Subject:
    images = Images(MEAN, STD, torch.device("cpu"), training.precision)
    form = target_form(training, components, config.image_size, config.classes)
    return subject_of(training, components, config.image_size, form, images)


# A transfer between ranks of one machine; that of a cluster has to be measured there.
TRANSFER_SECONDS = 20e-6
SECONDS_PER_BYTE = 1 / 4e9


def show(config: PlanConfig) -> Overview | Explained:
    """Return the stages, labels and memory of a plan, and a step timed by counted operations.

    Writes the plan to `config.save` and the step to `config.trace` if they are set.

    Raises:
        UsageError: for any mistake of the user.
    """
    training = _checked(config)
    if config.sweep or config.price is not None:
        raise UsageError("plan show has no --sweep and no --price: use plan simulate")
    if config.cluster and not config.explain:
        raise UsageError(
            "plan show --cluster needs --explain: add --explain, or use plan simulate"
        )
    components = _components(config, training)
    if config.explain:
        return _explained(config, training, components)
    plan = make_plan(training, components, config.image_size, config.ranks)
    return _overview(config, training, components, plan, None)


def simulate(config: PlanConfig) -> Overview | Explained | StrategyTable | Sweep:
    """Return what `show` does, with measured times: this process runs the stages of each rank.

    Raises:
        UsageError: for any mistake of the user.
    """
    training = _checked(config)
    check_sweep(config)
    if config.explain or (config.picture and not config.sweep):
        raise UsageError(
            "plan simulate has no --explain, and --picture with --sweep only: use plan show"
        )
    if config.cluster:
        components = _components(config, training)
        if config.sweep:
            check_alike(config.cluster, config.ranks)
            subject = _subject(config, replace(training, plan="auto"), components)
            of = partial(predicted_question, subject, config.cluster)
            return sweep(config.model, of, config.ranks, config.price)
        if config.plan is None:
            if config.save or config.actions or config.trace:
                raise UsageError("--save, --actions and --trace need one plan: give --plan")
            return _table(config, training, components)
        return _explained(config, training, components)
    world = start_world()
    torch.set_num_threads(world.threads)
    components = _components(config, training)
    plan = make_plan(training, components, config.image_size, config.ranks)
    measured = _measure(config, training, components, plan)
    return _overview(config, training, components, plan, measured)


def _write(config: PlanConfig, shown: Overview) -> None:
    """Write the requested files."""
    if config.save:
        planfile.save(shown.plan, Path(config.save))
    if config.actions:
        write_text(Path(config.actions), to_csv(shown.schedule), "the actions")
    if config.trace:
        write_trace(Path(config.trace), shown.timeline.events, shown.unit)


def _checked(config: PlanConfig) -> TrainConfig:
    for name in ("trace", "save", "actions", "picture"):
        if (path := getattr(config, name)) is not None:
            check_target(path, f"--{name}")
    training = config.training("fp32")
    if isinstance(training.sync_request, Server):
        raise UsageError(
            f"plan show and plan simulate predict no servers: leave --sync {config.sync} out"
        )
    return training


def _measure(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component], plan: Plan
) -> Costs:
    pieces, device = cut(plan, config.batch_size), torch.device("cpu")
    images = Images(MEAN, STD, device, training.precision)
    loss = _subject(config, training, components).loss
    settings = Settings(
        images,
        AUTOCAST.get(training.precision),
        loss=Loss(lambda outputs, _: loss(outputs)[None]),
    )
    alone = World("none", 0, 1, 0, 1, 1)
    everything = replace(
        plan, stages=tuple(replace(s, ranks=(0,), shares=(1,)) for s in plan.stages)
    )
    whole = build_parts_alone(training, everything, components, 0, device)
    forms = probe_forms(everything, whole, config.image_size, training, alone, device)[1:]
    tables: dict[int, Table] = {}
    alike: dict[object, Table] = {}
    for rank in plan.ranks:
        held = plan.stages_of(rank)
        work = tuple((stage, tuple(b - a for a, b in pieces.parts[stage][rank])) for stage in held)
        if work not in alike:
            parts = build_parts_alone(training, plan, components, rank, device)
            rank_boundaries = Boundaries(rank, forms, None, device)
            runtime = Runtime(settings, parts, rank_boundaries, Observer(events=[]))
            alike[work] = profile_parts(runtime, plan, pieces, config.image_size)
        tables[rank] = alike[work]
    return measured_costs(plan, pieces, forms, tables, TRANSFER_SECONDS, SECONDS_PER_BYTE)


def check(config: PlanConfig) -> Parity:
    """Compare steps under the plan with serial steps from the same weights. Collective.

    Raises:
        UsageError: for any mistake of the user.
    """
    training = config.training("fp64")
    if (training.sync, training.compress) != ("exact", NONE):
        raise UsageError(
            "plan check compares with serial steps, from which --sync and --compress differ: "
            "leave them out"
        )
    if any(path is not None for path in (config.trace, config.save, config.actions)):
        raise UsageError("plan check has no --trace, --save or --actions: use plan show")
    if config.cluster or config.explain or config.picture:
        raise UsageError(
            "plan check has no --cluster, --explain or --picture: use plan show or plan simulate"
        )
    world = start_world()
    if world.size != config.ranks:
        raise UsageError(
            f"--ranks {config.ranks}, but the launcher started {world.size}: "
            f"give --ranks {world.size}"
        )
    torch.set_num_threads(world.threads)
    components = _components(config, training)
    plan = make_plan(training, components, config.image_size, world.size)
    size, device = config.image_size, choose_device(training.device, world)
    parity = check_plan(training, components, plan, size, config.classes, world, device=device)
    stop_world()
    return parity


def component_names(config: PlanConfig) -> list[str]:
    """Return the names of the model's components."""
    return [part.name for part in _components(config, config.training("fp32"))]


def _components(config: PlanConfig, training: TrainConfig) -> list[Component]:
    components = models.components(
        config.model, config.classes, config.image_size, config.patch_size
    )
    dtype = DTYPES[training.precision]
    classes = config.classes if training.loss == CROSS_ENTROPY else None
    boundaries(components, config.image_size, classes=classes, dtype=dtype)
    return components


def _overview(
    config: PlanConfig,
    training: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    measured: Costs | None,
) -> Overview:
    names = [part.name for part in components]
    dtype = DTYPES[training.precision]
    costs = component_costs(
        components,
        config.image_size,
        dtype=dtype,
        autocast="cpu" if training.precision in AUTOCAST else None,
    )
    shown = overview(
        plan,
        costs,
        config.batch_size,
        config.optimizer,
        recomputed=recomputed_components(config.recompute, names),
        measured=measured,
        is_synchronised=config.batch_norm == "sync",
    )
    agreement = agreement_of(training)
    if agreement != EXACT:
        shown = replace(shown, remarks=(*shown.remarks, _sent(agreement, shown)))
    _write(config, shown)
    return shown
