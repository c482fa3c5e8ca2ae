"""Checkpoints of a user's loop, in the store of `hvdtrain train`: verified, never half-written.

Rank 0 writes the state, which all ranks share. The position of the data is a number of samples, so
a loop resumes on any number of ranks.
"""

import base64
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from hvdtrain.errors import DataError, Interrupted, Preempted, UsageError
from hvdtrain.host import files
from hvdtrain.host.stop import StopRequest
from hvdtrain.models import extrastate
from hvdtrain.parallel.checksums import digest
from hvdtrain.torch.agreement import Action, Note
from hvdtrain.torch.reduction import COMPILED
from hvdtrain.torch.start import State, Watched, current

Item = TypeVar("Item")
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
    steps = state.models[0].steps
    state.check_models(Note(Action.SAVING, number=steps))
    extra = _extra(state, steps)
    random_states = torch.get_rng_state(), random_state(state.place.device)
    rng = state.agreement.gather(Note(Action.SAVING, number=steps), random_states)
    kept = _kept(state) | extra
    fault, path = None, Path(folder) / store.name_of(steps)
    if state.place.is_first:
        try:
            _check_folder(state, path.parent)
            _write(state, path, keep, rng, kept, others)
        except (DataError, UsageError) as error:
            fault = error
    fault = state.agreement.broadcast(Note(Action.SAVING, number=steps), fault)
    if fault is not None:
        raise fault
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
    content: Any = None
    if state.place.is_first:
        try:
            content = _read(Path(folder))
        except DataError as error:
            content = error
    content = state.agreement.broadcast(Note(Action.LOADING), content)
    if isinstance(content, DataError):
        raise content
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
    stop = _watch(state)
    before = _steps(state)
    if save_to is not None and state.models:
        check_folder(save_to)
    for batch in batches:
        yield batch
        if state.place.size == 1 and stop.requested:
            state.stop_code = (Interrupted if stop.interrupted else Preempted).exit_code
        if state.stop_code is not None:
            _leave(state, save_to, keep, others)
        if every is not None and save_to is not None and _steps(state) - before >= every:
            before = _steps(state)
            save(save_to, keep=keep, **others)


def _watch(state: State) -> StopRequest:
    """Return what records requests to stop, from now until the end of the program."""
    if state.stop is None:
        state.stop = StopRequest().__enter__()
        state.undo.append(state.stop.__exit__)
    return state.stop


def _steps(state: State) -> int:
    return state.models[0].steps if state.models else 0


def _leave(state: State, save_to: str | Path | None, keep: int, others: dict[str, Any]) -> None:
    kind = Interrupted if state.stop_code == Interrupted.exit_code else Preempted
    what = "interrupted" if kind is Interrupted else "requested to stop"
    where = f"{what} after step {_steps(state)}"
    if save_to is None or not state.models:
        raise kind(f"{where}; nothing was saved: give save_to to distributed.steps")
    path = save(save_to, keep=keep, **others)
    raise kind(f"{where}; the state is in {path}: start again to resume")


def check_folder(folder: str | Path) -> None:
    """Refuse a folder that `save` would refuse, before any step is made. Collective.

    Raises:
        UsageError: on all ranks.
    """
    state = current()
    fault, steps = None, state.models[0].steps
    if state.place.is_first:
        try:
            _check_folder(state, Path(folder))
        except UsageError as error:
            fault = error
    fault = state.agreement.broadcast(Note(Action.SAVING, number=steps), fault)
    if fault is not None:
        raise fault


def _check_folder(state: State, folder: Path) -> None:
    """Refuse a folder of another run, whose later checkpoint `load` would prefer."""
    kept = store.stored(folder) if folder.is_dir() else []
    steps = state.models[0].steps
    if kept and store.step_of(kept[-1].name) > steps and folder.resolve() not in state.loaded:
        raise UsageError(
            f"{kept[-1]} is newer than step {steps} of this program: call distributed.load before "
            "the loop, or save to another folder"
        )


def _extra(state: State, steps: int) -> dict[str, Tensor]:
    """Return what modules keep beside their tensors, by name. Collective.

    Raises:
        UsageError: on all ranks, if the ranks differ in it: a checkpoint holds that of rank 0.
    """
    extra = {
        f"{EXTRA}{name}": value
        for number, model in enumerate(state.models)
        for name, value in extrastate.saved(model.model, _prefix(state, number)).items()
    }
    digests = {name: digest(value) for name, value in extra.items()}
    everywhere = state.agreement.gather(Note(Action.SAVING, number=steps), digests)
    for rank, theirs in enumerate(everywhere):
        if different := sorted(name for name, _ in theirs.items() ^ everywhere[0].items()):
            raise UsageError(
                f"{different[0].split('/')[1]}, which get_extra_state returns, differs between "
                f"rank {rank} and rank 0: keep it in a buffer, which all ranks share"
            )
    return extra


def _kept(state: State) -> dict[str, Tensor]:
    """Return on rank 0 what the compressed sums of all ranks keep, by name. Collective."""
    kept = {
        f"{SYNC}{number}/{name}": value.cpu()
        for number, model in enumerate(state.models)
        for name, value in model.kept.saved().items()
    }
    everywhere = state.world.gather_on_first(kept) if kept else [kept]
    return {name: value for theirs in everywhere for name, value in theirs.items()}


