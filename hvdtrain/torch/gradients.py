"""A prepared model: its gradients become, during each backward, those of the global batch.

Autograd leaves the gradient of a parameter in new memory. A hook multiplies it by the share that
this rank has of the global batch, adds it to its place in a flat bucket (`hvdtrain.parallel`) and
frees the rest: that is the only copy. Buckets are summed while backward continues. After the last
micro-batch of a step `parameter.grad` is the gradient of the mean loss over the global batch, the
same bits on all ranks. Clipping, GradScaler and the optimizer then need not know of other ranks.
"""

import math
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from hvdtrain.engine.agreement import check_alike
from hvdtrain.errors import UsageError
from hvdtrain.options.requests import CompressRequest
from hvdtrain.plan.cut import Share
from hvdtrain.sync.states import Kept
from hvdtrain.torch.reading import Batch, ForwardWatch, parameter_hooks, watched
from hvdtrain.torch.reduction import reduction_of
from hvdtrain.torch.start import State

MOST_IDLE = 100  # backwards in a row without a step: a GradScaler leaves out a few


class Phase(Enum):
    """The last thing that happened to the gradients."""

    EMPTY = "nothing"
    ACCUMULATED = "a backward inside `accumulate`"
    REDUCED = "a backward whose gradients were averaged"
    STEPPED = "a step of the optimizer"


