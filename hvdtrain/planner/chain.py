"""Times neighbouring components as a step runs them: images, forwards, backwards, updates.

Data and code are then in the same caches as in a step. A component that runs again and again alone
would find everything in the processor's caches, and would seem up to a fifth faster than it is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.parallel import halves
from hvdtrain.parallel.reduce import all_finite
from hvdtrain.parallel.stage import StageModel

REPEATS = 5
LONG_SECONDS = 0.5
ENOUGH_SECONDS = 1.0  # for one size: fewer repeats if this is exceeded, but at least LEAST
LEAST = 3


@dataclass(frozen=True)
class Built:
    """A component that is ready for training; with an optimizer if it has parameters."""

    model: StageModel
    optimizer: torch.optim.Optimizer | None


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


@dataclass
class Chain:
    """Components that are in memory at the same time.

    Attributes:
        source: returns the input of the first component for a number of samples.
        is_first, is_last: whether the chain contains the first, or the last, component of the
            model.
        is_bf16: whether forwards run under autocast.
        message: sends one byte to this rank itself; None if there are no other ranks.
    """

    built: Sequence[Built]
    source: Callable[[int], Tensor]
    is_first: bool
    is_last: bool
    is_bf16: bool
    message: Callable[[], None] | None = None
    leaves: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        for part in self.built:
            if part.optimizer is not None:
                for group in part.optimizer.param_groups:
                    group["lr"] = 0.0 * group["lr"]  # the weights must not diverge
            for parameter in part.model.parameters().values():
                parameter.grad = torch.zeros_like(parameter)

    def whole(self, rows: int) -> Seconds:
        """Return the seconds of whole steps on `rows` samples."""
        return Seconds(*repeated(lambda: self._whole(rows)))

    def in_halves(self, rows: int) -> Halves:
        """Return the seconds of backwards in halves on `rows` samples."""
        return Halves(*repeated(lambda: self._in_halves(rows)))

    def emitted(self, rows: int) -> Tensor:
        """Return the output of the last component for `rows` samples."""
        activations = self.source(rows)
        with torch.no_grad(), self._autocast(activations):
            for part in self.built:
                activations = part.model(activations)
        return activations.detach().clone(memory_format=torch.preserve_format)

    def _whole(self, rows: int) -> tuple[list[float], ...]:
        place = self.source(0)
        began = now(place)
        inputs = self.source(rows)
        loaded = now(place)
        forward = self._forward(inputs)
        turned = now(place)
        if self.message is not None:
            self.message()
        message = now(place) - turned
        backward = [0.0] * len(self.built)
        gradient = self._first_gradient()
        for number in reversed(range(len(self.built))):
            output, leaf = self.outputs.pop(), self.leaves.pop()
            since = now(inputs)
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
            backward[number] = now(inputs) - since
            gradient = _gradient_of(leaf)
        return forward, backward, self._updates(place), [loaded - began], [message]

    def _in_halves(self, rows: int) -> tuple[list[float], ...]:
        images = self.source(rows)
        self._forward(images)
        input_seconds, weight_seconds = [np.nan] * len(self.built), [np.nan] * len(self.built)
        gradient, pending = self._first_gradient(), {}
        for number in reversed(range(len(self.built))):
            output, leaf = self.outputs.pop(), self.leaves.pop()
            if output.requires_grad and self._splits(number, leaf):
                parameters = list(self.built[number].model.parameters().values())
                began = now(images)
                pending[number] = halves.backward_input(output, gradient, leaf, parameters)
                input_seconds[number] = now(images) - began
            elif output.requires_grad:
                torch.autograd.backward(output, gradient)
            gradient = _gradient_of(leaf)
        for number in list(pending):
            began = now(images)
            halves.backward_weight(pending.pop(number))
            weight_seconds[number] = now(images) - began
        return input_seconds, weight_seconds

    def _splits(self, place: int, leaf: Tensor) -> bool:
        """Return whether the backward of a component has two halves."""
        return leaf.requires_grad and bool(self.built[place].model.parameters())

    def _forward(self, activations: Tensor) -> list[float]:
        """Run all forwards and keep what the backwards need; return their seconds."""
        seconds = []
        for place, part in enumerate(self.built):
            is_images = self.is_first and place == 0
            leaf = activations.detach().requires_grad_(
                not is_images and activations.is_floating_point()
            )
            began = now(activations)
            with self._autocast(activations):
                output = part.model(leaf)
            if self.is_last and place == len(self.built) - 1:
                labels = torch.zeros(len(output), dtype=torch.int64, device=output.device)
                logits = output if output.dtype == torch.float64 else output.float()
                output = functional.cross_entropy(logits, labels, reduction="sum")
            seconds.append(now(activations) - began)
            self.leaves.append(leaf)
            self.outputs.append(output)
            activations = output
        return seconds

    def _first_gradient(self) -> Tensor | None:
        return None if self.is_last else torch.ones_like(self.outputs[-1])

    def _updates(self, place: Tensor) -> list[float]:
        seconds = []
        for part in self.built:
            gradients = [value.grad for value in part.model.parameters().values()]
            held = [gradient for gradient in gradients if gradient is not None]
            began = now(place)
            if part.optimizer is not None:
                all_finite(held)
                part.optimizer.step()
                for gradient in held:
                    gradient.zero_()
            seconds.append(now(place) - began)
        return seconds

    def _autocast(self, tensor: Tensor) -> Any:
        return torch.autocast(tensor.device.type, dtype=torch.bfloat16, enabled=self.is_bf16)


def repeated(once: Callable[[], tuple[list[float], ...]]) -> list[np.ndarray]:
    """Repeat a measurement and return one array [repeats, n] for each list that it returns.

    The first repeat is dropped as a warm-up, unless it takes longer than LONG_SECONDS: then a
    warm-up does not matter.
    """
    began = time.perf_counter()
    first = once()
    repeats = [first] if time.perf_counter() - began > LONG_SECONDS else []
    while len(repeats) < REPEATS:
        repeats.append(once())
        if len(repeats) >= LEAST and time.perf_counter() - began > ENOUGH_SECONDS:
            break
    return [np.array(values) for values in zip(*repeats, strict=True)]


def now(tensor: Tensor) -> float:
    """Return the clock after the tensor's device has finished all its work."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


def _gradient_of(leaf: Tensor) -> Tensor | None:
    """Return the gradient of a component's input.

    It is zeros if nothing depends on the input, and None for images.
    """
    if not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
