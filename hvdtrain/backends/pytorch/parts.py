"""Construction of one rank's stages of a plan: modules, gradients, optimizers, boundaries."""

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import unwrap
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hvdtrain import device as devices
from hvdtrain import world as worlds
from hvdtrain.backends.pytorch.agreement import open_groups, stage_gradients, stage_meetings
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import InputSize
from hvdtrain.errors import UsageError, one_line
from hvdtrain.models.component import Component, build_component
from hvdtrain.models.find import call_users, find_function, input_shape
from hvdtrain.options.requests import Server as ServerRequest
from hvdtrain.options.sections import OPTIMIZERS
from hvdtrain.parallel.batchnorm import synchronise
from hvdtrain.parallel.exchange import Exchange, Form, to_channels_last
from hvdtrain.parallel.stage import AUTOCAST, DTYPES, Part, StageModel
from hvdtrain.plan.plan import Plan, recomputed_components
from hvdtrain.sync.collectives import Alone, MPICollectives
from hvdtrain.sync.gradients import Gradients, ReplicatedGradients
from hvdtrain.sync.local import SampleCount
from hvdtrain.sync.server import (
    ArrivingUpdates,
    AveragedStatistics,
    PushedGradients,
    PushOptimizer,
    ServedGradients,
    Server,
    SummedUpdates,
    Updates,
    Wire,
    Worker,
    keep_only,
    rate_by_delay,
    rate_by_share,
)
from hvdtrain.sync.states import States, slices_of
from hvdtrain.world import World

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)

SCALE = "lr_scale"  # key of a parameter group of a user's own: factor of the learning rate


def make_optimizer(
    config: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    undecayed: frozenset[str] = frozenset(),
) -> torch.optim.Optimizer:
    """Return the optimizer of a run, with torch's fused kernels.

    Args:
        undecayed: names of the parameters without weight decay.

    Raises:
        UsageError: if a user's function fails, or returns something else.
    """
    if config.optimizer not in OPTIMIZERS:
        return _own_optimizer(config, parameters)
    groups: dict[float, list[Tensor]] = {}
    for name, value in parameters.items():
        decay = 0.0 if name in undecayed else config.weight_decay
        groups.setdefault(decay, []).append(value)
    values = [{"params": members, "weight_decay": decay} for decay, members in groups.items()]
    kind, options = _kind(config)
    return kind(values, lr=config.learning_rate(), fused=True, **options)


