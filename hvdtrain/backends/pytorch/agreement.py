"""Gradients and meetings of the replicas of a stage, as the options request them."""

from collections.abc import Callable

import torch

from hvdtrain.backends.pytorch.state import restore_state, state_shapes
from hvdtrain.config import TrainConfig
from hvdtrain.options.syncrequest import DiLoCo, Elastic, Local
from hvdtrain.parallel.stage import StageModel
from hvdtrain.sync.averaging import LocalMeetings, PostLocalMeetings
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.diloco import DiLoCoMeetings, Outer
from hvdtrain.sync.elastic import ElasticMeetings
from hvdtrain.sync.gradients import Gradients, ReplicatedGradients
from hvdtrain.sync.local import LocalGradients, SwitchedGradients, Trained
from hvdtrain.sync.meetings import Meetings, NoMeetings
from hvdtrain.sync.replica import Replica
from hvdtrain.sync.states import States

# Returns collective operations for a purpose, which makes their names differ from all others.
Group = Callable[[str], Collectives]


def agreement(
    config: TrainConfig, model: StageModel, optimizer: torch.optim.Optimizer | None, group: Group
) -> tuple[Gradients, Meetings]:
    """Return the gradients of a replicated stage, and the meetings of its replicas."""
    request = config.sync_request
    trained = Trained()
    local = LocalGradients(model.parameters(), trained)
    if isinstance(request, Local):
        meetings = LocalMeetings(
            _replica(config, model, optimizer),
            group("meetings"),
            trained,
            request.period,
            config.average_optimizer,
        )
        if not request.exact_epochs:
            return local, meetings
        switched = SwitchedGradients(_exact(model, group), local)
        return switched, PostLocalMeetings(meetings, switched, request.exact_epochs)
    if isinstance(request, DiLoCo):
        outer = Outer(config.outer_lr, config.outer_momentum, config.fragments, config.overlap)
        replica = _replica(config, model, optimizer)
        return local, DiLoCoMeetings(replica, group("meetings"), trained, request.period, outer)
    if isinstance(request, Elastic):
        replica, rate = _replica(config, model, optimizer), config.elastic_rate
        return local, ElasticMeetings(replica, group("meetings"), trained, request.period, rate)
    return _exact(model, group), NoMeetings()


def _exact(model: StageModel, group: Group) -> ReplicatedGradients:
    return ReplicatedGradients(
        model.parameters(),
        model.statistics(),
        States(model.states, model.put),
        group("gradients"),
    )


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