class Replica:
    """This rank's replica of a model, with hooks on its parameters.

    Attributes:
        views: the gradients of `parameters` in the buckets.
        batches: the micro-batches whose gradients are added up for one step.
        touched: places of the parameters that have a gradient of them.
        backwards: number of backwards whose gradients were averaged.
        steps: number of steps of its optimizers.
        idle: backwards without a step since the last step.
    """

    def __init__(
        self,
        number: int,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        state: State,
        compression: CompressRequest,
        period: int | None,
    ) -> None:
        self.number, self.model, self.optimizers, self.state = number, model, [*optimizers], state
        named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.names, self.parameters = list(named), list(named.values())
        self.phase = Phase.EMPTY
        self.batches: list[Batch] = []
        self.touched: set[int] = set()
        self.backwards = self.steps = self.idle = 0
        self.samples: int | None = None
        self._weight = 1.0
        self._stepped: list[tuple[int, int]] = []
        self._leftover: list[Tensor | None] = []
        self._is_queued = self._is_running = self._has_arrived = False
        self._watch = ForwardWatch(weakref.ref(self))
        self._handles: list[Any] = [
            module.register_forward_hook(self._watch, with_kwargs=True)
            for module in watched(model)
        ]
        for place, parameter in enumerate(self.parameters):
            before, after = parameter_hooks(weakref.ref(self), place)
            self._handles.append(parameter.register_hook(before))
            # Before the hooks of the buckets, which may start a reduction.
            self._handles.append(parameter.register_post_accumulate_grad_hook(after))
        self.reduction = reduction_of(number, model, optimizers[0], state, compression, period)
        self.kept: Kept = self.reduction
        self.views = [cast(Tensor, parameter.grad) for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Before and during backward

    def queue(self) -> None:
        """Have `_end` called once the running backward is over."""
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._end)

    def begin(self) -> None:
        """Set the gradients of earlier backwards aside, before autograd can add to one."""
        self.queue()
        if not self._is_running:
            self._is_running = True
            self._leftover = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None

    @torch.no_grad()
    def arrived(self, place: int) -> None:
        """Add the new gradient of a parameter to its bucket, weighted.

        Raises:
            UsageError: if it is sparse, or this backward should not have run.
        """
        if not self._has_arrived:
            self._has_arrived = True
            self._open()
        parameter, view = self.parameters[place], self.views[place]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "autograd has added to it"
        if gradient.layout != torch.strided:
            raise UsageError(
                f"the gradient of {self.names[place]} is sparse, which cannot be averaged: use "
                "sparse=False in its layer"
            )
        if gradient.dtype != view.dtype or gradient.device != view.device:
            raise UsageError(
                f"{self.names[place]} was {view.dtype} on {view.device} at prepare, and is "
                f"{gradient.dtype} on {gradient.device} now: call "
                "distributed.prepare(model, optimizer) after the change"
            )
        touched = self.touched
        if self._weight == 0.0:  # a placeholder's gradient may be NaN
            if place not in touched:
                view.zero_()
        elif place in touched:
            view.add_(gradient.detach(), alpha=self._weight)
        else:
            torch.mul(gradient.detach(), self._weight, out=view)
        touched.add(place)

    def _open(self) -> None:
        """Start a backward whose first gradient has arrived."""
        self._continue_window() if self.phase is Phase.ACCUMULATED else self._start_window()
        self.batches.append(self._next_batch())
        self._weight = self.batches[-1].weight
        if not self.state.accumulating:
            self.reduction.announce(self._share)

    def _next_batch(self) -> Batch:
        """Return the batch of this backward, once all ranks know its samples and weights.

        Raises:
            UsageError: if nothing knows the samples.
        """
        state = self.state
        batch = state.use_batch()
        if batch is None and self.samples is None:
            raise UsageError(
                "the number of samples of this backward is not known, since the model was not "
                "called after its last step: call the prepared model, not its layers or its "
                "forward, or use distributed.loader or distributed.sampler"
            )
        batch = batch or Batch(self.samples or 0, -1)
        is_weighted = state.loss_weight is not None and self.reduction.is_exact
        part, whole = state.loss_weight if is_weighted and state.loss_weight else (0.0, 1.0)
        if not batch.samples:
            part = 0.0  # labels of a placeholder have a weight, too
        if batch.total < 0 or whole is None:
            action = (
                f"counting the samples of backward {self.backwards + 1} of model {self.number}"
            )
            bits = int(np.float64(part).view(np.int64))
            notes = state.agreement.exchange(action, samples=batch.samples, weight=bits)
            if batch.total < 0:
                counts = [note.samples for note in notes]
                first = next((rank for rank, count in enumerate(counts) if count), 0)
                batch = replace(batch, total=sum(counts), first=first)
            if whole is None:
                whole = math.fsum(float(np.int64(n.weight).view(np.float64)) for n in notes)
        if is_weighted:
            batch = replace(batch, factor=part / whole if whole else 0.0)
        return batch

    @property
    def _share(self) -> Share:
        """The weight of this rank's running statistics."""
        samples = sum(batch.samples for batch in self.batches)
        total = sum(batch.total for batch in self.batches)
        is_first = self.batches[-1].first == self.state.place.rank
        return Share(samples / total if total else 0.0, is_first, samples)

    def _continue_window(self) -> None:
        """Keep what was accumulated, unless the user has cleared it."""
        for place, gradient in enumerate(self._leftover):
            if gradient is None:
                self.touched.discard(place)
            elif gradient is not self.views[place]:
                self.views[place].copy_(gradient)
        if not self.touched:
            self.batches.clear()

    def _start_window(self) -> None:
        """Start a step, in which no gradients of an earlier one may be left.

        Raises:
            UsageError: if there are any.
        """
        left = [gradient for gradient in self._leftover if gradient is not None]
        if any(bool(gradient.any()) for gradient in left):
            if self.phase is Phase.REDUCED:
                raise UsageError(
                    f"backward ran twice without a step of {self._optimizer}, which would average "
                    "the first gradients again: run all but the last backward of a step inside "
                    "`with distributed.accumulate():`"
                )
            raise UsageError(
                "the gradients of the last step are still there, and backward would add to them: "
                f"call zero_grad() of {self._optimizer} before each backward through this model"
            )
        self.batches.clear()
        self.touched.clear()
        self.idle += self.phase is Phase.REDUCED
        if self.idle >= MOST_IDLE:
            raise UsageError(self._never_steps())

    @property
    def _optimizer(self) -> str:
        kinds = " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        place = self.state.models.index(self)
        return f"the {kinds} of model {place} ({type(self.model).__name__})"

    # After backward

    @torch.no_grad()
    def _end(self) -> None:
        """End a backward: average the gradients, unless more are accumulated."""
        self._is_queued = False
        if not self._is_running:
            return
        self._is_running = False
        if not self._has_arrived:  # torch.autograd.grad, which leaves no gradients
            for parameter, gradient in zip(self.parameters, self._leftover, strict=True):
                parameter.grad = gradient
            return
        self._has_arrived = False
        self._leftover = []
        if self.state.accumulating:
            places = range(len(self.parameters))
            self.phase, unused = Phase.ACCUMULATED, set(places) - self.touched
        else:
            self.phase, unused = Phase.REDUCED, self._reduce()
        for place, parameter in enumerate(self.parameters):
            parameter.grad = None if place in unused else self.views[place]
        self.state.note_positions(at_ends=True)  # the last batch may have no step of its own

    def _reduce(self) -> set[int]:
        """Sum the gradients over the ranks; return the parameters that no rank used.

        Raises:
            UsageError: on all ranks, if their optimizers have other options, as by schedulers.
        """
        state, batch = self.state, self.batches[-1]
        missing = set(range(len(self.parameters))) - self.touched
        for place in missing:
            self.views[place].zero_()
        self.backwards += 1
        self.reduction.start(self._share)
        read = f" after {batch.end} samples" if batch.end >= 0 else ""
        notes = state.agreement.exchange(
            f"in backward {self.backwards} of model {self.number}{read}",
            missing=len(missing),
            missing_digest=zlib.crc32(repr(sorted(missing)).encode()),
            fingerprint=self.reduction.fingerprint(self.backwards),
            changed=len(self.reduction.changed()),
            interrupted=state.stop is not None and state.stop.interrupted,
            preempted=state.stop is not None and state.stop.preempted,
            settings=digest(self.optimizers) if state.place.size > 1 else 0,
            contents=state.contents,
        )
        self.reduction.finish()
        comparing = f"comparing model {self.number} after backward {self.backwards}"
        if len({note.settings for note in notes}) > 1:
            facts = {"optimizer": settings(self.optimizers, {})}
            check_alike(
                state.agreement.gather(comparing, facts),
                "give schedulers numbers that are the same on all ranks, as of "
                "distributed.evaluate or distributed.total",
            )
        state.compare_contents([note.contents for note in notes])
        state.stop_code = state.stop_code or self.reduction.judge(notes, batch.first)
        if not all(note.missing for note in notes):
            return set()
        if len({note.missing_digest for note in notes}) == 1:
            return missing
        return set.intersection(*state.agreement.gather(comparing, missing))

    # Steps

    def of_all_ranks(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure that returns the loss of the global batch: optimizers decide by it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.idle = 0  # an optimizer may evaluate it many times in a step
            loss = closure(*args, **kwargs)
            is_number = isinstance(loss, float) or (isinstance(loss, Tensor) and not loss.dim())
            if not (is_number and self.reduction.is_exact and self.batches):
                return loss
            weight = self.batches[-1].weight
            number = float(loss.detach() if isinstance(loss, Tensor) else loss)
            part = number * weight if weight else 0.0
            action = f"adding up the losses of backward {self.backwards} of model {self.number}"
            whole = math.fsum(self.state.agreement.gather(action, part))
            return torch.full_like(loss, whole) if isinstance(loss, Tensor) else whole

        return call

    def before_step(self, with_closure: bool) -> None:
        """Refuse a step that would be wrong.

        Raises:
            UsageError: if gradients are not averaged, or the model has other parameters.
        """
        if self._is_queued:  # autograd drops its callbacks when backward raises
            raise UsageError(
                "a backward ended with an exception that was caught, so the gradients are lost: "
                "do not catch exceptions of backward, and resume from a checkpoint"
            )
        known = {id(value) for value in self.parameters}
        now = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        if {*map(id, now.values())} != known:
            before = dict(zip(self.names, self.parameters, strict=True))
            names = [name for name in {**now, **before} if now.get(name) is not before.get(name)]
            what = "is no longer trained" if names[0] not in now else "is new"
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise UsageError(
                f"the model has changed since prepare: {names[0]} {what}{more}: call "
                "distributed.prepare(model, optimizer) again after the change"
            )
        for optimizer in self.optimizers:
            stepped = [value for group in optimizer.param_groups for value in group["params"]]
            if any(value.requires_grad and id(value) not in known for value in stepped):
                raise UsageError(
                    f"an optimizer {type(optimizer).__name__} has got parameters that are not the "
                    "model's, whose gradients are not averaged: add their layers to the model, "
                    "and call distributed.prepare(model, optimizer) again after the change"
                )
        if self.phase is Phase.ACCUMULATED and not with_closure:
            raise UsageError(
                "the optimizer steps with gradients that were only accumulated: run the last "
                "backward of a step outside of `with distributed.accumulate():`"
            )

    def after_step(self) -> None:
        """Note that the samples of the window are in the weights."""
        self.steps += 1
        self.idle = 0
        self.samples = None
        if self.phase is Phase.REDUCED:
            self.state.note_positions()
        self.phase, self._stepped = Phase.STEPPED, self._versions()
        self.reduction.meetings.after_step(self.steps)

    def meet(self) -> None:
        """Let ranks with local steps agree. Collective."""
        self.reduction.meetings.meet()

    @property
    def is_as_stepped(self) -> bool:
        """Return whether the weights are those of the last step, the same on all ranks."""
        return self.reduction.is_exact and self._stepped == self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        return [(value.data_ptr(), value._version) for value in self.parameters]

    def check_steps(self) -> None:
        """Refuse a loop that runs backward and never steps.

        Raises:
            UsageError: if there was no step.
        """
        if self.backwards > 1 and not self.steps:
            raise UsageError(self._never_steps())

    def _never_steps(self) -> str:
        return (
            f"backward ran {max(self.backwards, self.idle)} times and the optimizer given to "
            "prepare did not step: call optimizer.step() after backward, on the optimizer that "
            "prepare returned"
        )


def settings(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]
) -> dict[str, str]:
    """Return the classes and options of optimizers.

    Args:
        names: of the parameters, by their identity.
    """
    result: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        result[f"class of optimizer {number}"] = type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                what = [names.get(id(item)) for item in value] if key == "params" else value
                shown = what.tolist() if isinstance(what, Tensor) else what
                result[f"{key} of group {place} of optimizer {number}"] = str(shown)
    return result


def digest(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return a checksum of the learning rates and of all other numbers of optimizers."""
    numbers = [
        float(value)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for key, value in group.items()
        if isinstance(value, (int, float)) or key == "lr"
    ]
    return zlib.crc32(repr(numbers).encode())
