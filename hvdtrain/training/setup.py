"""From a configuration to everything that a rank needs to run its first step."""

import time
from collections.abc import Sequence

import torch

from hvdtrain import models, world
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import Index, read_index
from hvdtrain.errors import UsageError
from hvdtrain.files import check_target
from hvdtrain.models.component import Boundary, Component, parameter_count, tensor_shapes
from hvdtrain.models.costs import component_costs
from hvdtrain.parallel import plan as plans
from hvdtrain.parallel import planfile
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.stage import Images
from hvdtrain.ranges import CHOSEN_PLANS
from hvdtrain.training import tensors
from hvdtrain.training.batches import check_batches, given_to
from hvdtrain.training.build import build_runtime
from hvdtrain.training.feed import open_splits
from hvdtrain.training.normalise import Normalisation, normalisation
from hvdtrain.training.parts import check_compiler, what_forbids_halves
from hvdtrain.training.precheck import check_images, check_started
from hvdtrain.training.pytorch import TorchSession
from hvdtrain.training.session import Chosen
from hvdtrain.training.staging import staged
from hvdtrain.training.verify import Trial, verify
from hvdtrain.world import World


def open_session(config: TrainConfig, here: World) -> TorchSession:
    """Check everything that can be checked before the first step, then build it. Collective.

    Raises:
        UsageError, DataError: for whatever a user can get wrong.
    """
    check_started(config, here)
    index = staged(read_index(config.data), config.stage, here)
    components = model_components(config, index)
    train_rows, held_rows = order.holdout(
        index.splits["train"].count, config.holdout, index.hash, config.seed
    )
    plan = _agreed_plan(config, components, index, len(train_rows), here)
    normal = normalisation(config.normalise, index, train_rows, here)
    images = _images(config, normal, here)
    chosen = None if plan else _choose(config, components, index, images, len(train_rows), here)
    plan = chosen.plan if chosen else plan
    assert plan is not None
    at_an_end = {0, plan.last} & set(plan.stages_of(here.rank)) != set()
    splits = open_splits(index, here, at_an_end or config.plan == "adaptive")
    trial = Trial(config, components, index, splits, train_rows, normal, images, here)
    if chosen is not None:
        chosen = _without_wrong_halves(trial, chosen)
        plan = chosen.plan
    verified = verify(trial, plan) if config.verify else ""
    session = _built(trial, plan, chosen, held_rows, verified)
    tensors.check(session.tensors())
    return session


def _built(
    trial: Trial, plan: Plan, chosen: Chosen | None, held_rows: Rows, verified: str
) -> TorchSession:
    """The session of a plan that is decided on. Collective."""
    config, components, index, here = trial.config, trial.components, trial.index, trial.here
    began = time.perf_counter()
    runtime = build_runtime(config, plan, components, trial.images, index.image_shape[0], here)
    assert runtime.activity is not None
    return TorchSession(
        config=config,
        world=here,
        index=index,
        plan=plan,
        shapes=tensor_shapes(components),
        parameters=parameter_count(components),
        runtime=runtime,
        components=components,
        chosen=chosen,
        verified=verified,
        build_seconds=time.perf_counter() - began,
        activity=runtime.activity,
        normalisation=trial.normalisation,
        train_rows=trial.rows,
        held_rows=held_rows,
        splits=trial.splits,
    )


def _choose(
    config: TrainConfig,
    components: Sequence[Component],
    index: Index,
    images: Images,
    epoch_length: int,
    here: World,
) -> Chosen:
    """The plan that is best by what is measured here. Collective.

    Raises:
        UsageError: if nothing fits, or adaptive is asked for where it cannot be.
    """
    from hvdtrain.training import planning  # of no use to other plans

    if config.plan == "adaptive":
        _check_adaptive(images.device)
        world.allow_new_groups()
    size, classes = index.image_shape[0], index.classes
    subject = planning.subject_of(config, components, size, classes, images)
    chosen = planning.choose_plan(subject, here)
    if here.rank == 0:
        given = check_components(components, config, index)
        check_batches(config, chosen.plan, components, given, epoch_length)
    return chosen


