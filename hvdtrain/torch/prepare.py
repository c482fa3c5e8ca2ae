"""Preparing a model and its optimizers: checked, made equal on all ranks, and averaged.

And what a loop says of its backwards: accumulated, weighted, clipped.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hvdtrain import world
from hvdtrain.device import is_gpu
from hvdtrain.engine.agreement import check_alike
from hvdtrain.errors import UsageError
from hvdtrain.models import weights
from hvdtrain.models.component import is_dense
from hvdtrain.options.requests import NO_COMPRESSION, parse_compress_request
from hvdtrain.sync.collectives import check_horovod
from hvdtrain.sync.states import fingerprint
from hvdtrain.torch.gradients import Phase, Replica, settings
from hvdtrain.torch.reduction import period_of
from hvdtrain.torch.start import State, current, leave_together_at_exit

Model = TypeVar("Model", bound=nn.Module)
Kind = TypeVar("Kind", bound=Optimizer)


@overload
def prepare(
    model: Model,
    optimizer: Kind,
    *,
    compress: str = "none",
    sync: str = "exact",
) -> tuple[Model, Kind]: ...
@overload
def prepare(
    model: Model,
    optimizer: Optimizer,
    *more: Optimizer,
    compress: str = "none",
    sync: str = "exact",
) -> tuple[Any, ...]: ...


def prepare(
    model: Any,
    optimizer: Any,
    *more: Any,
    compress: str = "none",
    sync: str = "exact",
) -> tuple[Any, ...]:
    """Make a model the same on all ranks, and have its gradients averaged during backward.

    Model and optimizers are returned, not copied. Weights, buffers and the state of the optimizers
    become those of rank 0. After each `backward()` the gradients are those of the mean loss over
    the global batch, however its samples are divided: a rank's loss must be the mean over its own
    samples. Running statistics of batch norms become their mean over the ranks, weighted by
    samples; other buffers that forwards change become those of one rank.

    With `sync="local:H"` ranks make local steps: gradients are those of a rank's samples. After
    every H steps of the optimizer, and before `evaluate` and `save`, weights, statistics and the
    state of the optimizer become their averages, weighted by samples.

    Call it again after a change of the model, such as another frozen layer; what compression has
    left out so far is then lost. Collective.

    Args:
        model: on its device, with all its layers.
        optimizer: of its parameters only.
        more: other optimizers, each of other parameters of the model.
        compress: what travels between ranks, as `hvdtrain train --compress`: none, fp16, bf16,
            int8, topk:RATIO or powersgd:RANK. What is left out is added to the next gradients, so
            keep the scale of a GradScaler constant. Parameters in fp16 are not compressed. The
            first 100 averaged gradients are exact, with "fp16,after=N" the first N.
        sync: "exact" or "local:H", with one optimizer and without `compress`.

    Raises:
        UsageError: on all ranks, if model or optimizers differ between ranks or cannot be
            averaged.
    """
    state = current()
    optimizers = [optimizer, *more]
    _check(model, optimizers)
    period = period_of(sync, optimizers)
    compression = parse_compress_request(compress, "compress")
    if period is not None and compression != NO_COMPRESSION:
        raise UsageError(
            f"compress={compress!r} needs the sums of every step, which sync={sync!r} does not "
            "have: use sync='exact', or leave compress out"
        )
    action = f"preparing model {len(state.models)}"
    names = {id(value): name for name, value in model.named_parameters()}
    facts = {
        "model": {
            **{
                name: f"{_form(value)}, {'trained' if value.requires_grad else 'frozen'}"
                for name, value in model.named_parameters()
            },
            **{name: _form(value) for name, value in model.named_buffers()},
        },
        "optimizer": {**settings(optimizers, names), "sync": sync},
        "compression": {"compress": str(compression)},
    }
    everywhere = state.agreement.gather(action, facts)
    check_alike(everywhere, "build the same on all ranks")
    for other in state.models:
        other.meet()
    if state.place.size > 1:
        if state.engine == "horovod":
            check_horovod(state.place.device, world.current())
            gradient_bytes = sum(v.nbytes for v in model.parameters() if v.requires_grad)
            world.start_horovod(max(1, gradient_bytes), on_gpu=is_gpu(state.place.device))
        leave_together_at_exit()
        _make_equal(model, optimizers, state, action)
    place, steps = _forget(model, state)
    replica = Replica(state.prepared, model, optimizers, state, compression, period)
    replica.steps = steps
    state.prepared += 1
    state.models.insert(place, replica)
    state.undo.append(replica.close)
    return model, *optimizers


@contextmanager
def accumulate(active: bool = True) -> Iterator[None]:
    """Add up the gradients of backwards inside the block without averaging them.

    The first backward outside of it averages the sum of all of them. Use it for all micro-batches
    of a step but the last:

        with distributed.accumulate(number % 4 != 0):
            (loss / 4).backward()

    Args:
        active: False makes the block an ordinary one.
    """
    state = current()
    before, state.accumulating = state.accumulating, state.accumulating or active
    try:
        yield
    finally:
        state.accumulating = before


@contextmanager
def weight(part: float | Tensor, whole: float | Tensor | None = None) -> Iterator[None]:
    """Give the weight of this rank's loss in backwards inside the block.

    A rank's loss usually is the mean over its samples, which hvdtrain counts. If it is divided by
    something else, as with weights of classes or with `ignore_index`, give the divisor:

        with distributed.weight(class_weights[labels].sum()):
            loss.backward()

    Args:
        part: the number that the loss of this rank is divided by; the loss counts by its share of
            the sum over all ranks.
        whole: in place of this sum; `weight(1, 1)` adds up the losses of all ranks.

    Raises:
        UsageError: if a number is negative or not finite, or `whole` is 0.
    """
    numbers = float(part), None if whole is None else float(whole)
    if (
        not 0 <= numbers[0] < math.inf
        or not 0 < (1.0 if numbers[1] is None else numbers[1]) < math.inf
    ):
        raise UsageError(
            f"weight({part}, {whole}) is not possible: give finite numbers, not below 0"
        )
    state = current()
    before, state.loss_weight = state.loss_weight, numbers
    try:
        yield
    finally:
        state.loss_weight = before


def clip_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the averaged gradients down to a norm of at most `max_norm`; return the norm before.

    It is `torch.nn.utils.clip_grad_norm_`, called once per step after the last backward. The norm
    is that of the global batch, the same on all ranks.

    Raises:
        UsageError: if gradients were only accumulated, so that each rank has its own.
    """
    values = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    clipped = {id(value) for value in values}
    for model in current().models:
        assert isinstance(model, Replica)
        if model.phase is Phase.ACCUMULATED and any(id(p) in clipped for p in model.parameters):
            raise UsageError(
                "clip_norm_ needs averaged gradients, and these were only accumulated: call it "
                "after the last backward of a step, outside of `with distributed.accumulate():`"
            )
    return torch.nn.utils.clip_grad_norm_(values, max_norm, norm_type)


