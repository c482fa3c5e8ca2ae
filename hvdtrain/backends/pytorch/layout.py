"""Translation of a model's state between tensor names and the ranks that hold it under a plan."""

import gc
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from hvdtrain.backends.pytorch.build import build_runtime
from hvdtrain.backends.pytorch.optimizer import restore_state, state_by_name
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.format import DTYPES
from hvdtrain.checkpoint.store import MODEL, OPTIMIZER, owners
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.host.poll import wait_until
from hvdtrain.models.component import Component
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Part
from hvdtrain.plan.plan import Plan, moves
from hvdtrain.world import World

STATE_TAG = 1
MOVE_TAG = 1000  # and above


def gather_tensors(plan: Plan, parts: Mapping[int, Part], world: World) -> dict[str, Tensor]:
    """Return all parameters and buffers by name on rank 0, nothing on other ranks. Collective.

    The first replica of each stage sends its tensors, one stage after another.
    """
    tensors: dict[str, Tensor] = {}
    for number, stage in enumerate(plan.stages):
        owner = stage.ranks[0]
        if world.rank == 0:
            tensors |= (
                _tensors_of(parts[number]) if owner == 0 else world.receive(owner, STATE_TAG)
            )
        elif world.rank == owner and world.communicator is not None:
            world.communicator.send(_tensors_of(parts[number]), 0, STATE_TAG)
    return tensors


def local_share(plan: Plan, parts: Mapping[int, Part], rank: int) -> dict[str, Tensor]:
    """Return the tensors that this rank writes into a checkpoint; one rank writes each tensor.

    The replicas of a stage hold the same tensors, and each writes about the same number of bytes.
    Training continues to change the returned tensors: copy them.
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
    """Return for each parameter and buffer its tensors by their names in a checkpoint.

    These are the tensor itself and those of the optimizer.
    """
    parameters = part.model.parameters()
    state = state_by_name(part.optimizer, parameters) if part.optimizer else {}
    return {
        name: {f"{MODEL}{name}": tensor}
        | {f"{OPTIMIZER}{name}/{key}": value for key, value in state.get(name, {}).items()}
        for name, tensor in part.model.tensors().items()
    }


def state_under(
    before: Plan, after: Plan, parts: Mapping[int, Part], world: World
) -> dict[str, np.ndarray]:
    """Return the state that this rank needs under another plan, from all ranks. Collective.

    It has the form of a checkpoint. Arrays that the rank holds already share the memory of its
    tensors.
    """
    held = _by_component(parts)
    planned, sending = moves(before, after), []
    needed: dict[str, np.ndarray] = {}
    for number, move in enumerate(planned):
        if move.sender == world.rank:
            assert world.communicator is not None
            state = held[move.component]
            sending.append(world.communicator.isend(state, move.receiver, MOVE_TAG + number))
    for number, move in enumerate(planned):
        if move.receiver == world.rank:
            needed |= world.receive(move.sender, MOVE_TAG + number)
    for request in sending:
        wait_until(lambda request=request: request.test()[0])  # type: ignore[misc]
    for stage in after.stages:
        if world.rank in stage.ranks:
            for component in stage.components:
                needed |= held.get(component, {})
    return needed


def _by_component(parts: Mapping[int, Part]) -> dict[str, dict[str, np.ndarray]]:
    """Return the state of each component that this rank holds, named as in a checkpoint."""
    held: dict[str, dict[str, np.ndarray]] = {}
    for part in parts.values():
        named = _named(part)
        for component, module in part.model.components.items():
            tensors = (*module.named_parameters(), *module.named_buffers())
            held[component] = {
                key: to_array(tensor.detach().cpu())
                for name, _ in tensors
                for key, tensor in named[f"{component}.{name}"].items()
            }
    return held


def put_state(
    parts: Mapping[int, Part],
    tensors: Mapping[str, Tensor],
    optimizer: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Copy this rank's part of the whole state into its model and optimizers."""
    put_tensors(parts, tensors)
    for part in parts.values():
        if part.optimizer is None:
            continue
        parameters = part.model.parameters()
        states = {name: optimizer[name] for name in parameters if name in optimizer}
        restore_state(part.optimizer, parameters, states)


def put_tensors(parts: Mapping[int, Part], tensors: Mapping[str, Tensor]) -> None:
    """Copy those of `tensors` that this rank holds into its model."""
    for part in parts.values():
        part.model.put(tensors)


def agree_on_weights(
    plan: Plan, parts: Mapping[int, Part], local_digests: Mapping[str, str], world: World
) -> None:
    """Give replicas the weights of the first replica, if they differ. Collective.

    The toolkit's components are seeded, but those of a user may not be.

    Args:
        local_digests: digest of each tensor that this rank holds, by name.
    """
    digests = world.gather(local_digests)
    for number, stage in enumerate(plan.stages):
        owner = stage.ranks[0]
        if all(
            digests[rank].get(name) == digest
            for rank in stage.ranks
            for name, digest in digests[owner].items()
            if name.startswith(tuple(f"{component}." for component in stage.components))
        ):
            continue
        part = parts.get(number)
        state = world.broadcast(_tensors_of(part) if part and world.rank == owner else None, owner)
        if part is not None:
            part.model.put(state)


def _tensors_of(part: Part) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in part.model.tensors().items()}


def under_plan(
    runtime: Runtime,
    config: TrainConfig,
    before: Plan,
    after: Plan,
    components: Sequence[Component],
    image_size: int,
    world: World,
) -> Runtime:
    """Return the interpreter of another plan with the same training state. Collective.

    The state is weights, running statistics and optimizer. Each rank receives what it needs as
    arrays, named as in a checkpoint, and loads them as it would load a checkpoint.
    """
    arrays = state_under(before, after, runtime.parts, world)
    migrated = build_runtime(
        config, after, components, runtime.settings.images, image_size, world, before=runtime
    )
    state, optimizer = store.by_kind({name: to_tensor(array) for name, array in arrays.items()})
    put_state(migrated.parts, state, optimizer)
    # The table `do` refers to methods of the old runtime: this cycle would keep the runtime and
    # its weights in memory until the collector runs.
    runtime.do, runtime.parts = {}, {}
    gc.collect()
    return migrated


def check(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a model that cannot be saved, before training starts.

    Raises:
        UsageError: if a tensor has a dtype that a checkpoint cannot hold.
    """
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise UsageError(
                f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold: "
                "use another dtype for it"
            )


def to_array(tensor: Tensor) -> np.ndarray:
    """Return an array on the memory of a CPU tensor that needs no gradient."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor on the memory of an array."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Copies:
    """Contiguous copies of tensors on the CPU, whose memory is used again for the same name."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return copies of the tensors, by name; they overwrite those of the last call."""
        self._buffers = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.synchronize()
        return {name: to_array(tensor) for name, tensor in self._buffers.items()}

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            on_gpu = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        return buffer.copy_(tensor.detach(), non_blocking=True)