def _without_wrong_halves(trial: Trial, chosen: Chosen) -> Chosen:
    """Take a backward in halves, which nobody has asked for, only where it is right. Collective.

    A plan of --plan adaptive changes to one later only if it began with one.
    """
    from hvdtrain.training import planning

    config, plan = trial.config, chosen.plan
    if config.schedule is not None:
        return chosen
    if not plan.splits_backward:
        return planning.without_halves(chosen) if config.plan == "adaptive" else chosen
    fault = trial.parity(plan).fault
    if not fault:
        return chosen
    return planning.without_halves(chosen, f"zb-h1 is left out, because {fault}: 1f1b instead")


def _images(config: TrainConfig, normal: Normalisation, here: World) -> Images:
    """What makes images ready, on the device of this rank, whose threads it sets."""
    device = choose_device(config, here)
    torch.set_num_threads(here.threads)
    if config.compile:
        check_compiler(device)
    return Images(*normal, device, config.precision)


def _agreed_plan(
    config: TrainConfig,
    components: Sequence[Component],
    index: Index,
    epoch_length: int,
    here: World,
) -> Plan | None:
    """The plan that is asked for, after rank 0's checks; None if it is to be chosen. Collective.

    What these checks load, the other ranks need not load.

    Raises:
        UsageError: if model and images, or model, plan and ranks do not fit.
    """
    plan = None
    if here.rank == 0:
        given = check_components(components, config, index)
        if config.plan in CHOSEN_PLANS:
            check_choice(config, components)
        else:
            plan = make_plan(config, components, index.image_shape[0], index.classes, here.size)
            check_batches(config, plan, components, given, epoch_length)
        if config.trace is not None:
            check_target(config.trace, "--trace")
    agreed: Plan | None = here.broadcast(plan)
    return agreed


def make_plan(
    config: TrainConfig,
    components: Sequence[Component],
    image_size: int,
    classes: int,
    ranks: int,
) -> Plan:
    """The plan of a run, checked against model and ranks.

    Raises:
        UsageError: if it does not fit, or the runtime cannot run it.
    """
    names = [part.name for part in components]

    def costs() -> list[float]:
        found = component_costs(components, image_size, classes=classes)
        return [cost.forward_flops for cost in found]

    plan = planfile.parse(config.plan, names, ranks, config.microbatches, config.schedule, costs)
    plans.check(plan, names, ranks, lambda: what_forbids_halves(config, names))
    return plan


def check_choice(config: TrainConfig, components: Sequence[Component]) -> None:
    """Refuse what no plan that is chosen could be run with.

    Raises:
        UsageError: with the reason.
    """
    reason = what_forbids_halves(config, [part.name for part in components])
    if config.schedule == "zb-h1" and reason:
        raise UsageError(f"zb-h1 splits the backward, which {reason} does not allow: use 1f1b")


def _check_adaptive(device: torch.device) -> None:
    """Raise UsageError where a rank's own time is not what its clock shows."""
    if device.type == "cuda":
        raise UsageError(
            "--plan adaptive follows what ranks take by the clock of their host, which a GPU runs "
            "ahead of: use --plan auto there"
        )


def model_components(config: TrainConfig, index: Index) -> list[Component]:
    """The components of the run's model.

    Raises:
        UsageError: if the model cannot have images of the data set's size.
    """
    check_images(config, index)
    height = index.image_shape[0]
    return models.components(config.model, index.classes, height, config.patch_size)


def check_components(
    components: Sequence[Component], config: TrainConfig, index: Index
) -> list[Boundary]:
    """Hand images of the data set's size through, without computing anything.

    Returns what each component is given.

    Raises:
        UsageError: if images or classes of the data set are not those of the model.
    """
    return given_to(components, config, index.image_shape[0], index.classes)


def choose_device(config: TrainConfig, here: World) -> torch.device:
    """The CPU, or the GPU of this rank: local rank modulo visible devices.

    Raises:
        UsageError: if cuda is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UsageError("--device cuda, but PyTorch sees no GPU here: use --device cpu")
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", here.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