def _check(model: Any, optimizers: Sequence[Any]) -> None:
    """Refuse what cannot be averaged.

    Raises:
        UsageError: with the reason.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a {type(model).__name__} is not a model: give an nn.Module to prepare")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UsageError(
            f"the model is wrapped in {type(model).__name__}, which averages too: give the model "
            "itself to prepare"
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"a {type(optimizer).__name__} is not an optimizer: use one of torch.optim"
            )
        if hasattr(optimizer, "_allreduce_delay"):
            raise UsageError(
                "the optimizer is Horovod's DistributedOptimizer, which averages too: give the "
                "optimizer inside it to prepare"
            )
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(
                f"{name} is not initialised: call the model on a batch before prepare"
            )
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in (torch.float16, torch.float32, torch.float64):
            raise UsageError(
                f"{name} is {parameter.dtype}, whose gradients cannot be summed: keep parameters "
                "in torch.float32 and use torch.autocast"
            )
        if not is_dense(parameter):
            raise UsageError(f"{name} has gaps in its memory: make it of a contiguous tensor")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError("the model has no trainable parameters: there is nothing to prepare")
    known = {id(parameter) for parameter in parameters.values()}
    for optimizer in optimizers:
        if any(id(v) not in known for group in optimizer.param_groups for v in group["params"]):
            raise UsageError(
                f"the optimizer {type(optimizer).__name__} has parameters that are not the "
                "model's: make it from model.parameters() after the last change of the model "
                "(for two models, prepare nn.ModuleList([one, other]))"
            )


def _form(value: Tensor) -> str:
    shape = " x ".join(map(str, value.shape)) or "one value"
    order = "" if value.is_contiguous() else f" with strides {tuple(value.stride())}"
    return f"{shape} {str(value.dtype).removeprefix('torch.')}{order}"


@torch.no_grad()
def _make_equal(
    model: nn.Module, optimizers: Sequence[Optimizer], state: State, action: str
) -> None:
    """Give all ranks the weights, buffers and optimizer states of rank 0. Collective."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    is_first, extra = state.place.is_first, dict[str, Tensor]()
    with suppress(UsageError):  # refused where it is saved
        extra = weights.saved(model, "")
    local = fingerprint([*tensors.values(), *extra.values()])
    if len(set(state.agreement.gather(action, local))) > 1:
        values = {name: value.detach() for name, value in tensors.items()} | extra
        values = state.agreement.broadcast(action, values if is_first else None)
        for name, target in tensors.items():
            target.copy_(values[name])
        if extra.keys() & values.keys():
            weights.load(model, "", values)
    for optimizer in optimizers:
        if any(state.agreement.gather(action, bool(optimizer.state))):
            kept = state.agreement.broadcast(action, optimizer.state_dict() if is_first else None)
            if not is_first:
                optimizer.load_state_dict(kept)


def _forget(model: nn.Module, state: State) -> tuple[int, int]:
    """Remove an earlier `prepare` of this model, or of one that shares parameters.

    Returns:
        Its place among the models and its steps: checkpoints continue with them.
    """
    parameters = {id(value) for value in model.parameters()}
    place, steps = len(state.models), 0
    for number, other in enumerate(list(state.models)):
        assert isinstance(other, Replica)
        if other.model is model or any(id(value) in parameters for value in other.parameters):
            place, steps = min(place, number), max(steps, other.steps)
            other.close()
            state.undo.remove(other.close)
            state.models.remove(other)
    return place, steps
