"""What each component takes in the steps of a run: forward by the clock, backward by hooks."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor


class Taken(NamedTuple):
    """Seconds of one component."""

    forward: float = 0.0
    backward: float = 0.0


class ComponentClock:
    """Adds up what the components of a stage take, on a CPU; a GPU does its work later.

    The backward of a component begins when the gradient of its output is complete, and ends where
    that of the component before begins: autograd goes through the operations of a step in reverse.
    """

    def __init__(self) -> None:
        self.taken: dict[str, Taken] = {}
        self._begun: tuple[str, float] | None = None

    def forward(
        self, calls: Mapping[str, Callable[[Tensor], Tensor]], activations: Tensor
    ) -> Tensor:
        """Run components one after another."""
        for name, call in calls.items():
            began = time.perf_counter()
            given, activations = activations, call(activations)
            self._add(name, forward=time.perf_counter() - began)
            if activations.requires_grad and activations is not given:  # which has its hook
                activations.register_hook(partial(self._begin, name))
        return activations

    def end(self) -> None:
        """The backward of a stage is over."""
        if self._begun is not None:
            name, began = self._begun
            self._begun = None
            self._add(name, backward=time.perf_counter() - began)

    def read(self) -> dict[str, Taken]:
        """By name, since this was asked for before."""
        found, self.taken, self._begun = self.taken, {}, None
        return found

    def _begin(self, name: str, _: Tensor) -> None:
        self.end()
        self._begun = name, time.perf_counter()

    def _add(self, name: str, forward: float = 0.0, backward: float = 0.0) -> None:
        before = self.taken.get(name, Taken())
        self.taken[name] = Taken(before.forward + forward, before.backward + backward)
