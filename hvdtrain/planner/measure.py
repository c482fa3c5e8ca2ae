"""Measures each component on this rank: forward, backward, its halves and its update.

All ranks measure the same components at the same time, because they share caches and memory in a
step, too.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from hvdtrain.models.component import IMAGE_CHANNELS
from hvdtrain.parallel.stage import Images
from hvdtrain.planner.chain import Chain, Disturb, Halves, Link, Seconds
from hvdtrain.planner.network import Curve
from hvdtrain.planner.probe import MOST_SLOWDOWN
from hvdtrain.planner.profile import ComponentTimes, RankTimes
from hvdtrain.world import World

FEWEST_ROWS = 2  # batch norm needs two values per channel
MOST_SIZES = 5
TELLING_BYTES = 8 * 2**20  # a smaller difference of activations is noise
MOST_MORE = 4.0  # activations count at most as this multiple of their counted bytes
LONG_VISIT = 1.5  # seconds to measure all sizes once; a longer visit is made FEW times, not MANY
FEW, MANY = 2, 5
TELLING_SECONDS = 1e-4  # the slowdown of a shorter backward is noise
LONGER = 1.5  # an all-reduce beside a backward is started for this multiple of its time

Timed = TypeVar("Timed", Seconds, Halves)


@dataclass(frozen=True)
class Setting:
    """Settings that all components share.

    Attributes:
        build: returns a component by its name.
        images: prepares images for the first component.
        image_size: height and width in pixels.
        sizes: numbers of samples to measure, ascending.
        dtype: of autocast, in which forwards run; None without it.
        loss: as in `Chain`.
        in_halves: whether backwards are measured in halves, too.
        message: sends one byte to this rank itself; None if there are no other ranks.
        counted: returns the bytes of components, by name, with the activations of some samples.
        held: returns the bytes that this process has in memory, or has allocated on its GPU.
        give_back: returns free memory to the system.
        is_emulated: whether passes only sleep, so that nothing disturbs their times.
        disturb: starts all-reduces beside a backward; None if its slowdown is not measured.
    """

    build: Callable[[str], Link]
    images: Images
    image_size: int
    sizes: tuple[int, ...]
    dtype: torch.dtype | None
    loss: Callable[[Tensor], Tensor]
    in_halves: bool
    message: Callable[[], None] | None
    counted: Callable[[Sequence[str], int], int]
    held: Callable[[], int]
    give_back: Callable[[], None]
    is_emulated: bool = False
    disturb: Disturb | None = None


class Measured(NamedTuple):
    """Measurements of a chain by number of samples.

    Attributes:
        held: memory in bytes after each number of samples.
        contention: slowdown of each component's backward beside an all-reduce, NaN where that is
            noise: fp64 [components]. None if it was not measured.
    """

    whole: dict[int, Seconds]
    halves: dict[int, Halves]
    held: dict[int, int]
    contention: np.ndarray | None = None


def measured_sizes(
    batch_size: int, ranks: int, microbatches: int | None = None
) -> tuple[int, ...]:
    """Return the numbers of samples to measure: a rank's share of a batch, and its halves."""
    largest = max(batch_size // max(2, ranks), batch_size // (microbatches or 2), FEWEST_ROWS)
    if ranks == 1:
        largest = max(batch_size, FEWEST_ROWS)
    sizes = {max(FEWEST_ROWS, largest // 2**power) for power in range(MOST_SIZES)}
    return tuple(sorted(sizes))


def measure_rank(chains: Sequence[Sequence[str]], setting: Setting, world: World) -> RankTimes:
    """Return the times of each component on this rank. Collective: all ranks measure at once.

    Args:
        chains: all components in model order, in groups; those of a group are in memory together.
    """
    largest = setting.sizes[-1]
    shape = (largest, setting.image_size, setting.image_size, IMAGE_CHANNELS)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)

    def source(rows: int) -> Tensor:
        return setting.images(pixels[:rows])

    state = torch.get_rng_state()
    components: dict[str, ComponentTimes] = {}
    first: dict[int, Seconds] = {}
    before, most_activations = setting.held(), -1
    memory = MeasuredMemory(before, 1.0)
    for number, names in enumerate(chains):
        chain = Chain(
            links=[setting.build(name) for name in names],
            source=source,
            device=setting.images.device,
            is_first=number == 0,
            is_last=number == len(chains) - 1,
            dtype=setting.dtype,
            loss=setting.loss,
            message=setting.message,
        )
        measured = _measured(chain, setting, world)
        activations = setting.counted(names, largest) - setting.counted(names, 0)
        if activations > most_activations:  # the chain with the most is the most accurate one
            most_activations = activations
            memory = memory_of(partial(setting.counted, names), before, measured.held)
        components |= {name: _times(measured, place) for place, name in enumerate(names)}
        first = first or measured.whole
        source = partial(_first_rows, chain.emitted(largest))
        del chain
        setting.give_back()
    torch.set_rng_state(state)
    load = Curve.of(first, [float(np.median(seconds.load)) for seconds in first.values()])
    message = np.median([float(np.median(seconds.message)) for seconds in first.values()])
    # Memory that was added later stays allocated, such as kernels for all sizes.
    resident = max(memory.resident, setting.held())
    return RankTimes(components, load, resident, float(message), memory.factor, memory.spread)


def _first_rows(activations: Tensor, rows: int) -> Tensor:
    return activations[:rows]


def _measured(chain: Chain, setting: Setting, world: World) -> Measured:
    """Measure all sizes of a chain several times unless they are emulated. Collective.

    A shared machine may be slow for seconds, which would make one size seem slower than others,
    and so pipelines slower than data parallelism, or the reverse. Of the measurements of a size,
    which are apart in time, the median counts; of two, which is all that long passes get, the
    faster one.
    """
    began = time.perf_counter()
    visits = [_visit(chain, setting, setting.sizes, world)]
    if setting.is_emulated:
        return visits[0]
    seconds = max(world.gather(time.perf_counter() - began))
    contention = _contention(chain, setting, visits[0].whole, world)
    for number in range(1, FEW if seconds > LONG_VISIT else MANY):
        sizes = setting.sizes[::-1] if number % 2 else setting.sizes
        visits.append(_visit(chain, setting, sizes, world))
    return Measured(
        {rows: _typical([one.whole[rows] for one in visits]) for rows in visits[0].whole},
        {rows: _typical([one.halves[rows] for one in visits]) for rows in visits[0].halves},
        visits[0].held,
        contention,
    )


def _contention(
    chain: Chain, setting: Setting, whole: Mapping[int, Seconds], world: World
) -> np.ndarray | None:
    """Return `contention` of `Measured`. Collective.

    Components that move memory are slowed down more than those that multiply matrices.
    """
    if setting.disturb is None:
        return None
    rows = setting.sizes[-1]
    alone = np.median(whole[rows].backward, axis=0)
    slowest = np.max(world.gather(alone), axis=0)
    beside = chain.contended(rows, setting.disturb, (LONGER * slowest).tolist())
    is_telling = alone > TELLING_SECONDS
    ratios = np.median(beside, axis=0) / np.where(is_telling, alone, 1.0)
    clipped: np.ndarray = np.where(is_telling, np.clip(ratios, 1.0, MOST_SLOWDOWN), np.nan)
    return clipped


def _visit(chain: Chain, setting: Setting, sizes: Sequence[int], world: World) -> Measured:
    """Measure sizes in an order. Collective."""
    measured = Measured({}, {}, {})
    for rows in sizes:
        world.barrier()
        setting.give_back()  # blocks that the previous size freed do not fit this one
        measured.whole[rows] = chain.whole(rows)
        measured.held[rows] = setting.held()
        if setting.in_halves and rows in _split_sizes(setting.sizes):
            measured.halves[rows] = chain.in_halves(rows)
    return measured


def _typical(measurements: Sequence[Timed]) -> Timed:
    """Return the measurement whose passes took the median time; of two the faster one."""

    def seconds(measurement: Timed) -> float:
        passes = np.stack(measurement[:2])  # forward and backward, or the two halves
        return float(np.nansum(np.median(passes, axis=1)))

    return sorted(measurements, key=seconds)[(len(measurements) - 1) // 2]


def _split_sizes(sizes: Sequence[int]) -> Sequence[int]:
    """Return the sizes for which backwards are measured in halves.

    Two sizes suffice, and each takes as long again. A schedule that splits backwards has several
    micro-batches, so none has the largest size.
    """
    return sizes[-4:-1:2] or sizes


class MeasuredMemory(NamedTuple):
    """The memory of a rank in a measurement.

    Attributes:
        resident: bytes of the process besides the counted ones.
        factor: real bytes of activations divided by the counted ones, at the most samples.
        spread: by how much the factor was larger at half as many samples.
    """

    resident: int
    factor: float
    spread: float = 0.0


def memory_of(
    counted: Callable[[int], int], before: int, held: Mapping[int, int]
) -> MeasuredMemory:
    """Return the memory of a rank.

    Args:
        counted: returns the counted bytes of the measured components with some samples.
        before: bytes of the process before the measurement.
        held: bytes of the process by number of samples.
    """
    sizes = sorted(held)
    fewest, most = sizes[0], sizes[-1]
    lasting, at_fewest = counted(0), counted(fewest)

    def factor_at(rows: int) -> float:
        more = counted(rows) - at_fewest
        if more < TELLING_BYTES:
            return 1.0
        return min(MOST_MORE, max(1.0, (held[rows] - held[fewest]) / more))

    factor = factor_at(most)
    spread = max(0.0, factor_at(sizes[-2:][0]) - factor)
    resident = round(held[fewest] - lasting - factor * (at_fewest - lasting))
    return MeasuredMemory(max(before, resident), factor, spread)


def _times(measured: Measured, place: int) -> ComponentTimes:
    """Return the times of the component at `place` of a chain."""
    whole, halves, _, contention = measured
    sums = [(item.forward + item.backward)[:, place] for item in whole.values()]
    spread = max(float((item.max() - item.min()) / np.median(item)) for item in sums)
    update = np.median([np.median(item.update[:, place]) for item in whole.values()])
    slowdown = np.nan if contention is None else contention[place]
    is_split = halves and not np.isnan(next(iter(halves.values())).inputs[:, place]).any()
    return ComponentTimes(
        _curve(whole, [item.forward[:, place] for item in whole.values()]),
        _curve(whole, [item.backward[:, place] for item in whole.values()]),
        _curve(halves, [item.inputs[:, place] for item in halves.values()]) if is_split else None,
        _curve(halves, [item.weights[:, place] for item in halves.values()]) if is_split else None,
        float(update),
        spread,
        contention=None if np.isnan(slowdown) else float(slowdown),
    )


def _curve(sizes: Iterable[int], repeats: Sequence[np.ndarray]) -> Curve:
    """Return the curve through the medians of the repeats."""
    return Curve.of(sizes, [float(np.median(values)) for values in repeats])
