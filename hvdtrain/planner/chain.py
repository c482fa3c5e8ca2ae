"""Times neighbouring components as a step runs them: images, forwards, backwards, updates.

Data and code are then in the same caches as in a step. A component that runs again and again alone
would find everything in the processor's caches, and would seem up to a fifth faster than it is.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.device import Mark, autocast, is_queued, mark, synchronize
from hvdtrain.parallel import halves
from hvdtrain.parallel.batchnorm import SynchronisedBatchNorm
from hvdtrain.parallel.stage import Part
from hvdtrain.plan.plan import Plan
from hvdtrain.sync.gradients import infinite

REPEATS = 5
LONG_SECONDS = 0.5
ENOUGH_SECONDS = 1.0  # fewer repeats if this is exceeded, but at least LEAST
LEAST = 3
FEWER = 3  # repeats of a chain, which is measured several times
SHORTEST = 0.06  # seconds of its repeats: short passes vary more from one to the next

Result = TypeVar("Result")
# Starts all-reduces that take the given seconds; returns a function that waits for their end.
Disturb = Callable[[float], Callable[[], None]]


@dataclass(frozen=True)
class Link:
    """A component that is ready for training.

    Attributes:
        call: runs its forward.
        parameters: the trainable ones.
        optimizer: None if updates are not timed.
    """

    call: Callable[[Tensor], Tensor]
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer | None = None


class Seconds(NamedTuple):
    """Seconds of a chain by repeat.

    Attributes:
        forward, backward: of each component: fp64 [repeats, components].
        update: of each component: optimizer step, test for finite gradients, setting them to zero:
            fp64 [repeats, components].
        load: preparing the images: fp64 [repeats, 1].
        message: posting a receive, sending one byte and receiving it: fp64 [repeats, 1].
    """

    forward: np.ndarray
    backward: np.ndarray
    update: np.ndarray
    load: np.ndarray
    message: np.ndarray


class Halves(NamedTuple):
    """Seconds of a chain's backwards in halves: fp64 [repeats, components]; NaN without halves."""

    inputs: np.ndarray
    weights: np.ndarray


class _Span(NamedTuple):
    """Two marks in the queue of the device, and what it did between them."""

    start: Mark
    end: Mark