def _own_optimizer(
    config: TrainConfig, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer that a user's function makes; a group's rate is a factor of --lr."""
    where, lr = f"--optimizer {config.optimizer}", config.learning_rate()
    function = find_function(config.optimizer, "optimizer")
    optimizer = call_users(where, function, dict(parameters), lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"{where} returned a {type(optimizer).__name__}: return a torch.optim.Optimizer of "
            "the parameters that it gets"
        )
    updated = [id(value) for group in optimizer.param_groups for value in group["params"]]
    if sorted(updated) != sorted(id(value) for value in parameters.values()):
        raise UsageError(
            f"{where} returned an optimizer of other parameters than those that it gets: pass it "
            "each of them, once"
        )
    for group in optimizer.param_groups:
        group[SCALE] = group["lr"] / lr
    set_progress(optimizer, 0.0, 0.5)  # in steps of no run, as of `plan check`
    return optimizer


def check_state(config: TrainConfig, parameters: Mapping[str, nn.Parameter]) -> None:
    """Make a step of a user's optimizer with copies of weights, and look at its state.

    Raises:
        UsageError: if it fails, or has a state that a checkpoint cannot hold.
    """
    if config.optimizer in OPTIMIZERS or not parameters:
        return
    copies = {name: nn.Parameter(value.detach().clone()) for name, value in parameters.items()}
    optimizer = make_optimizer(config, copies)
    for value in copies.values():
        value.grad = torch.zeros_like(value)
    call_users(f"a step of --optimizer {config.optimizer}", optimizer.step)
    for name, value in copies.items():
        for key, item in optimizer.state.get(value, {}).items():
            if not isinstance(item, Tensor | int | float):
                raise UsageError(
                    f"--optimizer {config.optimizer} keeps a {type(item).__name__} as {key!r} of "
                    f"{name}, which a checkpoint cannot hold: use tensors and numbers"
                )


def _kind(
    config: TrainConfig,
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the optimizer and the arguments that only it has."""
    options: dict[str, Any] = {}
    kind: type[torch.optim.Optimizer]
    if config.optimizer == "sgd":
        options = {"momentum": config.momentum, "nesterov": config.momentum > 0}
        kind = torch.optim.SGD
    else:
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return _without_compiler(kind), options


def _without_compiler(kind: type[Kind]) -> type[Kind]:
    """Return the class with methods that have no guards against being compiled.

    Torch's guards load its compiler, which takes a third of a rank's start-up time, and this
    toolkit never compiles an optimizer.
    """
    methods = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    quick = torch.no_grad()(unwrap(kind.step))
    return cast(type[Kind], type(kind.__name__, (kind,), methods | {"step": quick}))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value`, times the factor of each group, as the learning rate of the next steps."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get(SCALE, 1.0)


def set_progress(optimizer: torch.optim.Optimizer, before: float, after: float) -> None:
    """Set the shares of the run that are done before and after the next step, for its step."""
    for group in optimizer.param_groups:
        group["progress"] = before, after


PROBED_IMAGES = 2  # a batch of one image does not show its memory format
COMPILED_VARIANTS = 1024


def build_parts(
    config: TrainConfig,
    plan: Plan,
    components: Sequence[Component],
    world: World,
    exchange: Exchange | None,
    device: torch.device,
) -> dict[int, Part]:
    """Return this rank's part of each stage that it holds, by stage number. Collective."""
    if isinstance(config.sync_request, ServerRequest):
        # Each rank builds the only stage; servers lose what they do not hold.
        models = _models(config, plan, components, plan.stages[0].ranks[0], device)
        return {0: served_part(config, config.sync_request, models[0], world)}
    models = _models(config, plan, components, world.rank, device)
    synchronised = _synchronise(config, plan, models, exchange)
    groups = open_groups(config, plan, models, world, device)
    parts: dict[int, Part] = {}
    for number, model in models.items():
        group, trained = groups.get(number), SampleCount()
        gradients = stage_gradients(config, model, group, trained)
        part = parts[number] = Part(
            model,
            gradients,
            stage_optimizer(config, model, gradients.updated()),
            is_first_replica=world.rank == plan.stages[number].ranks[0],
            synchronised=number in synchronised,
        )
        part.meetings = stage_meetings(config, part, group, trained)
    return parts


def _models(
    config: TrainConfig,
    plan: Plan,
    components: Sequence[Component],
    rank: int,
    device: torch.device,
) -> dict[int, StageModel]:
    recomputed = recomputed_components(config.recompute, [part.name for part in components])
    by_name = {part.name: part for part in components}
    return {
        number: build_model(
            [by_name[name] for name in plan.stages[number].components], config, device, recomputed
        )
        for number in plan.stages_of(rank)
    }


def stage_optimizer(
    config: TrainConfig, model: StageModel, trained: Mapping[str, nn.Parameter] | None = None
) -> torch.optim.Optimizer | None:
    """Return the optimizer of a stage; None if the stage has no parameters.

    Args:
        trained: what it updates, by the name of the parameter; by default the parameters.
    """
    parameters = model.parameters() if trained is None else trained
    if not parameters:
        return None
    optimizer = make_optimizer(config, parameters, model.undecayed())
    check_state(config, parameters)
    if config.emulate is not None:
        from hvdtrain.emulate import sleep_in_updates  # loads the planner

        sleep_in_updates(optimizer, list(model.components.values()))
    return optimizer


def build_model(
    components: Sequence[Component],
    config: TrainConfig,
    device: torch.device,
    recomputed: Collection[str] = (),
) -> StageModel:
    """Build the components with weights in channels_last order, compiled with `--compile`."""
    dtype = DTYPES[config.precision]
    built = {part.name: build_component(part, config.seed, device, dtype) for part in components}
    for module in built.values():
        to_channels_last(module)
        module.train()  # its constructor may have left another mode
    return StageModel(built, recomputed, config.compile)


def check_compiler(device: torch.device) -> None:
    """Compile something small, and raise torch's limit to the number of components of a model.

    Raises:
        UsageError: if torch.compile does not work on this machine.
    """
    # All components run through one function of torch, which would compile only a few variants.
    torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
    torch._dynamo.config.accumulated_recompile_limit = 4 * COMPILED_VARIANTS
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(4, device=device))
    except Exception as error:
        raise UsageError(
            f"--compile does not work on this machine ({one_line(error)}): install a C++ compiler "
            "(on a GPU: Triton), or leave --compile out"
        ) from None


def probe_forms(
    plan: Plan,
    parts: Mapping[int, Part],
    image_size: InputSize,
    config: TrainConfig,
    world: World,
    device: torch.device,
) -> list[Form]:
    """Return the form of each stage's input, by a forward pass of two black images. Collective.

    Unlike a pass on the meta device this shows memory formats, and dtypes under autocast.

    Raises:
        UsageError: if the plan cuts where no gradient can pass.
    """
    forms = [Form(input_shape(image_size), DTYPES[config.precision], channels_last=True)]
    for number, stage in enumerate(plan.stages[:-1]):
        local_form = None
        if world.rank == stage.ranks[0]:
            images = forms[-1].empty(PROBED_IMAGES, device).zero_()
            local_form = _emitted(parts[number].model, images, config.precision)
        form = world.broadcast(local_form, stage.ranks[0])
        if not form.dtype.is_floating_point:
            raise UsageError(
                f"the plan cuts after {stage.components[-1]}, whose output ({form.dtype}) has no "
                "gradient: cut elsewhere"
            )
        forms.append(form)
    return forms


def _emitted(model: StageModel, images: Tensor, precision: str) -> Form:
    model.train(False)
    with torch.no_grad(), devices.autocast(images.device, AUTOCAST.get(precision)):
        form = Form.of(model(images))
    model.train(True)
    return form


def _synchronise(
    config: TrainConfig, plan: Plan, models: Mapping[int, StageModel], exchange: Exchange | None
) -> frozenset[int]:
    """Synchronise the batch norms of replicated stages.

    Returns:
        Numbers of this rank's stages that have any.
    """
    synchronised = set()
    for number, stage in enumerate(plan.stages):
        if config.batch_norm == "local" or len(stage.ranks) == 1:
            continue
        assert exchange is not None
        gather = exchange.all_gather_among(stage.ranks)
        if number in models:
            components = models[number].components.values()
            layers = [synchronise(component, gather) for component in components]
            synchronised |= {number} if sum(layers) else set()
    return frozenset(synchronised)


def served_part(
    config: TrainConfig, request: ServerRequest, model: StageModel, world: World
) -> Part:
    """Return this rank's part. Collective.

    Args:
        model: the whole model; that of a server loses what the server does not hold.

    Raises:
        UsageError: if there are more servers than parameters.
    """
    workers = config.workers_of(world.size)
    parameters = model.parameters()
    if len(parameters) < request.servers:
        raise UsageError(
            f"--sync server,servers={request.servers}: servers hold whole parameters, but the "
            f"model has only {len(parameters)}: use at most servers={max(1, len(parameters))}"
        )
    slices = slices_of(parameters, request.servers)
    everyone, training = tuple(range(world.size)), tuple(range(workers))
    worlds.communicator_among(everyone)
    worlds.communicator_among(training)
    wire = Wire(worlds.communicator_for(everyone, "servers"))
    if world.rank >= workers:
        held = slices[world.rank - workers]
        keep_only(model.components, held.named)
        own_optimizer = stage_optimizer(config, model)
        assert own_optimizer is not None, "a server has a parameter"
        served = ServedGradients(model.parameters())
        part = Part(model, served, own_optimizer, is_first_replica=False)
        updates: Updates
        if request.staleness == 0:
            updates = SummedUpdates(held, own_optimizer, workers)
        else:
            rate_of = rate_by_delay if request.staleness is None else rate_by_share
            updates = ArrivingUpdates(held, own_optimizer, rate_of)
        part.meetings = Server(held, updates, wire, workers, request.staleness)
        return part
    group = MPICollectives(training, world.rank, "workers") if workers > 1 else Alone()
    states = States(model.states, model.put)
    shared: Gradients | None = None
    statistics: AveragedStatistics | None = None
    if request.staleness == 0:
        shared = ReplicatedGradients({}, model.statistics(), states, group)
    else:
        statistics = AveragedStatistics(model.statistics(), states, group)
    gradients = PushedGradients(parameters, shared)
    meetings = Worker(
        gradients, slices, everyone[workers:], wire, group.size, request.staleness, statistics
    )
    optimizer = PushOptimizer(gradients.parameters, meetings.push)
    return Part(model, gradients, optimizer, meetings, is_first_replica=group.place == 0)