def _write(
    state: State,
    path: Path,
    keep: int,
    rng: list[RandomStates],
    kept: Mapping[str, Tensor],
    others: Mapping[str, Any],
) -> None:
    tensors: dict[str, Tensor] = dict(kept)
    for number, model in enumerate(state.models):
        tensors |= _tensors(state, number, model)
    check_dtypes(tensors)
    loop = {
        "groups": [
            _options(optimizer) for model in state.models for optimizer in model.optimizers
        ],
        "others": {name: _state_dict(name, value) for name, value in others.items()},
        "rng": [cpu for cpu, _ in rng],
        "device_rng": [device for _, device in rng],
    }
    tensors[LOOP] = torch.frombuffer(bytearray(_packed(loop)), dtype=torch.uint8)
    progress = {
        "step": state.models[0].steps,
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
    _check_others(path, loop["others"], others)
    targets = [_model_tensors(state, number, model) for number, model in enumerate(state.models)]
    _check_tensors(path, checkpoint.tensors, {n: v for part in targets for n, v in part.items()})
    optimizers = [optimizer for model in state.models for optimizer in model.optimizers]
    _check_groups(path, loop["groups"], optimizers)
    extra = {name: to_tensor(value) for name, value in checkpoint.extra.items()}
    for number, model in enumerate(state.models):
        extrastate.load(model.model, _prefix(state, number), extra)
    for part in targets:
        for name, target in part.items():
            target.copy_(to_tensor(checkpoint.tensors[name]))
    for number, model in enumerate(state.models):
        _put_optimizers(state, number, model, checkpoint)
        _put_kept(number, model, checkpoint)
    for optimizer, groups in zip(optimizers, loop["groups"], strict=True):
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)
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


def _put_optimizers(state: State, number: int, model: Watched, checkpoint: Checkpoint) -> None:
    parameters = _named_parameters(state, number, model)
    for optimizer in model.optimizers:
        stepped = {id(v) for group in optimizer.param_groups for v in group["params"]}
        optimizer.state.clear()
        kept = {
            name: {key: to_tensor(value) for key, value in checkpoint.optimizer[name].items()}
            for name, value in parameters.items()
            if name in checkpoint.optimizer and id(value) in stepped
        }
        restore_state(optimizer, parameters, kept)


def _put_kept(number: int, model: Watched, checkpoint: Checkpoint) -> None:
    residuals = store.of_kind(checkpoint.sync, f"{number}/")
    saved = {name: to_tensor(value) for name, value in residuals.items()}
    names = model.kept.wanted({name: tuple(value.shape) for name, value in saved.items()})
    model.kept.load({name: saved[name] for name in names})


def _tensors(state: State, number: int, model: Watched) -> dict[str, Tensor]:
    """Return the tensors of a model and its optimizers by their names in a checkpoint."""
    parameters = _named_parameters(state, number, model)
    tensors = {f"{MODEL}{n}": v for n, v in _model_tensors(state, number, model).items()}
    for optimizer in model.optimizers:
        for name, value in parameters.items():
            for key, entry in optimizer.state.get(value, {}).items():
                if entry is not None:  # SGD without momentum keeps a None
                    tensors[f"{OPTIMIZER}{name}/{key}"] = _entry(optimizer, key, entry)
    return tensors


def _entry(optimizer: torch.optim.Optimizer, key: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} keeps {key}, a {type(value).__name__}, "
            "which a checkpoint cannot hold: use an optimizer whose state is tensors"
        ) from None


def _model_tensors(state: State, number: int, model: Watched) -> dict[str, Tensor]:
    return _named_parameters(state, number, model) | {
        f"{_prefix(state, number)}{name.replace(COMPILED, '')}": value
        for name, value in model.model.named_buffers()
    }


def _named_parameters(state: State, number: int, model: Watched) -> dict[str, nn.Parameter]:
    return {
        f"{_prefix(state, number)}{name.replace(COMPILED, '')}": value
        for name, value in model.model.named_parameters()
    }


def _prefix(state: State, number: int) -> str:
    return f"{number}." if len(state.models) > 1 else ""


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _state_dict(name: str, value: Any) -> Any:
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise UsageError(
            f"{name} is a {type(value).__name__}, which has no state_dict: save what has one"
        )
    return value.state_dict()


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


def _check_others(path: str, kept: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    if different := sorted(kept.keys() ^ others.keys()):
        where = "was saved with" if different[0] in kept else "was saved without"
        raise UsageError(f"{path} {where} {different[0]}: give the same objects to save and load")


def _check_groups(
    path: str, kept: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    old, new = [len(groups) for groups in kept], [len(item.param_groups) for item in optimizers]
    if old != new:
        raise UsageError(
            f"{path} was saved with {old} groups of parameters per optimizer, and there are {new} "
            "now: make the optimizers as when it was saved, or use another folder"
        )


def _check_tensors(
    path: str, kept: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor]
) -> None:
    for name in {**tensors, **kept}:
        old = kept[name].shape if name in kept else None
        new = tuple(tensors[name].shape) if name in tensors else None
        if old != new:
            shapes = [
                " x ".join(map(str, s)) or "one value" if s is not None else "absent"
                for s in (old, new)
            ]
            raise UsageError(
                f"{path} is of another model: {name} is {shapes[0]} in the checkpoint and "
                f"{shapes[1]} in the model: use the model of the checkpoint, or another folder"
            )
