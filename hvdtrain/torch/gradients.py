"""A prepared model: its gradients become, during each backward, those of the global batch.

Autograd leaves the gradient of a parameter in new memory. A hook multiplies it by the share that
this rank has of the global batch, adds it to its place in a flat bucket (`hvdtrain.parallel`) and
frees the rest: that is the only copy. Buckets are summed while backward continues. After the last
micro-batch of a step `parameter.grad` is the gradient of the mean loss over the global batch, the
same bits on all ranks. Clipping, GradScaler and the optimizer then need not know of other ranks.
"""

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from hvdtrain.errors import UsageError
from hvdtrain.plan.cut import Share
from hvdtrain.sync.saved import Kept
from hvdtrain.torch.agreement import Action, Note
from hvdtrain.torch.hooks import ForwardWatch, parameter_hooks, watched
from hvdtrain.torch.reduction import MadeBy, Reduction, reduction_of, stop_flags
from hvdtrain.torch.state import Batch, State

MOST_IDLE = 100  # backwards in a row without a step: a GradScaler leaves out a few


class Phase(Enum):
    """The last thing that happened to the gradients."""

    EMPTY = "nothing"
    ACCUMULATED = "a backward inside `accumulate`"
    REDUCED = "a backward whose gradients were averaged"
    STEPPED = "a step of the optimizer"


@dataclass
class Window:
    """The micro-batches whose gradients are added up for one step.

    Attributes:
        touched: places of the parameters that have a gradient.
    """

    batches: list[Batch] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)

    def clear(self) -> None:
        """Forget all of it."""
        self.batches.clear()
        self.touched.clear()

    @property
    def total(self) -> int:
        """Samples of all ranks."""
        return sum(batch.total for batch in self.batches)

    def share(self, rank: int) -> Share:
        """Return the weight of this rank's running statistics."""
        samples = sum(batch.samples for batch in self.batches)
        first, total = self.batches[-1].first == rank, self.total
        return Share(samples / total if total else 0.0, first, samples, total)


