"""Times neighbouring components as a step runs them: images, forwards, backwards, updates.

What each of them reads, data and code, is then where it is in a step. One component again and
again would find all of it in the processor's caches, and seem up to a fifth faster than it is.
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
ENOUGH_SECONDS = 1.0  # of one size: fewer repeats then, but no fewer than LEAST
LEAST = 3


@dataclass(frozen=True)
class Built:
    """A component, ready to be trained, with its optimizer if it has anything to train."""

    model: StageModel
    optimizer: torch.optim.Optimizer | None


class Seconds(NamedTuple):
    """Of a chain, by repeat: fp64 [repeats, components], and [repeats, 1] of what it has once.

    Attributes:
        update: of the optimizer, of looking whether gradients are numbers, of making them zero.
        load: of making images ready.
        message: of posting a receipt, sending next to nothing, and taking it in.
    """

    forward: np.ndarray
    backward: np.ndarray
    update: np.ndarray
    load: np.ndarray
    message: np.ndarray


class Halves(NamedTuple):
    """Of a chain, by repeat: fp64 [repeats, components]; no numbers where nothing is split."""

    inputs: np.ndarray
    weights: np.ndarray


@dataclass
class Chain:
    """Components that are built at the same time.

    Attributes:
        source: what its first component is given, of so many samples.
        is_first, is_last: whether the chain begins, or ends, the model.
        is_bf16: whether forwards run under autocast.
        message: hands next to nothing to this rank itself, if there are other ranks.
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
                    group["lr"] = 0.0 * group["lr"]  # what is measured shall not run away
            for parameter in part.model.parameters().values():
                parameter.grad = torch.zeros_like(parameter)

    def whole(self, rows: int) -> Seconds:
        """Steps on some samples."""
        return Seconds(*repeated(lambda: self._whole(rows)))

    def in_halves(self, rows: int) -> Halves:
        """Backwards in halves on some samples."""
        return Halves(*repeated(lambda: self._in_halves(rows)))

    def emitted(self, rows: int) -> Tensor:
        """What comes out behind the last component."""
        given = self.source(rows)
        with torch.no_grad(), self._autocast(given):
            for part in self.built:
                given = part.model(given)
        return given.detach().clone(memory_format=torch.preserve_format)

    def _whole(self, rows: int) -> tuple[list[float], ...]:
        place = self.source(0)
        began = now(place)
        given = self.source(rows)
        loaded = now(place)
        forward = self._forward(given)
        turned = now(place)
        if self.message is not None:
            self.message()
        message = now(place) - turned
        backward = [0.0] * len(self.built)
        gradient = self._first_gradient()
        for number in reversed(range(len(self.built))):
            output, leaf = self.outputs.pop(), self.leaves.pop()
            since = now(given)
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
            backward[number] = now(given) - since
            gradient = _gradient_of(leaf)
        return forward, backward, self._updates(place), [loaded - began], [message]

    def _in_halves(self, rows: int) -> tuple[list[float], ...]:
        given = self.source(rows)
        self._forward(given)
        inputs, weights = [np.nan] * len(self.built), [np.nan] * len(self.built)
        gradient, pending = self._first_gradient(), {}
        for number in reversed(range(len(self.built))):
            output, leaf = self.outputs.pop(), self.leaves.pop()
            if output.requires_grad and self._splits(number, leaf):
                parameters = list(self.built[number].model.parameters().values())
                began = now(given)
                pending[number] = halves.backward_input(output, gradient, leaf, parameters)
                inputs[number] = now(given) - began
            elif output.requires_grad:
                torch.autograd.backward(output, gradient)
            gradient = _gradient_of(leaf)
        for number in list(pending):
            began = now(given)
            halves.backward_weight(pending.pop(number))
            weights[number] = now(given) - began
        return inputs, weights

    def _splits(self, place: int, leaf: Tensor) -> bool:
        """Whether a backward has two halves."""
        return leaf.requires_grad and bool(self.built[place].model.parameters())

    def _forward(self, given: Tensor) -> list[float]:
        """Run all forwards, keeping what the backwards need."""
        seconds = []
        for place, part in enumerate(self.built):
            is_images = self.is_first and place == 0
            leaf = given.detach().requires_grad_(not is_images and given.is_floating_point())
            began = now(given)
            with self._autocast(given):
                output = part.model(leaf)
            if self.is_last and place == len(self.built) - 1:
                labels = torch.zeros(len(output), dtype=torch.int64, device=output.device)
                logits = output if output.dtype == torch.float64 else output.float()
                output = functional.cross_entropy(logits, labels, reduction="sum")
            seconds.append(now(given) - began)
            self.leaves.append(leaf)
            self.outputs.append(output)
            given = output
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

    def _autocast(self, given: Tensor) -> Any:
        return torch.autocast(given.device.type, dtype=torch.bfloat16, enabled=self.is_bf16)


def repeated(once: Callable[[], tuple[list[float], ...]]) -> list[np.ndarray]:
    """Several measurements: for each list that is given [repeats, n].

    The first one is dropped, unless it is so long that what is new to it does not matter.
    """
    began = time.perf_counter()
    first = once()
    found = [first] if time.perf_counter() - began > LONG_SECONDS else []
    while len(found) < REPEATS:
        found.append(once())
        if len(found) >= LEAST and time.perf_counter() - began > ENOUGH_SECONDS:
            break
    return [np.array(each) for each in zip(*found, strict=True)]


def now(tensor: Tensor) -> float:
    """The clock, once the device of a tensor has done all it was given."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


def _gradient_of(leaf: Tensor) -> Tensor | None:
    """Of what a component was given: zeros where nothing depends on it."""
    if not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
