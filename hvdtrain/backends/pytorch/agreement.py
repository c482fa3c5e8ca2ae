"""Gradients and meetings of the replicas of each stage, as the options request them."""

from collections.abc import Mapping
from functools import partial

import torch

from hvdtrain.backends.pytorch.state import restore_state, state_shapes
from hvdtrain.config import TrainConfig
from hvdtrain.device import is_gpu
from hvdtrain.engine.machine import machine_of
from hvdtrain.errors import UsageError
from hvdtrain.options.requests import (
    NO_COMPRESSION,
    NO_SYNC,
    Chosen,
    DiLoCo,
    Elastic,
    Exact,
    Local,
    Server,
)
from hvdtrain.parallel.stage import Part, StageModel
from hvdtrain.plan.plan import Plan
from hvdtrain.sync.collectives import (
    Alone,
    Collectives,
    Group,
    check_algorithm,
    check_horovod,
    open_group,
    reduction_library,
)
from hvdtrain.sync.compress import make_sums
from hvdtrain.sync.gradients import (
    Gradients,
    ReplicatedGradients,
    SerialGradients,
    ShardedGradients,
)
from hvdtrain.sync.local import (
    DiLoCoMeetings,
    ElasticMeetings,
    LocalGradients,
    LocalMeetings,
    Meetings,
    SampleCount,
    SwitchedGradients,
)
from hvdtrain.sync.states import Replica, States
from hvdtrain.world import World, start_horovod


def agreement_remarks(config: TrainConfig, plan: Plan) -> list[str]:
    """Return what a user should know about how replicas agree under a plan."""
    if isinstance(config.sync_request, Server):
        workers = len(plan.ranks)
        last = workers + config.sync_request.servers - 1
        held = f"rank {last} holds" if workers == last else f"ranks {workers} to {last} hold"
        return [f"{workers} rank(s) train; {held} the weights"]
    used = f"--sync {config.sync}" if config.sync_request != NO_SYNC else ""
    used = f"--compress {config.compress}" if config.compress_request != NO_COMPRESSION else used
    used = "--shard-optimizer" if config.shard_optimizer else used
    if used and all(len(stage.ranks) == 1 for stage in plan.stages):
        return [f"no stage of the plan has several ranks, so {used} changes nothing"]
    if config.shard_optimizer and isinstance(config.plan_request, Chosen):
        return [f"the plan was chosen without {used}, which sends as much and updates a part only"]
    return []


def open_groups(
    config: TrainConfig,
    plan: Plan,
    models: Mapping[int, StageModel],
    world: World,
    device: torch.device,
) -> dict[int, Group]:
    """Return the operations of the replicas of this rank's stages, by stage. Collective.

    Stages without replicas have none, unless more replicas may have left something out.
    """
    groups: dict[int, Group] = {}
    replicated = [stage.ranks for stage in plan.stages if len(stage.ranks) > 1]
    library = reduction_library(config.reduce_with, world, device) if replicated else "mpi"
    if replicated and library == "mpi":
        check_algorithm(config.allreduce)
    if library == "torch" and config.allreduce != "auto":
        raise UsageError(
            f"--allreduce {config.allreduce}, but torch.distributed sums here, which chooses it "
            "itself: leave it out, or use --reduce-with mpi"
        )
    if replicated and library == "horovod":
        check_horovod(device, world)
        _start_horovod(models, replicated, world, is_gpu(device))
    for number, stage in enumerate(plan.stages):
        is_held = number in models and bool(models[number].tensors())
        if len(stage.ranks) > 1:
            group = open_group(library, stage.ranks, world, device, f"stage{number}")
            if is_held:
                groups[number] = partial(_operations, group, stage.ranks, world)
        elif is_held and config.compress_request != NO_COMPRESSION:
            groups[number] = lambda purpose: Alone()
    return groups


def _operations(group: Group, ranks: tuple[int, ...], world: World, purpose: str) -> Collectives:
    return machine_of(world).collectives(group(purpose), ranks)


def _start_horovod(
    models: Mapping[int, StageModel], groups: list[tuple[int, ...]], world: World, on_gpu: bool
) -> None:
    parameters = [value for model in models.values() for value in model.parameters().values()]
    largest = max(world.gather(sum(value.numel() * value.element_size() for value in parameters)))
    start_horovod(largest, groups, on_gpu=on_gpu)


def stage_gradients(
    config: TrainConfig, model: StageModel, group: Group | None, trained: SampleCount
) -> Gradients:
    """Return the gradients of a stage.

    Args:
        group: operations of its replicas; None if there are none.
        trained: counts the samples that replicas train on apart.
    """
    parameters, request = model.parameters(), config.sync_request
    if group is None:
        return SerialGradients(parameters)
    match request:
        case DiLoCo() | Elastic() | Local(exact_epochs=0):
            return LocalGradients(parameters, trained)
        case Local():
            exact = _summed(config, model, group("gradients"))
            return SwitchedGradients(exact, LocalGradients(parameters, trained))
    return _summed(config, model, group("gradients"))


def _summed(config: TrainConfig, model: StageModel, collectives: Collectives) -> Gradients:
    """Return gradients that replicas sum in every step."""
    parameters, statistics = model.parameters(), model.statistics()
    states = States(model.states, model.put)
    if config.shard_optimizer and parameters:
        return ShardedGradients(parameters, statistics, states, collectives)
    sums = make_sums(config.compress_request, collectives)
    return ReplicatedGradients(parameters, statistics, states, collectives, sums)


def stage_meetings(
    config: TrainConfig, part: Part, group: Group | None, trained: SampleCount
) -> Meetings:
    """Return the meetings of a stage's replicas; arguments as of `stage_gradients`."""
    request = config.sync_request
    if group is None or isinstance(request, Exact | Server):
        return Meetings()
    replica, operations = _replica(config, part.model, part.optimizer), group("meetings")
    if isinstance(request, Local):
        switched = part.gradients if isinstance(part.gradients, SwitchedGradients) else None
        return LocalMeetings(replica, operations, trained, request, switched)
    kind = DiLoCoMeetings if isinstance(request, DiLoCo) else ElasticMeetings
    return kind(replica, operations, trained, request)


def _replica(
    config: TrainConfig, model: StageModel, optimizer: torch.optim.Optimizer | None
) -> Replica:
    parameters = model.parameters()

    def complete() -> None:
        assert optimizer is not None
        for name, parameter in parameters.items():
            if not optimizer.state.get(parameter):
                shapes = state_shapes(config, parameter.shape)
                zeros = {key: torch.zeros(shape) for key, shape in shapes.items()}
                restore_state(optimizer, parameters, {name: zeros})

    states = States(model.states, model.put)
    return Replica(parameters, model.statistics(), states, optimizer, complete)