class Replica:
    """This rank's replica of a model, with hooks on its parameters.

    Attributes:
        views: the gradients of `parameters` in the buckets.
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
        made_by: MadeBy = Reduction,
    ) -> None:
        self.number, self.model, self.optimizers, self.state = number, model, [*optimizers], state
        named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.names, self.parameters = list(named), list(named.values())
        self.window, self.phase = Window(), Phase.EMPTY
        self.backwards = self.steps = self.idle = 0
        self.samples: int | None = None
        self._weight = 1.0
        self._leftover: list[Tensor | None] = []
        self._is_queued = self._is_running = self._has_arrived = self._counting = False
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
        self.reduction = reduction_of(number, model, named, state, made_by)
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
        touched = self.window.touched
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
        self._post_count()
        if self._counting and not self.state.accumulating and not self.window.batches:
            # Not to wait for the other ranks here: whole buckets are weighted before their sums.
            self._weight, self.reduction.weight = 1.0, self._weight_of_last
            self.reduction.announce(Share(1.0, True))
            return
        self._weight, self.reduction.weight = self._weight_of_last(), None
        if not self.state.accumulating:
            self.reduction.announce(self.window.share(self.state.place.rank))

    def _continue_window(self) -> None:
        """Keep what was accumulated, unless the user has cleared it."""
        touched = self.window.touched
        for place, gradient in enumerate(self._leftover):
            if gradient is None:
                touched.discard(place)
            elif gradient is not self.views[place]:
                self.views[place].copy_(gradient)
        if not touched:
            self.window.clear()

    def _start_window(self) -> None:
        """Start a step, in which no gradients of an earlier one may be left.

        Raises:
            UsageError: if there are any.
        """
        left = [gradient for gradient in self._leftover if gradient is not None]
        if any(bool(gradient.any()) for gradient in left):
            if self.phase is Phase.REDUCED:
                raise UsageError(
                    "backward ran twice without a step of the optimizer in between, which would "
                    "average the first gradients again: run all but the last backward of a step "
                    "inside `with distributed.accumulate():`"
                )
            raise UsageError(
                "the gradients of the last step are still there, and backward would add to them: "
                "call optimizer.zero_grad() before backward"
            )
        self.window.clear()
        self.idle += self.phase is Phase.REDUCED
        if self.idle >= MOST_IDLE:
            raise UsageError(self._never_steps())

    def _post_count(self) -> None:
        """Note this rank's share of the batch; without a loader start to exchange its size.

        Raises:
            UsageError: if nothing knows the size.
        """
        state = self.state
        if state.batch is not None:
            self.window.batches.append(state.batch)
            return
        if self.samples is None:
            raise UsageError(
                "the number of samples of this backward is not known, since the model was not "
                "called after its last step: call the prepared model, not its layers or its "
                "forward, or use distributed.loader"
            )
        samples = self.samples
        if state.sampler is not None:
            samples = state.sampler.size_of_next(samples, state.models.index(self))
        if state.place.size == 1:
            self.window.batches.append(Batch(samples, samples))
            return
        self._counting = True
        note = Note(Action.COUNTING, self.number, self.backwards + 1, samples=samples)
        state.agreement.post(note)
        state.agreement.settle = self._weight_of_last

    def _weight_of_last(self) -> float:
        """Return the weight of this rank in the batch, once all ranks have counted theirs."""
        state = self.state
        if self._counting:
            self._counting, state.agreement.settle = False, None
            counts = [note.samples for note in state.agreement.read()]
            total = sum(counts)
            if state.sampler is not None:
                state.sampler.check_total(total, state.models.index(self))
            first = next((rank for rank, count in enumerate(counts) if count), 0)
            self.window.batches.append(Batch(counts[state.place.rank], total, first))
        return self.window.batches[-1].weight

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
            self.phase, unused = Phase.ACCUMULATED, self._missing()
        else:
            self.phase, unused = Phase.REDUCED, self._reduce()
        for place, parameter in enumerate(self.parameters):
            parameter.grad = None if place in unused else self.views[place]

    def _missing(self) -> set[int]:
        return set(range(len(self.parameters))) - self.window.touched

    def _reduce(self) -> set[int]:
        """Sum the gradients over the ranks; return the parameters that no rank used."""
        missing, window, state = self._missing(), self.window, self.state
        self._weight_of_last()
        for place in missing:
            self.views[place].zero_()
        self.backwards += 1
        self.reduction.start(window.share(state.place.rank))
        interrupted, preempted = stop_flags(state.stop)
        state.agreement.post(
            Note(
                Action.REDUCING,
                self.number,
                self.backwards,
                position=window.batches[-1].end,
                samples=window.batches[-1].samples,
                missing=len(missing),
                missing_digest=_digest(missing),
                fingerprint=self.reduction.fingerprint(self.backwards),
                changed=self.reduction.changed(),
                interrupted=interrupted,
                preempted=preempted,
            )
        )
        notes = state.agreement.read()
        self.reduction.finish()
        state.stop_code = state.stop_code or self.reduction.judge(notes, window.batches[-1].first)
        if not all(note.missing for note in notes):
            return set()
        if len({note.missing_digest for note in notes}) == 1:
            return missing
        comparing = Note(Action.COMPARING, self.number, self.backwards)
        return set.intersection(*state.agreement.gather(comparing, missing))

    # Steps

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
        self._check_parameters()
        self._check_optimizers()
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
        state = self.state
        if self.phase is Phase.REDUCED:
            last = self.window.batches[-1]
            if last.source:
                state.positions[last.source] = last.end
            elif state.sampler is not None:
                window = self.window
                place = state.models.index(self)
                state.sampler.advance(len(window.batches), window.total, place)
        self.phase = Phase.STEPPED
        self.reduction.after_step(self.steps)

    def meet(self) -> None:
        """Let ranks that train apart agree. Collective."""
        self.reduction.meet()

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

    def _check_parameters(self) -> None:
        now = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        if [*map(id, now.values())] == [*map(id, self.parameters)]:
            return
        before = dict(zip(self.names, self.parameters, strict=True))
        names = [name for name in {**now, **before} if now.get(name) is not before.get(name)]
        what = "is no longer trained" if names[0] not in now else "is new"
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise UsageError(
            f"the model has changed since prepare: {names[0]} {what}{more}: call "
            "distributed.prepare(model, optimizer) again after the change"
        )

    def _check_optimizers(self) -> None:
        known = {id(value) for value in self.parameters}
        for optimizer in self.optimizers:
            stepped = [value for group in optimizer.param_groups for value in group["params"]]
            if any(value.requires_grad and id(value) not in known for value in stepped):
                raise UsageError(
                    f"an optimizer {type(optimizer).__name__} has got parameters that are not the "
                    "model's, whose gradients are not averaged: add their layers to the model, "
                    "and call distributed.prepare(model, optimizer) again after the change"
                )


def _digest(places: set[int]) -> int:
    return zlib.crc32(np.array(sorted(places), np.int64).tobytes())
