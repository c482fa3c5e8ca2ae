"""Building everything that a rank needs for its first step from a configuration."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hvdtrain import device as devices
from hvdtrain import models
from hvdtrain.backends.pytorch.agreement import agreement_remarks
from hvdtrain.backends.pytorch.build import (
    agree_on_values,
    build_runtime,
    check_batches,
    input_boundaries,
)
from hvdtrain.backends.pytorch.parts import check_compiler
from hvdtrain.backends.pytorch.session import (
    Times,
    TorchFaults,
    TorchMigration,
    TorchSession,
    TorchTimeline,
)
from hvdtrain.backends.pytorch.state import TorchState, check_savable
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.images import centre
from hvdtrain.data.index import Index, InputSize
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import Samples, open_split
from hvdtrain.device import choose_algorithms, choose_device, forget_peak
from hvdtrain.engine.feed import (
    Normalisation,
    check_images,
    check_started,
    normalisation,
    open_splits,
    staged,
)
from hvdtrain.engine.folders import as_modelled, shared_index
from hvdtrain.engine.machine import machine_of
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.host.files import check_target
from hvdtrain.host.launchers import needs_mpi
from hvdtrain.models.component import (
    Component,
    build_started,
    freeze,
    start_of,
    tensor_shapes,
)
from hvdtrain.models.costs import Boundary, component_costs
from hvdtrain.options.requests import Chosen, Server
from hvdtrain.options.sections import AUGMENTATIONS, AUTO_PRECISION
from hvdtrain.parallel.stage import AUTOCAST, Images, Resident
from hvdtrain.plan import plan as plans
from hvdtrain.plan.plan import Plan, parse_plan, reason_against_split_backward
from hvdtrain.precision import bf16_speedups, comparison, speedup
from hvdtrain.sync import collectives
from hvdtrain.world import World, allow_new_groups

if TYPE_CHECKING:
    from hvdtrain.planner.choose import Choice


@dataclass(frozen=True)
class Trial:
    """The model, data and settings that a run will train with."""

    config: TrainConfig
    components: Sequence[Component]
    index: Index
    splits: Mapping[str, Samples]
    rows: Rows
    normalisation: Normalisation
    images: Images
    world: World


def _ignore(phase: str) -> None:
    """Mark nothing."""


# The most images that components start from, and their most bytes as floats.
STARTING_IMAGES, STARTING_BYTES = 5000, 2**28


@dataclass(frozen=True)
class Checks:
    """Comparisons of a plan with one rank, see `hvdtrain.check.plan`. Collective.

    Attributes:
        verify: returns the result in words, or raises CheckFailed.
        fault: returns what differs, or an empty text.
    """

    verify: Callable[[Trial, Plan], str]
    fault: Callable[[Trial, Plan], str]


def open_session(
    config: TrainConfig, world: World, checks: Checks, mark: Callable[[str], None] = _ignore
) -> TorchSession:
    """Check everything that can be checked before the first step, then build it. Collective.

    Args:
        mark: called with the name of each phase at its end.

    Raises:
        UsageError, DataError: if the options or the data are invalid.
    """
    check_started(config, world)
    torch.set_num_threads(world.threads)
    config, precision = chosen_precision(config, world)
    index = staged(shared_index(config, world), config.stage, world)
    modelled = as_modelled(index, config)
    components = model_components(config, modelled)
    agree_on_values(components, world)
    if config.emulate is not None:
        config, components, world = _emulated(config, components, modelled, world)
    train_rows, held_rows = order.holdout(
        index.splits["train"].count, config.holdout, index.hash, config.seed
    )
    normal = normalisation(config.normalise, index, train_rows, world)
    components = _started(config, components, index, train_rows, normal, world)
    mark("data")
    plan: Plan | None = None
    if world.rank == 0:  # the others do not load what the checks need
        boundaries = check_components(components, config, index)
        if isinstance(config.plan_request, Chosen):
            check_choice(config, components)
        else:
            plan = make_plan(config, components, index.input_size, world.size)
            check_batches(config, plan, components, boundaries, len(train_rows))
        if config.trace is not None:
            check_target(config.trace, "--trace")
    plan = world.broadcast(plan)
    check_connection(config, plan, world)
    device = choose_device(config.device, world)
    choose_algorithms(config.precision, config.deterministic)
    if config.compile:
        check_compiler(device)
    images, chosen = Images(*normal, device, config.precision), None
    if plan is None:
        chosen = _choose(config, components, index, images, len(train_rows), world)
        plan = chosen.plan
    mark("plan")
    splits = _opened(config, plan, index, images, world)
    trial = Trial(config, components, index, splits, train_rows, normal, images, world)
    if chosen is not None:
        chosen = _without_wrong_halves(trial, chosen, checks)
        plan = chosen.plan
    mark("data")
    verified = checks.verify(trial, plan) if config.verify else ""
    mark("verify")
    forget_peak(images.device)  # of the planner and the verification
    session = _built(trial, plan, chosen, held_rows, verified)
    session.remarks = (*filter(None, [precision]), *session.remarks)
    check_savable(session.state.parts, config)
    mark("model")
    return session


def check_connection(config: TrainConfig, plan: Plan | None, world: World) -> None:
    """Refuse what needs MPI on ranks that torchrun started.

    Args:
        plan: None if it is still to be chosen, from measurements.

    Raises:
        UsageError: naming it.
    """
    if world.has_mpi:
        return
    stages = 0 if plan is None else len(plan.stages)
    uses = {
        f"--plan {config.plan}": plan is None,
        f"--plan {config.plan}, which has {stages} stages,": stages > 1,
        f"--sync {config.sync}": isinstance(config.sync_request, Server),
        f"--emulate {config.emulate}": config.emulate is not None,
        f"--reduce-with {config.reduce_with}": config.reduce_with not in (None, "torch"),
    }
    if what := next((what for what, is_used in uses.items() if is_used), None):
        raise needs_mpi(what, world.size)


def _started(
    config: TrainConfig,
    components: list[Component],
    index: Index,
    rows: Rows,
    normal: Normalisation,
    world: World,
) -> list[Component]:
    """Return the components with what some of them start with, from images. Collective.

    Raises:
        UsageError: if a component's function fails, or returns something else.
    """
    starting = [part for part in components if part.start is not None]
    if not starting or machine_of(world).is_modelled:
        return components
    values: dict[str, dict[str, Tensor]] | HvdtrainError = {}
    if world.rank == 0:
        try:
            with open_split(index, "train") as samples:
                # In a random order of the file, so that classes that lie together all count.
                chosen = np.random.default_rng(config.seed).permutation(rows)
                count = min(STARTING_IMAGES, max(1, STARTING_BYTES // (4 * index.image_bytes)))
                stored = samples.gather(np.sort(chosen[:count])).images
            images = Images(*normal, torch.device("cpu"), "fp32")(stored)
            values = {part.name: start_of(part, images) for part in starting}
        except HvdtrainError as error:
            values = error
    values = world.broadcast(values)
    if isinstance(values, HvdtrainError):
        raise values
    return [
        replace(part, build=partial(build_started, part, values[part.name]))
        if part.name in values
        else part
        for part in components
    ]


def _emulated(
    config: TrainConfig, components: list[Component], index: Index, world: World
) -> tuple[TrainConfig, list[Component], World]:
    """Return what the run of an emulated machine has in place of these. Collective."""
    from hvdtrain.emulate import emulate  # loads the planner

    def plan_of(parts: Sequence[Component]) -> Plan:
        return make_plan(config, parts, index.input_size, world.size)

    return emulate(config, components, index, world, plan_of)


def _opened(
    config: TrainConfig, plan: Plan, index: Index, images: Images, world: World
) -> dict[str, Samples]:
    """Return the splits by name, opened by ranks that read them; move images to the device.

    Collective.
    """
    stages = set(plan.stages_of(world.rank))
    at_an_end = not stages.isdisjoint({0, plan.last})
    splits = open_splits(index, world, at_an_end or config.is_adaptive)
    if 0 in stages and not machine_of(world).is_modelled:
        images.resident = resident_images(config, splits["train"], images.device, world.local_size)
    return splits


def _built(
    trial: Trial, plan: Plan, chosen: "Choice | None", held_rows: Rows, verified: str
) -> TorchSession:
    """Return the session of a plan. Collective."""
    config, components, index, world = trial.config, trial.components, trial.index, trial.world
    started = time.perf_counter()
    runtime = build_runtime(config, plan, components, trial.images, index.input_size, world)
    assert runtime.observer.activity is not None
    state = TorchState(
        plan=plan,
        shapes=tensor_shapes(components),
        runtime=runtime,
        config=config,
        world=world,
    )
    times, faults, machine = Times(state), TorchFaults(state), machine_of(world)
    activity = runtime.observer.activity
    device = machine.device(trial.images.device, world, activity, lambda: state.plan)
    predicted = chosen.predicted_seconds if chosen else None  # real ones
    return TorchSession(
        config=config,
        world=world,
        activity=activity,
        device=device,
        state=state,
        times=times,
        faults=faults,
        parameters=machine.parameters(components),
        index=index,
        normalisation=trial.normalisation,
        train_rows=trial.rows,
        held_rows=held_rows,
        splits=trial.splits,
        is_resident=trial.images.resident is not None,
        remarks=remarks_of(trial, plan, chosen, verified),
        predicted_seconds=None if predicted is None else device.seconds(predicted),
        predicted_bytes=chosen.predicted_bytes if chosen else None,
        migration=TorchMigration(
            question=chosen.question if chosen else None,
            building_seconds=time.perf_counter() - started,
            state=state,
            times=times,
            faults=faults,
            components=components,
            index=index,
            epoch_length=len(trial.rows),
        ),
        timeline=TorchTimeline(state, activity),
    )


def _choose(
    config: TrainConfig,
    components: Sequence[Component],
    index: Index,
    images: Images,
    epoch_length: int,
    world: World,
) -> "Choice":
    """Measure, and return the plan with the best prediction. Collective.

    Raises:
        UsageError: if no plan fits, or --plan adaptive is not possible.
    """
    from hvdtrain.backends.pytorch.measured import subject_of  # not needed for other plans
    from hvdtrain.planner import choose

    if config.is_adaptive:
        allow_new_groups()
    subject = subject_of(config, components, index.input_size, index.target_form, images)
    chosen = choose.choose_plan(subject, world)
    if world.rank == 0:
        boundaries = check_components(components, config, index)
        check_batches(config, chosen.plan, components, boundaries, epoch_length)
    return chosen


def _without_wrong_halves(trial: Trial, chosen: "Choice", checks: Checks) -> "Choice":
    """Drop a split backward that was not requested, if its results are wrong. Collective.

    A run with --plan adaptive replans to a split backward only if it started with one.
    """
    from hvdtrain.planner import choose

    config, plan = trial.config, chosen.plan
    if config.schedule is not None:
        return chosen
    if not plan.splits_backward:
        return choose.without_split_backward(chosen) if config.is_adaptive else chosen
    fault = checks.fault(trial, plan)
    if not fault:
        return chosen
    return choose.without_split_backward(chosen, f"zb-h1 is not used, because {fault}: using 1f1b")


def make_plan(
    config: TrainConfig, components: Sequence[Component], image_size: InputSize, ranks: int
) -> Plan:
    """Return the plan of a run, checked against model and ranks.

    Args:
        ranks: the world size, with servers.

    Raises:
        UsageError: if it does not fit, or the runtime cannot run it.
    """
    names, workers = [part.name for part in components], config.workers_of(ranks)

    def costs() -> list[float]:
        component_flops = component_costs(components, image_size)
        return [cost.forward_flops for cost in component_flops]

    plan = parse_plan(config.plan, names, workers, config.microbatches, config.schedule, costs)
    plans.check(plan, names, workers, lambda: reason_against_split_backward(config, names))
    if workers < ranks and len(plan.stages) > 1:
        raise UsageError(
            f"--sync {config.sync} needs a plan of one stage, and {config.plan} has "
            f"{len(plan.stages)}: use --plan dp"
        )
    return plan


def check_choice(config: TrainConfig, components: Sequence[Component]) -> None:
    """Refuse options that no automatically chosen plan can run with.

    Raises:
        UsageError: with the reason.
    """
    reason = reason_against_split_backward(config, [part.name for part in components])
    if config.schedule == "zb-h1" and reason:
        raise UsageError(f"zb-h1 splits the backward, which {reason} does not allow: use 1f1b")


def model_components(config: TrainConfig, index: Index) -> list[Component]:
    """Return the components of the run's model.

    Raises:
        UsageError: if the model does not accept images of the data set's size.
    """
    check_images(config, index)
    height = index.input_size
    parts = models.components(config.model, index.classes, height, config.patch_size, config.seed)
    return parts if config.freeze is None else freeze(parts, config.freeze)


def check_components(
    components: Sequence[Component], config: TrainConfig, index: Index
) -> list[Boundary]:
    """Return the input of each component, inferred without computing anything.

    Raises:
        UsageError: if images or targets of the data set do not fit the model and its loss.
    """
    return input_boundaries(components, config, index.input_size, index.target_form)


if TYPE_CHECKING:
    from hvdtrain.planner.choose import Choice

# PyTorch computes without oneDNN where a processor lacks AVX-512: bf16 is 20 to 60x slower.
SLOW = 3.0  # ratio of the times of bf16 and fp32 from which on a line says so
WIDTH = 96  # of the matrices, small enough for one thread: others may wait for a core


def remarks_of(
    trial: Trial, plan: Plan, chosen: "Choice | None", verified: str
) -> tuple[str, ...]:
    """Return what a user should know of the session before it trains. Collective."""
    config, world = trial.config, trial.world
    has_sums = not isinstance(config.sync_request, Server)
    sums = collectives.remarks(config.reduce_with, world, trial.images.device) if has_sums else []
    machine = machine_of(world)
    choice = (*machine.remarks(plan, chosen is not None), *(chosen.remarks if chosen else ()))
    slow = ""
    if world.rank == 0 and not machine.is_modelled:
        slow = precision_remark(config.precision, trial.images.device)
    return (*sums, *agreement_remarks(config, plan), *choice, *filter(None, [verified, slow]))


def precision_remark(precision: str, device: torch.device) -> str:
    """Return a line if bf16 or fp16 is much slower than fp32 on this processor, else nothing."""
    if precision not in AUTOCAST or devices.is_gpu(device):
        return ""
    # Processor time of this thread: others may be busy on its core.
    factors = [
        torch.ones(2, WIDTH, WIDTH, dtype=dtype) for dtype in (torch.float32, AUTOCAST[precision])
    ]
    ratio = 1 / speedup(lambda is_half: torch.matmul(*factors[is_half]), time.thread_time)
    if ratio < SLOW:
        return ""
    return (
        f"{precision} takes {ratio:.0f}x the time of fp32 for a product of matrices on this "
        "processor: --precision fp32 is faster here"
    )


def chosen_precision(config: TrainConfig, world: World) -> tuple[TrainConfig, str]:
    """Return the configuration with what rank 0 measures to be faster, and a line. Collective.

    Nothing is measured, and the line is empty, unless the precision is "auto".
    """
    if config.precision != AUTO_PRECISION:
        return config, ""
    device, chosen = devices.choose_device(config.device, world), None
    if world.rank == 0:
        torch.set_num_threads(1)  # waiting threads would use processor time
        faster, words = comparison(bf16_speedups(device, 1))
        torch.set_num_threads(world.threads)
        chosen = faster or "fp32", words
    precision, words = world.broadcast(chosen)
    line = f"--precision {AUTO_PRECISION}: {precision}, since {words}"
    return replace(config, precision=precision), line


MOST_MEMORY = 0.1  # of the free memory of a GPU


def resident_images(
    config: TrainConfig, samples: Samples, device: torch.device, ranks: int
) -> Resident | None:
    """Return the images of a split on the device, as --resident says.

    Args:
        ranks: of this host.

    Raises:
        UsageError: if they should always be there, and cannot.
    """
    if config.resident == "never":
        return None
    index, is_auto = samples.index, config.resident == "auto"
    fault = ""
    if config.augment not in AUGMENTATIONS:
        fault = f"--augment {config.augment} makes images on the host"
    elif index.resize is not None or config.augment == "resized-crop-flip":
        fault = "images that are scaled are made on the host"
    elif not samples.in_memory:
        fault = "the training images do not fit into the memory of the host"
    if fault and not is_auto:
        raise UsageError(f"--resident always: {fault}: leave it out")
    if fault or (is_auto and not _fits(config, samples, device, ranks)):
        return None
    whole = samples.whole()
    assert whole is not None
    stored = whole.images
    if index.packed_shape is not None:
        stored = np.ascontiguousarray(centre(stored, index.image_shape[0]))
    try:
        images = torch.from_numpy(stored).to(device)
    except torch.OutOfMemoryError:  # another process has taken what was free
        if is_auto:
            return None
        raise UsageError(
            f"--resident always: the images need {stored.nbytes:,} bytes of {device}, which has "
            "fewer free: leave it out"
        ) from None
    return Resident(images)


def _fits(config: TrainConfig, samples: Samples, device: torch.device, ranks: int) -> bool:
    """Return whether a GPU has enough memory for the images besides all else.

    The limit of --plan does not count them.
    """
    if not devices.is_gpu(device) or config.memory_gib is not None:
        return False
    sharing = -(-ranks // devices.gpu_count())
    free = devices.free_bytes(device, ranks) / sharing
    return samples.split.count * samples.index.image_bytes <= MOST_MEMORY * free
