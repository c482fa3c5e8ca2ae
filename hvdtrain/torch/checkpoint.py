"""Checkpoints of a user's loop, in the store of `hvdtrain train`: verified, never half-written.

Rank 0 writes the state, which all ranks share. The position of the data is a number of samples, so
a loop resumes on any number of ranks.
"""

import base64
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hvdtrain.backends.pytorch.state import (
    check_dtypes,
    restore_state,
    to_array,
    to_tensor,
)
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.store import EXTRA, MODEL, OPTIMIZER, SYNC, Checkpoint
from hvdtrain.device import random_state, set_random_state
from hvdtrain.errors import DataError, HvdtrainError, Interrupted, Preempted, UsageError
from hvdtrain.host import files
from hvdtrain.host.process import StopRequest
from hvdtrain.models import weights
from hvdtrain.sync.states import digest
from hvdtrain.torch.reduction import COMPILED
from hvdtrain.torch.start import State, current

Item = TypeVar("Item")
Result = TypeVar("Result")
LOOP = f"{EXTRA}loop"  # in the manifest of older versions, which is small
RandomStates = tuple[Tensor, Tensor | None]  # of PyTorch's generators on the CPU and on the GPU


def save(folder: str | Path, *, keep: int = 2, **others: Any) -> Path:
    """Save models, optimizers and the position of the data; return the checkpoint. Collective.

    The position is that of the last step. A checkpoint is complete or does not exist.

    Args:
        folder: of the checkpoints, on a disk that rank 0 can write; it is created.
        keep: newest checkpoints to keep.
        others: objects with `state_dict`, such as `scheduler=scheduler` or `scaler=scaler`.

    Raises:
        UsageError: if no model is prepared, a state is not made of tensors, numbers and text, or
            the folder has a checkpoint of a later step and was not loaded.
        DataError: on all ranks, if it cannot be written.
    """
    state = current()
    if not state.models:
        raise UsageError("there is nothing to save: call distributed.prepare before save")
    for model in state.models:
        model.check_steps()
        model.meet()
    action, path = state.saving, Path(folder) / store.name_of(state.steps)
    state.check_weights(action, dict(state.module.named_parameters()))
    extra = _extra(state, action)
    random_states = torch.get_rng_state(), random_state(state.place.device)
    rng = state.agreement.gather(action, random_states)
    kept = {
        f"{SYNC}{number}/{name}": value.cpu()
        for number, model in enumerate(state.models)
        for name, value in model.kept.saved().items()
    }
    everywhere = state.world.gather_on_first(kept) if kept else [kept]
    beside = {name: value for theirs in everywhere for name, value in theirs.items()} | extra

    def write() -> None:
        _check_folder(state, path.parent)
        _write(state, path, keep, rng, beside, others)

    _by_first(state, action, write)
    return path


def load(folder: str | Path, **others: Any) -> Path | None:
    """Load the newest checkpoint that verifies into models and optimizers. Collective.

    Call it after `prepare`. The data then continues after the last step. Random numbers continue
    too if there are as many ranks as when it was saved.

    Args:
        folder: that `save` wrote to, readable on rank 0; it need not exist.
        others: the objects that were given to `save`.

    Returns:
        The checkpoint; None if there is none, and nothing was changed.

    Raises:
        UsageError: on all ranks, if it is of another model, optimizer or other objects.
        DataError: on all ranks, if there are checkpoints and none verifies.
    """
    state = current()
    if not state.models:
        raise UsageError("there is nothing to load into: call distributed.prepare before load")
    content = _by_first(state, "loading", lambda: _read(Path(folder)))
    state.loaded.add(Path(folder).resolve())
    if content is None:
        return None
    checkpoint, path = content
    _put(state, checkpoint, path, others)
    return Path(path)


def steps(
    batches: Iterable[Item],
    save_to: str | Path | None = None,
    *,
    every: int | None = None,
    keep: int = 2,
    **others: Any,
) -> Iterator[Item]:
    """Yield the batches; stop after a step, on all ranks, when a rank is requested to.

    Requests are Ctrl-C and the signals of schedulers: SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP. The
    ranks agree on them in each backward. The state is saved, and the program ends with exit code
    75, or 130 after Ctrl-C. A second Ctrl-C ends it at once. From the first call on requests are
    kept until the next step, also during an evaluation.

    Args:
        batches: this rank's batches of an epoch.
        save_to: the folder of checkpoints; None saves nothing.
        every: steps between checkpoints; None saves only before it stops.
        keep: newest checkpoints to keep.
        others: further objects to save, as in `save`.

    Raises:
        Preempted, Interrupted: on all ranks, after the state is saved.
        UsageError: if `every` is given and `save_to` is not, or the folder has a checkpoint of a
            later step and was not loaded.
    """
    if every is not None and (save_to is None or every < 1):
        raise UsageError("steps saves every N steps, at least 1, to a folder: give save_to")
    state = current()
    if state.stop is None:  # it records requests until the end of the program
        state.stop = StopRequest().__enter__()
        state.undo.append(state.stop.__exit__)
    before = state.steps
    if save_to is not None and state.models:
        folder = Path(save_to)
        _by_first(state, state.saving, lambda: _check_folder(state, folder))
    for batch in batches:
        yield batch
        if state.place.size == 1 and state.stop.requested:
            kind = Interrupted if state.stop.interrupted else Preempted
            state.stop_code = kind.exit_code
        if state.stop_code is not None:
            kind = Interrupted if state.stop_code == Interrupted.exit_code else Preempted
            what = "interrupted" if kind is Interrupted else "requested to stop"
            where = f"{what} after step {state.steps}"
            if save_to is None or not state.models:
                raise kind(f"{where}; nothing was saved: give save_to to distributed.steps")
            path = save(save_to, keep=keep, **others)
            raise kind(f"{where}; the state is in {path}: start again to resume")
        if every is not None and save_to is not None and state.steps - before >= every:
            before = state.steps
            save(save_to, keep=keep, **others)


