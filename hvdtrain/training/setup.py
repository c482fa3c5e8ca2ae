"""From a configuration to everything that a rank needs to run its first step."""

import time
from collections.abc import Sequence

import torch

from hvdtrain import models, world
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.shards import Index, read_index
from hvdtrain.errors import UsageError
from hvdtrain.files import check_target
from hvdtrain.models.component import Component, boundaries, parameter_count, tensor_shapes
from hvdtrain.models.costs import component_costs
from hvdtrain.parallel import plan as plans
from hvdtrain.parallel import planfile, schedule
from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.stage import DTYPES, Images
from hvdtrain.parallel.validate import validate
from hvdtrain.ranges import CHOSEN_PLANS
from hvdtrain.training import tensors
from hvdtrain.training.build import build_runtime
from hvdtrain.training.feed import open_splits
from hvdtrain.training.parts import check_compiler, what_forbids_halves
from hvdtrain.training.precheck import check_images, check_started
from hvdtrain.training.pytorch import TorchSession
from hvdtrain.training.session import Chosen
from hvdtrain.training.staging import staged
from hvdtrain.world import World


def open_session(config: TrainConfig, here: World) -> TorchSession:
    """Check everything that can be checked before the first step, then build it. Collective.

    Raises:
        UsageError, DataError: for whatever a user can get wrong.
    """
    check_started(config, here)
    index = staged(read_index(config.data), config.stage, here)
    components = model_components(config, index)
    is_chosen = config.plan in CHOSEN_PLANS
    check = _check_without_plan if is_chosen else _checked_plan
    checked = check(config, components, index, here.size) if here.rank == 0 else None
    plan = here.broadcast(checked)
    train_rows, held_rows = order.holdout(
        index.splits["train"].count, config.holdout, index.hash, config.seed
    )
    device = choose_device(config, here)
    torch.set_num_threads(here.threads)
    images = Images(*index.normalisation(config.normalise), device, config.precision)
    if config.compile:
        check_compiler(device)
    chosen = _choose(config, components, index, images, here) if is_chosen else None
    plan = chosen.plan if chosen else plan
    at_an_end = {0, plan.last} & set(plan.stages_of(here.rank)) != set()
    splits = open_splits(index, here, at_an_end or config.plan == "adaptive")
    began = time.perf_counter()
    runtime = build_runtime(config, plan, components, images, index.image_shape[0], here)
    assert runtime.activity is not None
    session = TorchSession(
        config=config,
        world=here,
        index=index,
        plan=plan,
        shapes=tensor_shapes(components),
        parameters=parameter_count(components),
        runtime=runtime,
        components=components,
        chosen=chosen,
        build_seconds=time.perf_counter() - began,
        activity=runtime.activity,
        train_rows=train_rows,
        held_rows=held_rows,
        splits=splits,
    )
    tensors.check(session.tensors())
    return session


def _choose(
    config: TrainConfig, components: Sequence[Component], index: Index, images: Images, here: World
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
        _prove(config, chosen.plan)
    return chosen


def _check_without_plan(
    config: TrainConfig, components: Sequence[Component], index: Index, ranks: int
) -> None:
    """What can be checked before a plan is chosen.

    Raises:
        UsageError: if model and images do not fit.
    """
    check_components(components, config, index)
    check_choice(config, components)
    if config.trace is not None:
        check_target(config.trace, "--trace")


def _checked_plan(
    config: TrainConfig, components: Sequence[Component], index: Index, ranks: int
) -> Plan:
    """The plan, after what one rank can check for all, who need not load what that takes.

    Raises:
        UsageError: if model and images, or model, plan and ranks do not fit.
    """
    check_components(components, config, index)
    plan = make_plan(config, components, index.image_shape[0], index.classes, ranks)
    _prove(config, plan)
    return plan


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


def _prove(config: TrainConfig, plan: Plan) -> None:
    """Refuse what would fail in the first step, or after it.

    Raises:
        UsageError: if the schedule were no correct step of the plan, or a trace has no folder.
    """
    pieces = cut(plan, config.batch_size)
    replicated = {i for i, stage in enumerate(plan.stages) if len(stage.ranks) > 1}
    synchronised = frozenset(replicated if config.batch_norm == "sync" else ())
    validate(schedule.training_step(plan, pieces), plan, pieces, synchronised=synchronised)
    if config.trace is not None:
        check_target(config.trace, "--trace")


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


def check_components(components: Sequence[Component], config: TrainConfig, index: Index) -> None:
    """Hand images of the data set's size through, without computing anything.

    Raises:
        UsageError: if images or classes of the data set are not those of the model.
    """
    dtype = DTYPES[config.precision]
    boundaries(components, index.image_shape[0], classes=index.classes, dtype=dtype)


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
