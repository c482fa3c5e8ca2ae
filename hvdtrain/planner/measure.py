"""Measures what each component takes on this rank: forward, backward, its halves and its update.

All ranks measure the same components at once, since they share caches and memory as in a step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvdtrain.models.component import IMAGE_CHANNELS
from hvdtrain.parallel.stage import Images
from hvdtrain.planner.chain import Built, Chain, Halves, Seconds
from hvdtrain.planner.components import ComponentTimes, RankTimes
from hvdtrain.planner.curve import Curve
from hvdtrain.world import World

FEWEST_ROWS = 2  # batch norm needs two values a channel
MOST_SIZES = 5
TELLING_BYTES = 8 * 2**20  # of activations: what fewer take is noise
MOST_MORE = 4.0  # times what is counted of activations


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
        message: hands next to nothing to this rank itself, if there are other ranks.
        counted: bytes of a component by its name: those it has, and those of each sample.
        held: bytes that this process has in memory, or has allocated on its GPU.
        give_back: gives back what is free of it.
    """

    build: Callable[[str], Built]
    images: Images
    image_size: int
    sizes: tuple[int, ...]
    is_bf16: bool
    in_halves: bool
    message: Callable[[], None] | None
    counted: Mapping[str, tuple[int, int]]
    held: Callable[[], int]
    give_back: Callable[[], None]


class Measured(NamedTuple):
    """Of a chain, by samples; `held` is what was in memory after each."""

    whole: dict[int, Seconds]
    halves: dict[int, Halves]
    held: dict[int, int]


def measured_sizes(
    batch_size: int, ranks: int, microbatches: int | None = None
) -> tuple[int, ...]:
    """Samples that an action may work on: from a rank's share of a batch down, by halves."""
    largest = max(batch_size // max(2, ranks), batch_size // (microbatches or 2), FEWEST_ROWS)
    if ranks == 1:
        largest = max(batch_size, FEWEST_ROWS)
    sizes = {max(FEWEST_ROWS, largest // 2**power) for power in range(MOST_SIZES)}
    return tuple(sorted(sizes))


def measure_rank(chains: Sequence[Sequence[str]], setting: Setting, here: World) -> RankTimes:
    """What each component takes on this rank. Collective: all ranks measure at once.

    Args:
        chains: all components in order, in parts; those of a part are built at the same time.
    """
    largest = setting.sizes[-1]
    shape = (largest, setting.image_size, setting.image_size, IMAGE_CHANNELS)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)

    def source(rows: int) -> Tensor:
        return setting.images(pixels[:rows])

    state = torch.get_rng_state()
    found: dict[str, ComponentTimes] = {}
    first: dict[int, Seconds] = {}
    before, most_told = setting.held(), -1
    resident, factor = before, 1.0
    for number, names in enumerate(chains):
        built = [setting.build(name) for name in names]
        is_ends = number == 0, number == len(chains) - 1
        chain = Chain(built, source, *is_ends, setting.is_bf16, setting.message)
        measured = _measured(chain, setting, here)
        told = sum(setting.counted[name][1] for name in names)
        if told > most_told:  # the chain that leaves most in memory tells most of it
            most_told = told
            resident, factor = _memory(names, setting, before, measured.held)
        found |= {name: _times(measured, place) for place, name in enumerate(names)}
        first = first or measured.whole
        given = chain.emitted(largest)
        source = partial(_first_rows, given)
        del built, chain
        setting.give_back()
    torch.set_rng_state(state)
    load = Curve.of(first, [float(np.median(each.load)) for each in first.values()])
    message = np.median([float(np.median(each.message)) for each in first.values()])
    # What came besides is kept: kernels for all sizes, for example.
    return RankTimes(found, load, max(resident, setting.held()), float(message), factor)


def _first_rows(given: Tensor, rows: int) -> Tensor:
    return given[:rows]


def _measured(chain: Chain, setting: Setting, here: World) -> Measured:
    """All sizes of a chain. Collective."""
    found = Measured({}, {}, {})
    for rows in setting.sizes:
        here.barrier()
        setting.give_back()  # what the size before has freed: its blocks are no use to this one
        found.whole[rows] = chain.whole(rows)
        found.held[rows] = setting.held()
        if setting.in_halves and rows in _split_sizes(setting.sizes):
            found.halves[rows] = chain.in_halves(rows)
    return found


def _split_sizes(sizes: Sequence[int]) -> Sequence[int]:
    """Of which backwards are measured in halves: two tell enough, and each takes as long again.

    A schedule that splits has several micro-batches: none is as large as the largest size.
    """
    return sizes[-4:-1:2] or sizes


def _memory(
    names: Sequence[str], setting: Setting, before: int, held: Mapping[int, int]
) -> tuple[int, float]:
    """Bytes of the process besides what is counted, and what activations are more than counted."""
    fixed, each = (sum(setting.counted[name][k] for name in names) for k in (0, 1))
    fewest, most = min(held), max(held)
    factor = 1.0
    if each * (most - fewest) >= TELLING_BYTES:
        grown = (held[most] - held[fewest]) / (most - fewest)
        factor = min(MOST_MORE, max(1.0, grown / each))
    return max(before, round(held[fewest] - fixed - factor * each * fewest)), factor


def _times(measured: Measured, place: int) -> ComponentTimes:
    """What one component of a chain takes, of what was measured for each number of samples."""
    whole, parts, _ = measured
    sums = [(each.forward + each.backward)[:, place] for each in whole.values()]
    spread = max(float((each.max() - each.min()) / np.median(each)) for each in sums)
    update = np.median([np.median(each.update[:, place]) for each in whole.values()])
    is_split = parts and not np.isnan(next(iter(parts.values())).inputs[:, place]).any()
    return ComponentTimes(
        _curve(whole, [each.forward[:, place] for each in whole.values()]),
        _curve(whole, [each.backward[:, place] for each in whole.values()]),
        _curve(parts, [each.inputs[:, place] for each in parts.values()]) if is_split else None,
        _curve(parts, [each.weights[:, place] for each in parts.values()]) if is_split else None,
        float(update),
        spread,
    )


def _curve(sizes: Iterable[int], repeats: Sequence[np.ndarray]) -> Curve:
    """Medians of repeats by samples."""
    return Curve.of(sizes, [float(np.median(each)) for each in repeats])
