"""The state of a model and its optimizers, by the names that its tensors have in a checkpoint."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.store import EXTRA, MODEL, OPTIMIZER, SYNC, owners
from hvdtrain.checkpoint.tensorfile import DTYPES
from hvdtrain.config import TrainConfig
from hvdtrain.device import copy_out, new_host
from hvdtrain.engine.session import Shape, State
from hvdtrain.errors import UsageError
from hvdtrain.models import weights
from hvdtrain.options.requests import Server
from hvdtrain.options.sections import OPTIMIZERS
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Part
from hvdtrain.plan.plan import Plan
from hvdtrain.sync.states import Kept
from hvdtrain.world import World

STATE_TAG = 1


class Copies:
    """Contiguous copies of tensors on the CPU, whose memory is used again for the same name."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return copies of the tensors, by name; they overwrite those of the last call."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        copy_out(list(tensors.values()), list(self._buffers.values()))
        return {name: to_array(tensor) for name, tensor in self._buffers.items()}

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = new_host(tensor, tensor.shape)
        return buffer


@dataclass(kw_only=True)
class TorchState(State):
    """The state under any plan.

    Attributes:
        plan, runtime: the current ones, which a migration replaces.
        counted_before: what the replicas of earlier plans have counted.
        wanted: names of the tensors that each way to agree reads, by the last `expected`.
    """

    runtime: Runtime
    config: TrainConfig
    world: World
    copies: Copies = field(default_factory=Copies)
    wanted: list[frozenset[str]] = field(default_factory=list)
    counted_before: Counter[str] = field(default_factory=Counter)

    @property
    def parts(self) -> Mapping[int, Part]:
        """The parts of the model that this rank holds, by stage."""
        return self.runtime.parts

    def counted(self) -> Counter[str]:
        """Return what this rank has counted of its agreements with other replicas, by name."""
        totals = Counter(self.counted_before)
        for part in self.parts.values():
            totals.update(part.gradients.counted())
            totals.update(part.meetings.counted())
        return totals

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that this rank holds, by name."""
        return {
            name: tensor
            for part in self.parts.values()
            for name, tensor in part.model.tensors().items()
        }

    @override
    def agree(self) -> None:
        agree_on_weights(self.plan, self.parts, self.digests(), self.world)

    @override
    def start_from(self, path: Path) -> str:
        last = self.plan.stages[-1].components[-1]
        values, others = weights.read(path, self.config.model, self.shapes, last)
        put_tensors(self.parts, values)
        if any(name.endswith(weights.KEY) for name in values):
            for part in self.parts.values():
                part.model.put_extra(values)
        if not others:
            return f"started from {path}"
        layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in others))
        return f"started from {path}, except {layers}: the file has another number of classes"

    @override
    def digests(self) -> dict[str, str]:
        return {
            name: digest
            for part in self.parts.values()
            for name, digest in part.model.digests().items()
        }

    @override
    def fingerprints(self) -> dict[int, int]:
        return {number: part.model.fingerprint() for number, part in self.parts.items()}

    @override
    def share(self) -> dict[str, np.ndarray]:
        # First: a replica without samples gets the optimizer's state that the others have.
        averages = [part.meetings.averages() for part in self.parts.values()]
        share = local_share(self.plan, self.parts, self.world.rank)
        for agreed in averages:
            share |= {name: agreed[name] for name in share.keys() & agreed.keys()}
        for kept in self._kept():
            share |= {f"{SYNC}{name}": tensor for name, tensor in kept.saved().items()}
        return self.copies.of(share)

    @override
    def expected(self, was_updated: bool, saved: Mapping[str, Shape]) -> dict[str, Shape]:
        expected = {f"{MODEL}{name}": tuple(value.shape) for name, value in self.tensors().items()}
        held = tuple(
            f"{EXTRA}{name}." for part in self.parts.values() for name in part.model.components
        )
        expected |= {name: shape for name, shape in saved.items() if name.startswith(held)}
        for part in self.parts.values():
            if part.optimizer is None or not was_updated:
                continue  # an optimizer has no state before its first update
            parameters = part.model.parameters()
            for name in part.gradients.updated():
                prefix = f"{OPTIMIZER}{name}/"
                if self.config.optimizer not in OPTIMIZERS:  # only it knows its state
                    expected |= {k: form for k, form in saved.items() if k.startswith(prefix)}
                    continue
                entries = state_shapes(self.config, parameters[name].shape)
                expected |= {f"{prefix}{key}": shape for key, shape in entries.items()}
        shapes = store.of_kind(saved, SYNC)
        self.wanted = [kept.wanted(shapes) for kept in self._kept()]
        names = frozenset[str]().union(*self.wanted)
        return expected | {f"{SYNC}{name}": shapes[name] for name in names}

    @override
    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        put_arrays(self.parts, arrays)
        tensors = {name: to_tensor(value) for name, value in store.of_kind(arrays, SYNC).items()}
        # What a rank reads may depend on tensors that it does not read: not to be asked again.
        for kept, names in zip(self._kept(), self.wanted, strict=True):
            kept.load({name: tensors[name] for name in names})

    def _kept(self) -> list[Kept]:
        """Return what has a state beside weights and optimizers."""
        return [kept for part in self.parts.values() for kept in (part.gradients, part.meetings)]


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
        elif world.rank == owner:
            world.send(_tensors_of(parts[number]), 0, STATE_TAG)()
    return tensors


def local_share(plan: Plan, parts: Mapping[int, Part], rank: int) -> dict[str, Tensor]:
    """Return the tensors that this rank writes into a checkpoint; one rank writes each tensor.

    The replicas of a stage hold the same tensors, and each writes about the same number of bytes.
    Training continues to change the returned tensors: copy them.
    """
    share: dict[str, Tensor] = {}
    for number, part in parts.items():
        tensors, ranks = part.model.tensors(), plan.stages[number].ranks
        if rank not in ranks:  # a server: its workers hold the same weights, and write them
            for group in named_state(part, tensors.keys()).values():
                share |= {key: value for key, value in group.items() if key.startswith(OPTIMIZER)}
            continue
        sizes = [tensor.nbytes for tensor in tensors.values()]
        writers = owners(sizes, len(ranks))
        names = {
            name for name, writer in zip(tensors, writers, strict=True) if ranks[writer] == rank
        }
        for group in named_state(part, names).values():
            share |= group
        if rank == ranks[0]:
            share |= {f"{EXTRA}{name}": value for name, value in part.model.extra().items()}
    return share


def named_state(part: Part, names: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """Return for these parameters and buffers their tensors by their names in a checkpoint.

    These are the tensor itself and those of the optimizer. Collective among the replicas of the
    stage if each holds a part of the optimizer's state.
    """
    state: Mapping[str, Mapping[str, Tensor]] = {}
    if part.optimizer is not None:
        local_state = state_by_name(part.optimizer, part.gradients.updated())
        state = part.gradients.whole_state(local_state, names)
    return {
        name: {f"{MODEL}{name}": tensor}
        | {f"{OPTIMIZER}{name}/{key}": value for key, value in state.get(name, {}).items()}
        for name, tensor in part.model.tensors().items()
        if name in names
    }


def put_arrays(parts: Mapping[int, Part], arrays: Mapping[str, np.ndarray]) -> None:
    """Copy this rank's part of the whole state, in the form of a checkpoint, into its parts."""
    tensors, optimizer = store.by_kind({name: to_tensor(value) for name, value in arrays.items()})
    put_tensors(parts, tensors)
    extra = {name: to_tensor(value) for name, value in store.of_kind(arrays, EXTRA).items()}
    for part in parts.values():
        part.model.put_extra(extra)
        if part.optimizer is None:
            continue
        parameters = part.gradients.updated()
        states = {
            name: {
                key: part.gradients.local_state(name, key, value)
                for key, value in optimizer[name].items()
            }
            for name in parameters
            if name in optimizer
        }
        restore_state(part.optimizer, parameters, states)