def _by_first(state: State, action: str, work: Callable[[], Result]) -> Result:
    """Return on all ranks what `work` returns on rank 0, or raise its error. Collective."""
    result: Any = None
    if state.place.is_first:
        try:
            result = work()
        except (DataError, UsageError) as error:
            result = error
    result = state.agreement.broadcast(action, result)
    if isinstance(result, HvdtrainError):
        raise result
    returned: Result = result
    return returned


def _check_folder(state: State, folder: Path) -> None:
    """Refuse a folder of another run, whose later checkpoint `load` would prefer."""
    kept = store.stored(folder) if folder.is_dir() else []
    is_later = bool(kept) and store.step_of(kept[-1].name) > state.steps
    if is_later and folder.resolve() not in state.loaded:
        raise UsageError(
            f"{kept[-1]} is newer than step {state.steps} of this program: call distributed.load "
            "before the loop, or save to another folder"
        )


def _extra(state: State, action: str) -> dict[str, Tensor]:
    """Return what modules keep beside their tensors, by name. Collective.

    Raises:
        UsageError: on all ranks, if the ranks differ in it: a checkpoint holds that of rank 0.
    """
    saved = weights.saved(state.module, "")
    extra = {f"{EXTRA}{name}": value for name, value in saved.items()}
    digests = {name: digest(value) for name, value in extra.items()}
    everywhere = state.agreement.gather(action, digests)
    for rank, theirs in enumerate(everywhere):
        if different := sorted(name for name, _ in theirs.items() ^ everywhere[0].items()):
            raise UsageError(
                f"{different[0].split('/')[1]}, which get_extra_state returns, differs between "
                f"rank {rank} and rank 0: keep it in a buffer, which all ranks share"
            )
    return extra


def _write(
    state: State,
    path: Path,
    keep: int,
    rng: list[RandomStates],
    beside: Mapping[str, Tensor],
    others: Mapping[str, Any],
) -> None:
    """Write a checkpoint; `beside`: tensors beside those of models and optimizers, by name."""
    parameters, buffers = _named(state)
    tensors: dict[str, Tensor] = dict(beside)
    tensors |= {f"{MODEL}{name}": value for name, value in (parameters | buffers).items()}
    for optimizer in state.optimizers:
        for name, value in parameters.items():
            for key, entry in optimizer.state.get(value, {}).items():
                if entry is not None:  # SGD without momentum keeps a None
                    tensors[f"{OPTIMIZER}{name}/{key}"] = _entry(optimizer, key, entry)
    for name, other in others.items():
        if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
            raise UsageError(
                f"{name} is a {type(other).__name__}, which has no state_dict: save what has one"
            )
    check_dtypes(tensors)
    loop = {
        "groups": [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in state.optimizers
        ],
        "others": {name: other.state_dict() for name, other in others.items()},
        "rng": [cpu for cpu, _ in rng],
        "device_rng": [device for _, device in rng],
    }
    tensors[LOOP] = torch.frombuffer(bytearray(_packed(loop)), dtype=torch.uint8)
    progress = {
        "step": state.steps,
        "steps": [model.steps for model in state.models],
        "positions": state.positions,
    }
    try:
        files.make_folders(path.parent)
    except OSError as error:
        raise DataError(f"{path.parent} cannot be created: {error.strerror}") from None
    arrays = {name: to_array(value.detach().cpu().contiguous()) for name, value in tensors.items()}
    store.write_part(path.parent, path.name, 0, arrays)
    store.commit(path.parent, path.name, [0], progress, {})
    store.prune(path.parent, max(1, keep), newest=path.name)


def _read(folder: Path) -> tuple[Checkpoint, str] | None:
    """Return the newest checkpoint that verifies, and its path.

    Raises:
        DataError: if there are checkpoints, and none verifies.
    """
    if not folder.is_dir():
        return None
    store.restore_replaced(folder)
    store.clean(folder)
    checkpoint, path, skipped = store.load_newest(folder)
    if checkpoint is None and skipped:
        raise DataError(f"{folder} holds no checkpoint that verifies: {skipped[0]}")
    return None if checkpoint is None else (checkpoint, str(path))


