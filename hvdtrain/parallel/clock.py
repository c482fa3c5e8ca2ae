"""What each component takes in the steps of a run: forward by the clock, backward by hooks."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor


class ComponentClock:
    """Adds up what the components of a stage take, on a CPU; a GPU does its work later.

    The backward of a component begins when the gradient of its output is complete, and ends where
    that of the component before begins: autograd goes through the operations of a step in reverse.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.taken: dict[str, float] = defaultdict(float)
        self._begun: tuple[str, float] | None = None

    def forward(
        self, calls: Mapping[str, Callable[[Tensor], Tensor]], activations: Tensor
    ) -> Tensor:
        """Run components one after another."""
        for name, call in calls.items():
            began = self.clock()
            given, activations = activations, call(activations)
            self.taken[name] += self.clock() - began
            if activations.requires_grad and activations is not given:  # which has its hook
                activations.register_hook(partial(self._begin, name))
        return activations

    def end(self) -> None:
        """The backward of a stage is over."""
        if self._begun is not None:
            name, began = self._begun
            self._begun = None
            self.taken[name] += self.clock() - began

    def read(self) -> dict[str, float]:
        """Seconds by name, since this was asked for before."""
        found = dict(self.taken)
        self.taken.clear()
        self._begun = None
        return found

    def _begin(self, name: str, _: Tensor) -> None:
        self.end()
        self._begun = name, self.clock()