def put_tensors(parts: Mapping[int, Part], tensors: Mapping[str, Tensor]) -> None:
    """Copy those of `tensors` that this rank holds into its model."""
    for part in parts.values():
        part.model.put(tensors)


def agree_on_weights(
    plan: Plan, parts: Mapping[int, Part], local_digests: Mapping[str, str], world: World
) -> None:
    """Give replicas and servers the weights of the first replica, if they differ. Collective.

    The toolkit's components are seeded, but those of a user may not be.

    Args:
        local_digests: digest of each tensor that this rank holds, by name.
    """
    digests = world.gather(local_digests)
    for number, stage in enumerate(plan.stages):
        owner = stage.ranks[0]
        if all(
            held.get(name, digest) == digest
            for held in digests
            for name, digest in digests[owner].items()
            if name.startswith(tuple(f"{component}." for component in stage.components))
        ):
            continue
        part = parts.get(number)
        local_state = (_tensors_of(part), part.model.extra()) if part is not None else None
        state = world.broadcast(local_state, owner)
        if part is not None:
            part.model.put(state[0])
            part.model.put_extra(state[1])


def _tensors_of(part: Part) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in part.model.tensors().items()}


def check_savable(parts: Mapping[int, Part], config: TrainConfig) -> None:
    """Refuse a model that cannot be saved, before training starts.

    Raises:
        UsageError: if a checkpoint cannot hold a tensor or a state, or replicas cannot share it.
    """
    for part in parts.values():
        extra = part.model.extra()
        check_dtypes(part.model.tensors() | extra)
        if extra and isinstance(config.sync_request, Server):
            raise UsageError(
                f"--sync {config.sync} is not supported with the state of get_extra_state "
                f"({min(extra)}): keep it in a buffer, or use --sync exact"
            )


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that a checkpoint cannot hold.

    Raises:
        UsageError: naming the first of them.
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


def state_by_name(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's tensors by parameter name and key; empty before the first step."""
    return {
        name: {key: torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in parameters.items()
        if optimizer.state.get(parameter)
    }


def state_shapes(
    config: TrainConfig, parameter: torch.Size | tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Return keys and shapes of the optimizer's tensors for a parameter after the first step."""
    same = tuple(parameter)
    shapes: dict[str, tuple[int, ...]] = {}
    if config.optimizer in ("adam", "adamw"):
        shapes = {"step": (), "exp_avg": same, "exp_avg_sq": same}
    elif config.momentum > 0:
        shapes = {"momentum_buffer": same}
    return shapes


def restore_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Restore saved tensors into the optimizer, in the memory format of their parameters."""
    for name, entries in state.items():
        parameter = parameters[name]
        for key, value in entries.items():
            if value.shape == parameter.shape and value.dim() > 0:
                restored = torch.empty_like(parameter, requires_grad=False).copy_(value)
            else:
                restored = value.to(parameter.device, copy=True)
            optimizer.state[parameter][key] = restored