class _Passed(NamedTuple):
    """Results of the forwards: when they ran, and the input and output of each component."""

    spans: list[_Span]
    leaves: list[Tensor]
    outputs: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Components that are in memory at the same time.

    Attributes:
        source: returns the input of the first component for a number of samples.
        is_first, is_last: whether the chain contains the first, or the last, component of the
            model.
        dtype: of autocast, in which forwards run; None without it.
        loss: returns the sum of the losses of the model's outputs.
        message: sends one byte to this rank itself; None if there are no other ranks.
    """

    links: Sequence[Link]
    source: Callable[[int], Tensor]
    device: torch.device
    is_first: bool
    is_last: bool
    dtype: torch.dtype | None
    loss: Callable[[Tensor], Tensor]
    message: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        for link in self.links:
            if link.optimizer is not None:
                for group in link.optimizer.param_groups:
                    group["lr"] = 0.0 * group["lr"]  # the weights must not diverge
            for parameter in link.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def whole(self, rows: int) -> Seconds:
        """Return the seconds of whole steps on `rows` samples."""
        repeats = repeated(lambda: self._whole(rows), SHORTEST, FEWER, least=1)
        return Seconds(*(np.array(values) for values in zip(*repeats, strict=True)))

    def in_halves(self, rows: int) -> Halves:
        """Return the seconds of backwards in halves on `rows` samples."""
        repeats = repeated(lambda: self._in_halves(rows), SHORTEST, FEWER, least=1)
        return Halves(*(np.array(values) for values in zip(*repeats, strict=True)))

    def contended(self, rows: int, disturb: Disturb, seconds: Sequence[float]) -> np.ndarray:
        """Return the seconds of backwards on `rows` samples, each beside all-reduces in flight.

        Collective: all ranks call it with the same arguments.

        Args:
            disturb: starts all-reduces before each backward.
            seconds: to disturb each component.

        Returns:
            fp64 [repeats, components].
        """
        # Not `repeated`: all ranks must repeat equally often.
        return np.array([self._contended(rows, disturb, seconds) for _ in range(FEWER)])

    def emitted(self, rows: int) -> Tensor:
        """Return the output of the last component for `rows` samples."""
        activations = self.source(rows)
        with torch.no_grad(), self._autocast():
            for link in self.links:
                activations = link.call(activations)
        return activations.detach().clone(memory_format=torch.preserve_format)

    def _whole(self, rows: int) -> tuple[list[float], ...]:
        started = self._mark()
        inputs = self.source(rows)
        load = _Span(started, self._mark())
        passed = self._forward(inputs)
        message = self._message_seconds()
        backward = list(self._backward(passed))[::-1]
        kinds = self._seconds(passed.spans, backward, self._updates(), [load])
        return *kinds, [message]

    def _message_seconds(self) -> float:
        if self.message is None:
            return 0.0
        synchronize(self.device)  # a tensor of a GPU is sent once the GPU has done what is queued
        started = time.perf_counter()
        self.message()
        return time.perf_counter() - started

    def _contended(self, rows: int, disturb: Disturb, seconds: Sequence[float]) -> list[float]:
        passes = self._backward(self._forward(self.source(rows)))
        backward = []
        for duration in reversed(seconds):
            synchronize(self.device)  # all-reduces and backward start together
            wait = disturb(duration)
            backward.append(next(passes))
            synchronize(self.device)
            wait()
        next(passes, None)
        self._updates()
        return self._seconds(backward[::-1])[0]

    def _backward(self, passed: _Passed) -> Iterator[_Span]:
        """Run the backwards, the last component first; yield when each ran."""
        gradient = self._first_gradient(passed)
        for _ in self.links:
            output, leaf = passed.outputs.pop(), passed.leaves.pop()
            start = self._mark()
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
            yield _Span(start, self._mark())
            gradient = _gradient_of(leaf)

    def _in_halves(self, rows: int) -> tuple[list[float], ...]:
        passed = self._forward(self.source(rows))
        inputs: list[_Span | None] = [None] * len(self.links)
        weights = inputs.copy()
        gradient, pending = self._first_gradient(passed), {}
        for number in reversed(range(len(self.links))):
            output, leaf = passed.outputs.pop(), passed.leaves.pop()
            parameters = list(self.links[number].parameters)
            if output.requires_grad and leaf.requires_grad and parameters:
                start = self._mark()
                pending[number] = halves.backward_input(output, gradient, leaf, parameters)
                inputs[number] = _Span(start, self._mark())
            elif output.requires_grad:
                torch.autograd.backward(output, gradient)
            gradient = _gradient_of(leaf)
        for number in list(pending):
            start = self._mark()
            halves.backward_weight(pending.pop(number))
            weights[number] = _Span(start, self._mark())
        return self._seconds(inputs, weights)

    def _forward(self, activations: Tensor) -> _Passed:
        """Run all forwards and keep what the backwards need."""
        passed = _Passed([], [], [])
        for place, link in enumerate(self.links):
            is_images = self.is_first and place == 0
            leaf = activations.detach().requires_grad_(
                not is_images and activations.is_floating_point()
            )
            start = self._mark()
            with self._autocast():
                output = link.call(leaf)
            if self.is_last and place == len(self.links) - 1:
                output = self.loss(output if output.dtype == torch.float64 else output.float())
            passed.spans.append(_Span(start, self._mark()))
            passed.leaves.append(leaf)
            passed.outputs.append(output)
            activations = output
        return passed

    def _first_gradient(self, passed: _Passed) -> Tensor | None:
        return None if self.is_last else torch.ones_like(passed.outputs[-1])

    def _updates(self) -> list[_Span]:
        spans = []
        for link in self.links:
            gradients = [value.grad for value in link.parameters if value.grad is not None]
            start = self._mark()
            if link.optimizer is not None:
                bad = infinite(gradients)
                if not is_queued(self.device):  # a GPU's verdict is read a step later
                    bool(bad)
                link.optimizer.step()
            for gradient in gradients:
                gradient.zero_()
            spans.append(_Span(start, self._mark()))
        return spans

    def _autocast(self) -> Any:
        return autocast(self.device, self.dtype)

    def _mark(self) -> Mark:
        return mark(self.device)

    def _seconds(self, *kinds: Sequence[_Span | None]) -> tuple[list[float], ...]:
        """Return the seconds of spans once the device has done them; NaN for None."""
        synchronize(self.device)
        return tuple(
            [np.nan if span is None else span.end - span.start for span in spans]
            for spans in kinds
        )


def repeated(
    once: Callable[[], Result],
    least_seconds: float = 0.0,
    most: int = REPEATS,
    least: int = LEAST,
) -> list[Result]:
    """Repeat a measurement and return all of its results.

    The first repeat is dropped as a warm-up, unless it takes longer than LONG_SECONDS: then a
    warm-up does not matter.

    Args:
        least_seconds: how long to repeat at least.
        most: repeats, unless `least_seconds` needs more.
        least: repeats, however long they take.
    """
    started = time.perf_counter()
    first, seconds = once(), time.perf_counter() - started
    repeats = [first] if seconds > LONG_SECONDS else []
    while len(repeats) < least or (
        seconds <= max(ENOUGH_SECONDS, least_seconds)
        and (len(repeats) < most or seconds < least_seconds)
    ):
        repeats.append(once())
        seconds = time.perf_counter() - started
    return repeats


@contextmanager
def without_gathering(plan: Plan, parts: Mapping[int, Part]) -> Iterator[None]:
    """Let synchronised batch norms see as many replicas as there are, without communication."""
    layers = {
        layer: (stage, layer.all_gather)
        for stage, part in parts.items()
        for component in part.model.components.values()
        for layer in component.modules()
        if isinstance(layer, SynchronisedBatchNorm)
    }
    for layer, (stage, _) in layers.items():
        layer.all_gather = partial(_expanded, len(plan.stages[stage].ranks))
    try:
        yield
    finally:
        for layer, (_, all_gather) in layers.items():
            layer.all_gather = all_gather


def _expanded(times: int, tensor: Tensor) -> Tensor:
    return tensor.expand(times, *tensor.shape)


def _gradient_of(leaf: Tensor) -> Tensor | None:
    """Return the gradient of a component's input.

    It is zeros if nothing depends on the input, and None for images.
    """
    if not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