@torch.no_grad()
def _put(state: State, checkpoint: Checkpoint, path: str, others: Mapping[str, Any]) -> None:
    progress = checkpoint.progress
    try:
        packed = checkpoint.extra.get(LOOP.removeprefix(EXTRA))
        content = base64.b64decode(progress["loop"]) if packed is None else packed.tobytes()
        loop = torch.load(io.BytesIO(content), "cpu", weights_only=True)
        positions = {str(name): int(value) for name, value in progress["positions"].items()}
        steps = [int(value) for value in progress["steps"]]
    except (KeyError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError):
        raise UsageError(
            f"{path} was not saved by hvdtrain.torch.save: give another folder"
        ) from None
    parameters, buffers = _named(state)
    _check(path, checkpoint, loop, parameters | buffers, state.optimizers, others)
    extra = {name: to_tensor(value) for name, value in checkpoint.extra.items()}
    weights.load(state.module, "", extra)
    for name, target in (parameters | buffers).items():
        target.copy_(to_tensor(checkpoint.tensors[name]))
    for optimizer, groups in zip(state.optimizers, loop["groups"], strict=True):
        stepped = {id(v) for group in optimizer.param_groups for v in group["params"]}
        optimizer.state.clear()
        kept = {
            name: {key: to_tensor(value) for key, value in checkpoint.optimizer[name].items()}
            for name, value in parameters.items()
            if name in checkpoint.optimizer and id(value) in stepped
        }
        restore_state(optimizer, parameters, kept)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)
    for number, model in enumerate(state.models):
        residuals = store.of_kind(checkpoint.sync, f"{number}/")
        saved = {name: to_tensor(value) for name, value in residuals.items()}
        names = model.kept.wanted({name: tuple(value.shape) for name, value in saved.items()})
        model.kept.load({name: saved[name] for name in names})
    for name, other in others.items():
        other.load_state_dict(loop["others"][name])
    if len(loop["rng"]) == state.place.size:
        torch.set_rng_state(loop["rng"][state.place.rank])
        if "device_rng" in loop:
            set_random_state(state.place.device, loop["device_rng"][state.place.rank])
    for model, count in zip(state.models, steps, strict=True):
        model.steps = count
    state.positions, state.restored = positions, bool(positions)
    state.readings = [reading for reading in state.readings if reading.is_live]


def _entry(optimizer: torch.optim.Optimizer, key: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} keeps {key}, a {type(value).__name__}, "
            "which a checkpoint cannot hold: use an optimizer whose state is tensors"
        ) from None


def _named(state: State) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Return the parameters and buffers of all models by their names in a checkpoint."""
    return (
        {n.replace(COMPILED, ""): value for n, value in state.module.named_parameters()},
        {n.replace(COMPILED, ""): value for n, value in state.module.named_buffers()},
    )


def _packed(content: Any) -> bytes:
    """Return a state as bytes that load without executing code.

    Raises:
        UsageError: if it is not made of tensors, numbers and text.
    """
    plain = tree_map(lambda v: v.item() if isinstance(v, np.generic) else v, content)
    file = io.BytesIO()
    try:
        torch.save(plain, file)
        torch.load(io.BytesIO(file.getvalue()), "cpu", weights_only=True)
    except (AttributeError, TypeError, RuntimeError, pickle.PickleError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"the state of an optimizer or of another object cannot be saved ({reason}): its "
            "state_dict must hold tensors, numbers and text only"
        ) from None
    return file.getvalue()


def _check(
    path: str,
    checkpoint: Checkpoint,
    loop: Mapping[str, Any],
    targets: Mapping[str, Tensor],
    optimizers: list[torch.optim.Optimizer],
    others: Mapping[str, Any],
) -> None:
    """Refuse a checkpoint of other objects, tensors or groups of parameters."""
    if different := sorted(loop["others"].keys() ^ others.keys()):
        where = "was saved with" if different[0] in loop["others"] else "was saved without"
        raise UsageError(f"{path} {where} {different[0]}: give the same objects to save and load")
    for name in {**targets, **checkpoint.tensors}:
        shapes = [
            tuple(side[name].shape) if name in side else None
            for side in (checkpoint.tensors, targets)
        ]
        if shapes[0] != shapes[1]:
            old, new = (
                " x ".join(map(str, shape)) or "one value" if shape is not None else "absent"
                for shape in shapes
            )
            raise UsageError(
                f"{path} is of another model: {name} is {old} in the checkpoint and {new} in the "
                "model: use the model of the checkpoint, or another folder"
            )
    counts = [len(groups) for groups in loop["groups"]]
    if counts != (now := [len(optimizer.param_groups) for optimizer in optimizers]):
        raise UsageError(
            f"{path} was saved with {counts} groups of parameters per optimizer, and there are "
            f"{now} now: make the optimizers as when it was saved, or use another folder"
        )
