"""Measures what each component takes on this rank: forward, backward, its halves and its update.

One component is built at a time, so that a model which no rank can hold is measured all the same.
All ranks measure the same component at once, since they share caches and memory as in a step.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.models.component import IMAGE_CHANNELS
from hvdtrain.parallel import halves
from hvdtrain.parallel.stage import Images, StageModel
from hvdtrain.planner.components import ComponentTimes, RankTimes
from hvdtrain.planner.curve import Curve
from hvdtrain.world import World

WARM_UP = 1
REPEATS = 5
ENOUGH_SECONDS = 0.25  # of one size: fewer repeats then, but no fewer than LEAST
LEAST = 3
FEWEST_ROWS = 2  # batch norm needs two values a channel
MOST_SIZES = 5


@dataclass(frozen=True)
class Built:
    """A component, ready to be trained, with its optimizer if it has anything to train."""

    model: StageModel
    optimizer: torch.optim.Optimizer | None


@dataclass(frozen=True)
class Setting:
    """What is common to all components.

    Attributes:
        build: makes a component by its name.
        images: makes images ready for the first component.
        image_size: height and width in pixels.
        sizes: samples that are measured, ascending.
        is_bf16: whether forwards run under autocast.
        in_halves: whether backwards are measured in halves, too.
    """

    build: Callable[[str], Built]
    images: Images
    image_size: int
    sizes: tuple[int, ...]
    is_bf16: bool = False
    in_halves: bool = False


def measured_sizes(
    batch_size: int, ranks: int, microbatches: int | None = None
) -> tuple[int, ...]:
    """Samples that an action may work on: from a rank's share of a batch down, by halves."""
    largest = max(batch_size // max(2, ranks), batch_size // (microbatches or 2), FEWEST_ROWS)
    if ranks == 1:
        largest = max(batch_size, FEWEST_ROWS)
    sizes = {max(FEWEST_ROWS, largest // 2**power) for power in range(MOST_SIZES)}
    return tuple(sorted(sizes))


def measure_rank(names: Sequence[str], setting: Setting, here: World) -> RankTimes:
    """What each component takes on this rank. Collective: all ranks measure at once."""
    largest = setting.sizes[-1]
    shape = (largest, setting.image_size, setting.image_size, IMAGE_CHANNELS)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    load = Curve.of(
        setting.sizes,
        [
            _median(lambda rows=rows: setting.images(pixels[:rows]), setting)  # type: ignore[misc]
            for rows in setting.sizes
        ],
    )
    given = setting.images(pixels)
    found: dict[str, ComponentTimes] = {}
    state = torch.get_rng_state()
    for number, name in enumerate(names):
        built = setting.build(name)
        here.barrier()
        is_ends = number == 0, number == len(names) - 1
        found[name] = _component_times(built, given, setting, *is_ends)
        with torch.no_grad(), _autocast(setting, given):
            given = built.model(given).detach().clone(memory_format=torch.preserve_format)
        del built
    torch.set_rng_state(state)
    return RankTimes(found, load)


def _component_times(
    built: Built, given: Tensor, setting: Setting, is_first: bool, is_last: bool
) -> ComponentTimes:
    """All sizes of one component; `given` is its input at the largest."""
    forward, backward, inputs, weights, spreads = [], [], [], [], []
    for rows in setting.sizes:
        times = _Timed(built, given[:rows], setting, is_first, is_last)
        whole = times.repeated(times.whole)
        forward.append(statistics.median(each[0] for each in whole))
        backward.append(statistics.median(each[1] for each in whole))
        sums = [sum(each) for each in whole]
        spreads.append((max(sums) - min(sums)) / statistics.median(sums))
        # A schedule that splits has several micro-batches: none is as large as the largest size.
        is_split = setting.in_halves and not is_first and given.is_floating_point()
        is_split = is_split and bool(built.model.parameters())
        if is_split and (rows < setting.sizes[-1] or len(setting.sizes) == 1):
            parts = times.repeated(times.in_halves)
            inputs.append(statistics.median(each[0] for each in parts))
            weights.append(statistics.median(each[1] for each in parts))
    return ComponentTimes(
        Curve.of(setting.sizes, forward),
        Curve.of(setting.sizes, backward),
        Curve.of(setting.sizes[: len(inputs)], inputs) if inputs else None,
        Curve.of(setting.sizes[: len(weights)], weights) if weights else None,
        _update_seconds(built, setting),
        max(spreads),
    )


@dataclass
class _Timed:
    """Forwards and backwards of one component on one input."""

    built: Built
    given: Tensor
    setting: Setting
    is_first: bool
    is_last: bool

    def repeated(self, once: Callable[[], tuple[float, float]]) -> list[tuple[float, float]]:
        """Several measurements, the first ones dropped."""
        for _ in range(WARM_UP):
            once()
        found: list[tuple[float, float]] = []
        while len(found) < REPEATS:
            found.append(once())
            if len(found) >= LEAST and sum(map(sum, found)) > ENOUGH_SECONDS:
                break
        return found

    def whole(self) -> tuple[float, float]:
        """Seconds of (forward, backward)."""
        leaf, emitted, forward = self._forward()
        gradient = None if self.is_last else torch.ones_like(emitted)
        began = _now(self.given)
        if emitted.requires_grad:
            torch.autograd.backward(emitted, gradient)
        ended = _now(self.given)
        del leaf
        return forward, ended - began

    def in_halves(self) -> tuple[float, float]:
        """Seconds of a backward's (input half, weight half)."""
        leaf, emitted, _ = self._forward()
        parameters = list(self.built.model.parameters().values())
        gradient = None if self.is_last else torch.ones_like(emitted)
        emitted = halves.detachable(emitted)
        began = _now(self.given)
        groups = halves.backward_input(emitted, gradient, leaf, parameters)
        between = _now(self.given)
        halves.backward_weight(groups, parameters)
        return between - began, _now(self.given) - between

    def _forward(self) -> tuple[Tensor, Tensor, float]:
        leaf = self.given.detach().requires_grad_(
            not self.is_first and self.given.is_floating_point()
        )
        began = _now(self.given)
        with _autocast(self.setting, self.given):
            emitted = self.built.model(leaf)
        if self.is_last:
            labels = torch.zeros(len(emitted), dtype=torch.int64, device=emitted.device)
            logits = emitted if emitted.dtype == torch.float64 else emitted.float()
            emitted = functional.cross_entropy(logits, labels, reduction="sum")
        return leaf, emitted, _now(self.given) - began


def _update_seconds(built: Built, setting: Setting) -> float:
    """Of the optimizer, and of making gradients zero for the next step."""
    optimizer = built.optimizer
    if optimizer is None:
        return 0.0
    parameters = list(built.model.parameters().values())
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)

    def once() -> None:
        optimizer.step()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()

    return _median(once, setting)


def _median(once: Callable[[], Any], setting: Setting) -> float:
    device = torch.empty(0, device=setting.images.device)
    for _ in range(WARM_UP):
        once()
    found = []
    for _ in range(REPEATS):
        began = _now(device)
        once()
        found.append(_now(device) - began)
    return statistics.median(found)


def _autocast(setting: Setting, given: Tensor) -> Any:
    return torch.autocast(given.device.type, dtype=torch.bfloat16, enabled=setting.is_bf16)


def _now(tensor: Tensor) -> float:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
