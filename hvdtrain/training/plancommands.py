"""The commands that look at a plan: show, simulate and check."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hvdtrain import models, world
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.files import check_target, write_text
from hvdtrain.models.component import Component, boundaries
from hvdtrain.models.costs import component_costs
from hvdtrain.parallel import planfile
from hvdtrain.parallel.actions import to_csv
from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.handover import Handover
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.simulate import Costs
from hvdtrain.parallel.stage import DTYPES, Images
from hvdtrain.parallel.trace import write_trace
from hvdtrain.planner.options import PlanConfig
from hvdtrain.planner.overview import Overview, overview
from hvdtrain.planner.predict import StrategyTable
from hvdtrain.planner.profile import Table, measured_costs, profile_parts
from hvdtrain.training import predictions
from hvdtrain.training.parity import Parity
from hvdtrain.training.parts import build_parts_alone, probe_forms, recomputed_components
from hvdtrain.training.plancheck import MEAN, STD, check_plan
from hvdtrain.training.predictions import Explained
from hvdtrain.training.setup import make_plan

# A hand-over between ranks of one machine; a cluster's own has to be measured on it.
HAND_OVER_SECONDS = 20e-6
SECONDS_A_BYTE = 1 / 4e9


def show(config: PlanConfig) -> Overview | Explained:
    """What a plan means for a model: stages, labels, memory, and a step in counted operations.

    Writes the plan to `config.save` and the step to `config.trace` if they are given.

    Raises:
        UsageError: for whatever a user can get wrong.
    """
    training = _checked(config)
    if config.cluster and not config.explain:
        raise UsageError("plan show --cluster needs --explain; plan simulate takes it alone")
    components = _components(config, training)
    if config.explain:
        return _written(config, predictions.explained(config, training, components))
    plan = make_plan(training, components, config.image_size, config.classes, config.ranks)
    return _finish(config, training, components, plan, None)


def simulate(config: PlanConfig) -> Overview | Explained | StrategyTable:
    """As `show`, with times: what each rank holds is run here, alone, one rank after another.

    Raises:
        UsageError: for whatever a user can get wrong.
    """
    training = _checked(config)
    if config.explain or config.picture:
        raise UsageError("--explain and --picture are for plan show")
    if config.cluster:
        components = _components(config, training)
        if config.plan is None:
            if config.save or config.actions or config.trace:
                raise UsageError("--save, --actions and --trace are of one plan: give --plan")
            return predictions.table(config, training, components)
        return _written(config, predictions.explained(config, training, components))
    here = world.start()
    torch.set_num_threads(here.threads)
    components = _components(config, training)
    plan = make_plan(training, components, config.image_size, config.classes, config.ranks)
    return _finish(
        config, training, components, plan, _measure(config, training, components, plan)
    )


def _written(config: PlanConfig, found: Explained) -> Explained:
    """The same, after what is asked for as files."""
    shown = found.candidate.overview
    if config.save:
        planfile.save(shown.plan, Path(config.save))
    if config.actions:
        write_text(Path(config.actions), to_csv(shown.schedule), "the actions")
    if config.trace:
        write_trace(Path(config.trace), shown.timeline.events, shown.unit)
    return found


def _checked(config: PlanConfig) -> TrainConfig:
    for name in ("trace", "save", "actions", "picture"):
        if (path := getattr(config, name)) is not None:
            check_target(path, f"--{name}")
    return config.training("fp32")


def _measure(
    config: PlanConfig, training: TrainConfig, components: Sequence[Component], plan: Plan
) -> Costs:
    pieces, device = cut(plan, config.batch_size), torch.device("cpu")
    images = Images(MEAN, STD, device, training.precision)
    alone = world.World("none", 0, 1, 0, 1, 1)
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
            handover = Handover(rank, forms, None, device)
            runtime = Runtime(rank, parts, plan.last, images, handover, training.precision)
            alike[work] = profile_parts(runtime, plan, pieces, config.image_size)
        tables[rank] = alike[work]
    return measured_costs(plan, pieces, forms, tables, HAND_OVER_SECONDS, SECONDS_A_BYTE)


def check(config: PlanConfig) -> Parity:
    """Steps under the plan and serial steps, from the same weights and batches. Collective.

    Raises:
        UsageError: for whatever a user can get wrong.
    """
    training = config.training("fp64")
    if any(path is not None for path in (config.trace, config.save, config.actions)):
        raise UsageError("plan check writes no --trace, --save or --actions: plan show does")
    if config.cluster or config.explain or config.picture:
        raise UsageError("--cluster, --explain and --picture are for plan show and plan simulate")
    here = world.start()
    if here.size != config.ranks:
        raise UsageError(
            f"--ranks {config.ranks}, but the launcher started {here.size}: give that number"
        )
    torch.set_num_threads(here.threads)
    components = _components(config, training)
    plan = make_plan(training, components, config.image_size, config.classes, here.size)
    parity = check_plan(training, components, plan, config.image_size, config.classes, here)
    world.stop()
    return parity


def parity_as_json(parity: Parity, components: Sequence[str]) -> dict[str, Any]:
    """What `plan check --json` prints."""
    return {
        "within_tolerance": parity.is_within,
        "tolerance": parity.tolerance,
        "largest": parity.largest,
        "components": parity.by_component(components),
        "updates": parity.update,
        "statistics": parity.statistics,
        "loss": parity.loss,
    }


def parity_as_text(parity: Parity, components: Sequence[str]) -> str:
    """What `plan check` prints."""
    errors = parity.by_component(components)
    width = max(len(name) for name in (*errors, "running statistics"))
    lines = [f"{'component':<{width}}  largest relative error of a gradient"]
    lines += [f"{name:<{width}}  {error:.2e}" for name, error in errors.items()]
    lines += [f"{'updates':<{width}}  {parity.update:.2e}"]
    lines += [f"{'running statistics':<{width}}  {parity.statistics:.2e}"]
    lines += [f"{'loss':<{width}}  {parity.loss:.2e}"]
    verdict = "within" if parity.is_within else "NOT within"
    lines.append(f"{verdict} the tolerance of {parity.tolerance:g}, in {parity.steps} steps")
    lines += [parity.fault] if parity.fault else []
    return "\n".join(lines)


def component_names(config: PlanConfig) -> list[str]:
    """The names of the model's components."""
    return [part.name for part in _components(config, config.training("fp32"))]


def _components(config: PlanConfig, training: TrainConfig) -> list[Component]:
    components = models.components(
        config.model, config.classes, config.image_size, config.patch_size
    )
    dtype = DTYPES[training.precision]
    boundaries(components, config.image_size, classes=config.classes, dtype=dtype)
    return components


def _finish(
    config: PlanConfig,
    training: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    measured: Costs | None,
) -> Overview:
    names = [part.name for part in components]
    dtype = DTYPES[training.precision]
    costs = component_costs(
        *(components, config.image_size),
        classes=config.classes,
        dtype=dtype,
        autocast="cpu" if training.precision == "bf16" else None,
    )
    found = overview(
        *(plan, costs, config.batch_size, config.optimizer),
        recomputed_components(config.recompute, names),
        measured,
        plan.replicated_stages if config.batch_norm == "sync" else (),
    )
    if config.save:
        planfile.save(plan, Path(config.save))
    if config.actions:
        write_text(Path(config.actions), to_csv(found.schedule), "the actions")
    if config.trace:
        write_trace(Path(config.trace), found.timeline.events, found.unit)
    return found
