"""The commands `plan show`, `plan simulate` and `plan check`, and the predictions they print."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hvdtrain import models
from hvdtrain.backends.pytorch.measured import subject_of
from hvdtrain.backends.pytorch.setup import make_plan
from hvdtrain.check.parity import Parity
from hvdtrain.check.plan import MEAN, STD, check_plan, target_form
from hvdtrain.config import TrainConfig
from hvdtrain.device import choose_device
from hvdtrain.errors import UsageError
from hvdtrain.host.files import check_target, write_text
from hvdtrain.models.component import Component
from hvdtrain.models.costs import boundaries
from hvdtrain.options.requests import Chosen, Server
from hvdtrain.options.sections import smoothing_of
from hvdtrain.parallel.stage import DTYPES, Images
from hvdtrain.plan.cut import to_csv
from hvdtrain.plan.plan import save_plan
from hvdtrain.plan.trace import write_trace
from hvdtrain.planner import clusters
from hvdtrain.planner.agreement import (
    EXACT,
    NONE,
    Agreement,
    agreement_of,
    rank_bytes,
    size,
)
from hvdtrain.planner.assign import STEP, assigned_plans
from hvdtrain.planner.candidate import Candidate, counted, play
from hvdtrain.planner.choose import predicted_question, question
from hvdtrain.planner.clusters import Cluster, ClusterNetwork
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.describe import Description, describe, explain
from hvdtrain.planner.measure import Subject, local_times
from hvdtrain.planner.options import PlanConfig
from hvdtrain.planner.profile import Profile
from hvdtrain.planner.solve import solve
from hvdtrain.planner.strategies import PREDICTED, describe_columns
from hvdtrain.world import start as start_world
from hvdtrain.world import stop as stop_world

# Assumed network between ranks of one machine; `train --plan auto` measures it.
SHARED_MEMORY = Cluster(
    ranks=1,
    ranks_per_node=1,
    gflops=1.0,
    memory_gbytes=1.0,
    memory_gib=1.0,
    latency_microseconds=20.0,
    gbytes=4.0,
)


def show(config: PlanConfig) -> Description:
    """Describe the stages, labels and memory of a plan, and a step timed by counted operations.

    With --explain the step is predicted from measured times, and compared with the best plan.
    Writes the plan to `config.save` and the step to `config.trace` if they are set.

    Raises:
        UsageError: for any mistake of the user.
    """
    training = _checked(config)
    if config.cluster and not config.explain:
        raise UsageError(
            "plan show --cluster needs --explain: add --explain, or use plan simulate"
        )
    components = _components(config, training)
    if config.explain:
        return _explained(config, training, components)
    plan = make_plan(training, components, config.image_size, config.ranks)
    subject = _subject(config, training, components)
    candidate = counted(
        plan,
        subject.costs,
        config.batch_size,
        config.optimizer,
        recomputed=subject.recomputed,
        is_synchronised=config.batch_norm == "sync",
    )
    if (agreement := agreement_of(training)) != EXACT:
        candidate = replace(candidate, remarks=(*candidate.remarks, _sent(agreement, candidate)))
    _write(config, candidate)
    return describe(candidate)


def simulate(config: PlanConfig) -> Description:
    """Describe what `show --explain` does; with a cluster and no plan, paper B's five strategies.

    Raises:
        UsageError: for any mistake of the user.
    """
    training = _checked(config)
    if config.explain or config.picture:
        raise UsageError("plan simulate has no --explain and no --picture: use plan show")
    components = _components(config, training)
    if config.plan is not None or not config.cluster:
        return _explained(config, training, components)
    if config.save or config.actions or config.trace:
        raise UsageError("--save, --actions and --trace need one plan: give --plan")
    cluster = clusters.load(config.cluster, config.ranks)
    return describe_columns(config.model, cluster, _question(config, training, components))


def _explained(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> Description:
    """Describe the requested or the chosen plan by component, and write the requested files.

    Raises:
        UsageError: if the plan does not fit, or none does.
    """
    question = _question(config, training, components)
    if isinstance(training.plan_request, Chosen) and not training.is_adaptive:
        if config.objective == STEP:
            solution = solve(question)
            candidate, reasons = solution.chosen, solution.reasons()
        else:
            plan = next(assigned_plans(question, 1, 1, config.objective), None)
            if plan is None:
                raise UsageError(f"no plan that minimises {config.objective} fits into memory")
            candidate = play(question, plan, config.objective)
            reasons = [_against_the_best(question, candidate)]
    else:
        plan = make_plan(training, components, config.image_size, config.ranks)
        candidate = play(question, plan, config.plan or "dp")
        reasons = [_against_the_best(question, candidate)]
    if question.known.agreement != EXACT:
        reasons.append(_sent(question.known.agreement, candidate))
    _write(config, candidate)
    remark = PREDICTED if config.cluster else "All ranks are assumed to be as fast as this one."
    return explain(question, candidate, reasons, remark)


def _sent(agreement: Agreement, candidate: Candidate) -> str:
    """Return the bytes that the ranks of a plan send to agree, in words."""
    sent = rank_bytes(agreement, candidate.plan, candidate.costs)
    return f"To agree, a rank sends up to {size(max(sent))} per step."


def _against_the_best(question: Question, candidate: Candidate) -> str:
    try:
        best = solve(question).chosen
    except UsageError as error:
        return f"--plan auto would not find a plan: {error}"
    if best.plan == candidate.plan:
        return "--plan auto would choose the same plan"
    part = candidate.seconds / best.seconds - 1
    return (
        f"--plan auto would choose {best.name}, {1e3 * best.seconds:.2f} ms per step: this plan "
        f"is {abs(part):.1%} {'slower' if part > 0 else 'faster'}"
    )


def _question(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> Question:
    training = replace(training, plan="auto")  # with every schedule, to compare a given plan with
    subject = _subject(config, training, components)
    if config.cluster:
        return predicted_question(subject, config.cluster, config.ranks)
    world = start_world()
    torch.set_num_threads(world.threads)
    profile = Profile.alike(local_times(subject, world, replicas=config.ranks), config.ranks)
    machine = replace(SHARED_MEMORY, ranks=config.ranks, ranks_per_node=config.ranks)
    known = Known(subject.costs, profile, ClusterNetwork(machine), subject.recomputed)
    return question(training, known, config.ranks)


def _subject(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component]
) -> Subject:
    images = Images(MEAN, STD, torch.device("cpu"), training.precision)
    form = target_form(training, components, config.image_size, config.classes)
    return subject_of(training, components, config.image_size, form, images)


def _write(config: PlanConfig, candidate: Candidate) -> None:
    """Write the requested files."""
    if config.save:
        save_plan(candidate.plan, Path(config.save))
    if config.actions:
        write_text(Path(config.actions), to_csv(candidate.schedule), "the actions")
    if config.trace:
        write_trace(Path(config.trace), candidate.timeline.events, candidate.unit)


def _checked(config: PlanConfig) -> TrainConfig:
    for name in ("trace", "save", "actions", "picture"):
        if (path := getattr(config, name)) is not None:
            check_target(path, f"--{name}")
    training = config.training("fp32")
    if isinstance(training.sync_request, Server):
        raise UsageError(
            f"plan show and plan simulate predict no servers: leave --sync {config.sync} out"
        )
    if config.objective != STEP and not (config.explain and config.plan == "auto"):
        raise UsageError(f"--objective {config.objective} needs --plan auto and --explain")
    return training


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
    if config.objective != STEP:
        raise UsageError("plan check has no --objective: use plan show --explain --save")
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
    classes = None if smoothing_of(training.loss) is None else config.classes
    boundaries(components, config.image_size, classes=classes, dtype=dtype)
    return components
