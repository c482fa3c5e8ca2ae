"""Measure the time of each component: forward by the clock, backward by hooks."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor


class ComponentClock:
    """Adds up the seconds of each component of a stage.

    Valid on CPUs only: a GPU runs its kernels later. The backward of a component starts when the
    gradient of its output is complete and ends where the backward of the component before it
    starts: autograd runs the operations of a step in reverse.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: tuple[str, float] | None = None  # component and start of its backward

    def forward(
        self, calls: Mapping[str, Callable[[Tensor], Tensor]], activations: Tensor
    ) -> Tensor:
        """Run the components one after another."""
        for name, call in calls.items():
            start = self.clock()
            inputs, activations = activations, call(activations)
            self.seconds[name] += self.clock() - start
            if activations.requires_grad and activations is not inputs:  # inputs have a hook
                activations.register_hook(partial(self._begin, name))
        return activations

    def end(self) -> None:
        """Stop the running measurement: the backward of a stage is over."""
        if self._running is not None:
            name, start = self._running
            self._running = None
            self.seconds[name] += self.clock() - start

    def read(self) -> dict[str, float]:
        """Return the seconds of each component since the last call, by name."""
        seconds = dict(self.seconds)
        self.seconds.clear()
        self._running = None
        return seconds

    def _begin(self, name: str, _: Tensor) -> None:
        self.end()
        self._running = name, self.clock()
