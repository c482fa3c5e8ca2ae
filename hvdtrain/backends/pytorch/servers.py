"""The part of a rank under `--sync server`: of a worker, or of a server."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from hvdtrain import world as worlds
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.options.syncrequest import Server as ServerRequest
from hvdtrain.parallel.stage import Part, StageModel
from hvdtrain.sync.collectives import Alone, Collectives
from hvdtrain.sync.gradients import Gradients, ReplicatedGradients
from hvdtrain.sync.messages import Wire
from hvdtrain.sync.mpi import MPICollectives
from hvdtrain.sync.server import (
    ArrivingUpdates,
    ServedGradients,
    Server,
    SummedUpdates,
    Updates,
    keep_only,
    rate_by_delay,
    rate_by_share,
)
from hvdtrain.sync.slices import Slice, slices_of
from hvdtrain.sync.states import States
from hvdtrain.sync.worker import AveragedStatistics, PushedGradients, PushOptimizer, Worker
from hvdtrain.world import World

MakeOptimizer = Callable[[StageModel], torch.optim.Optimizer | None]


def served_part(
    config: TrainConfig,
    request: ServerRequest,
    model: StageModel,
    world: World,
    make_optimizer: MakeOptimizer,
) -> Part:
    """Return this rank's part. Collective.

    Args:
        model: the whole model; that of a server loses what the server does not hold.

    Raises:
        UsageError: if there are more servers than parameters.
    """
    workers = config.workers_of(world.size)
    slices = _slices(model.parameters(), config.servers)
    everyone, training = tuple(range(world.size)), tuple(range(workers))
    worlds.communicator_among(everyone)
    worlds.communicator_among(training)
    wire = Wire(worlds.communicator_for(everyone, "servers"))
    if world.rank >= workers:
        held = slices[world.rank - workers]
        keep_only(model.components, held.named)
        return _server_part(request, model, held, wire, workers, make_optimizer)
    group = MPICollectives(training, world.rank, "workers") if workers > 1 else Alone()
    return _worker_part(request, model, slices, wire, everyone[workers:], group)


def _slices(parameters: Mapping[str, nn.Parameter], servers: int) -> list[Slice]:
    if len(parameters) < servers:
        raise UsageError(
            f"--servers {servers} hold whole parameters, but the model has only "
            f"{len(parameters)}: use at most --servers {max(1, len(parameters))}"
        )
    return slices_of(parameters, servers)


def _server_part(
    request: ServerRequest,
    model: StageModel,
    held: Slice,
    wire: Wire,
    workers: int,
    make_optimizer: MakeOptimizer,
) -> Part:
    optimizer = make_optimizer(model)
    assert optimizer is not None, "a server has a parameter"
    gradients = ServedGradients(model.parameters())
    part = Part(model, gradients, optimizer, is_first_replica=False)
    updates: Updates
    if request.staleness == 0:
        updates = SummedUpdates(held, optimizer, workers)
    else:
        rate_of = rate_by_delay if request.staleness is None else rate_by_share
        updates = ArrivingUpdates(held, optimizer, rate_of)
    part.meetings = Server(held, updates, wire, workers, request.staleness)
    return part


def _worker_part(
    request: ServerRequest,
    model: StageModel,
    slices: list[Slice],
    wire: Wire,
    servers: tuple[int, ...],
    group: Collectives,
) -> Part:
    states = States(model.states, model.put)
    shared: Gradients | None = None
    statistics: AveragedStatistics | None = None
    if request.staleness == 0:
        shared = ReplicatedGradients({}, model.statistics(), states, group)
    else:
        statistics = AveragedStatistics(model.statistics(), states, group)
    gradients = PushedGradients(model.parameters(), shared)
    meetings = Worker(gradients, slices, servers, wire, group.size, request.staleness, statistics)
    optimizer = PushOptimizer(gradients.parameters, meetings.push)
    return Part(model, gradients, optimizer, meetings, is_first_replica=group.place == 0)
