"""A model's state between its names and the ranks that hold it under a plan."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from hvdtrain.parallel.part import Part
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.relayout import moves
from hvdtrain.poll import wait_until
from hvdtrain.training.checkpoint.store import MODEL, OPTIMIZER, owners
from hvdtrain.training.optimizer import restore_state, state_by_name
from hvdtrain.training.tensors import to_array
from hvdtrain.world import World

STATE_TAG = 1
MOVE_TAG = 1000  # and above


def gather_tensors(plan: Plan, parts: Mapping[int, Part], here: World) -> dict[str, Tensor]:
    """Parameters and buffers by name: all of them on rank 0, none elsewhere. Collective.

    The first replica of each stage sends what it holds, one stage after another.
    """
    found: dict[str, Tensor] = {}
    for number, stage in enumerate(plan.stages):
        owner = stage.ranks[0]
        if here.rank == 0:
            found |= _tensors_of(parts[number]) if owner == 0 else here.receive(owner, STATE_TAG)
        elif here.rank == owner and here.communicator is not None:
            here.communicator.send(_tensors_of(parts[number]), 0, STATE_TAG)
    return found


def own_share(plan: Plan, parts: Mapping[int, Part], rank: int) -> dict[str, Tensor]:
    """What this rank writes of a checkpoint: every tensor of the model is one rank's share.

    The replicas of a stage hold the same, and each takes about the same number of bytes of it.
    The tensors are those that training goes on with: copy them.
    """
    share: dict[str, Tensor] = {}
    for number, part in parts.items():
        named = _named(part)
        sizes = [tensor.nbytes for tensor in part.model.tensors().values()]
        ranks = plan.stages[number].ranks
        for group, owner in zip(named.values(), owners(sizes, len(ranks)), strict=True):
            if ranks[owner] == rank:
                share |= group
    return share


def _named(part: Part) -> dict[str, dict[str, Tensor]]:
    """Of each parameter and buffer: it and its optimizer's, named as in a checkpoint."""
    parameters, own = part.model.parameters(), part.optimizer
    optimizer = state_by_name(own, parameters) if own else {}
    return {
        name: {f"{MODEL}{name}": tensor}
        | {f"{OPTIMIZER}{name}/{key}": value for key, value in optimizer.get(name, {}).items()}
        for name, tensor in part.model.tensors().items()
    }


def state_under(
    before: Plan, after: Plan, parts: Mapping[int, Part], here: World
) -> dict[str, np.ndarray]:
    """What this rank needs of a checkpoint under another plan, from the ranks' memory. Collective.

    Arrays of what the rank holds already are its tensors' own memory.
    """
    own = _by_component(parts)
    planned, sending = moves(before, after), []
    found: dict[str, np.ndarray] = {}
    for number, move in enumerate(planned):
        if move.sender == here.rank:
            assert here.communicator is not None
            state = own[move.component]
            sending.append(here.communicator.isend(state, move.receiver, MOVE_TAG + number))
    for number, move in enumerate(planned):
        if move.receiver == here.rank:
            found |= here.receive(move.sender, MOVE_TAG + number)
    for request in sending:
        wait_until(lambda request=request: request.test()[0])  # type: ignore[misc]
    for stage in after.stages:
        if here.rank in stage.ranks:
            for component in stage.components:
                found |= own.get(component, {})
    return found


def _by_component(parts: Mapping[int, Part]) -> dict[str, dict[str, np.ndarray]]:
    """All that this rank holds."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for part in parts.values():
        named = _named(part)
        for component, module in part.model.components.items():
            tensors = (*module.named_parameters(), *module.named_buffers())
            found[component] = {
                key: to_array(tensor.detach().cpu())
                for name, _ in tensors
                for key, tensor in named[f"{component}.{name}"].items()
            }
    return found


def put_state(
    parts: Mapping[int, Part],
    tensors: Mapping[str, Tensor],
    optimizer: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Copy this rank's part of a whole state into its model and optimizers."""
    put_tensors(parts, tensors)
    for part in parts.values():
        if part.optimizer is None:
            continue
        parameters = part.model.parameters()
        own = {name: optimizer[name] for name in parameters if name in optimizer}
        restore_state(part.optimizer, parameters, own)


def put_tensors(parts: Mapping[int, Part], tensors: Mapping[str, Tensor]) -> None:
    """Copy what this rank holds of `tensors` into its model."""
    for part in parts.values():
        part.model.put(tensors)


def agree_on_weights(
    plan: Plan, parts: Mapping[int, Part], own: Mapping[str, str], here: World
) -> None:
    """Give replicas their first one's weights: components are seeded, a user's may not be.

    Args:
        own: the digests of what this rank holds.
    """
    digests = here.gather(own)
    for number, stage in enumerate(plan.stages):
        owner = stage.ranks[0]
        if all(
            digests[rank].get(name) == digest
            for rank in stage.ranks
            for name, digest in digests[owner].items()
            if name.startswith(tuple(f"{part}." for part in stage.components))
        ):
            continue
        held = parts.get(number)
        state = here.broadcast(_tensors_of(held) if held and here.rank == owner else None, owner)
        if held is not None:
            held.model.put(state)


def _tensors_of(part: Part) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in part.model.tensors().items()}
