"""Measures each component on this rank: forward, backward, its halves and its update.

All ranks measure the same components at the same time, because they share caches and memory in a
step, too.
"""

import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import InputSize
from hvdtrain.device import free_bytes, give_back, held_bytes
from hvdtrain.host.process import return_freed_memory
from hvdtrain.models.costs import ComponentCost
from hvdtrain.models.find import input_shape
from hvdtrain.options.requests import Chosen
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.stage import AUTOCAST, Images, StageModel
from hvdtrain.plan.plan import reason_against_split_backward, recomputed_components
from hvdtrain.plan.schedule import group_by_bytes
from hvdtrain.planner.agreement import NONE
from hvdtrain.planner.chain import Chain, Disturb, Halves, Link, Seconds
from hvdtrain.planner.coding import measure_coding
from hvdtrain.planner.memory import GIB, activation_bytes, held_memory
from hvdtrain.planner.network import Curve
from hvdtrain.planner.probe import MOST_SLOWDOWN, Start, Tools
from hvdtrain.planner.profile import ComponentTimes, RankTimes
from hvdtrain.planner.profilefile import model_words, precision_words
from hvdtrain.sync.collectives import reduction_library
from hvdtrain.world import World

MORE = 2  # factor on the counted activations before anything is measured
FEWEST_ROWS = 2  # batch norm needs two values per channel
MOST_SIZES = 5
TELLING_BYTES = 8 * 2**20  # a smaller difference of activations is noise
MOST_MORE = 4.0  # activations count at most as this multiple of their counted bytes
LONG_VISIT = 1.5  # seconds to measure all sizes once; a longer visit is made FEW times, not MANY
FEW, MANY = 2, 5
TELLING_SECONDS = 1e-4  # the slowdown of a shorter backward is noise
LONGER = 1.5  # an all-reduce beside a backward is started for this multiple of its time

Timed = TypeVar("Timed", Seconds, Halves)


class Parts(Protocol):
    """Builds the components of a framework for the planner's measurements."""

    def model(self, name: str) -> StageModel:
        """Return a component's model, in the order and dtype of training."""

    def optimizer(self, model: StageModel) -> torch.optim.Optimizer | None:
        """Return the optimizer of a model; None if it has no parameters."""

    def exchange(self, world: World) -> Exchange:
        """Return the transfers between ranks, at the sizes that are sent. Collective."""

    def tools(self, start: Start, world: World) -> Tools:
        """Return the operations whose times are measured.

        Args:
            start: starts the all-reduces of training.
        """


@dataclass(frozen=True)
class Subject:
    """The model that is measured, with the settings of a run.

    Attributes:
        parts: builds the components.
        costs: costs of the components, in their order.
        image_size: height and width in pixels.
        loss: returns the sum of the losses of outputs, for any targets.
    """

    config: TrainConfig
    parts: Parts
    costs: Sequence[ComponentCost]
    image_size: InputSize
    images: Images
    loss: Callable[[Tensor], Tensor]

    @property
    def names(self) -> list[str]:
        """Names of the components."""
        return [cost.name for cost in self.costs]

    @property
    def recomputed(self) -> Collection[str]:
        """Names of the components that are recomputed in backward."""
        return recomputed_components(self.config.recompute, self.names)

    @property
    def methods(self) -> tuple[str, ...]:
        """Values of `--compress` whose seconds are measured."""
        return () if self.config.compress == NONE else (self.config.compress,)

    def words(self, world: World) -> str:
        """Return the settings that decide the measurements. Collective.

        A profile of equal settings is valid for this subject on these ranks.
        """
        config, hosts = self.config, world.gather(socket.gethostname())
        places = ",".join(str(list(dict.fromkeys(hosts)).index(host)) for host in hosts)
        library = reduction_library(config.reduce_with, world, self.images.device)
        by = {"horovod": "", "mpi": " by MPI", "torch": " by torch.distributed"}[library]
        reduction = f"{config.allreduce}{by}"
        coded = f", compress {' '.join(self.methods)}" if self.methods else ""
        return (
            f"{model_words(config, self.costs, self.image_size)}, {config.batch_size} images, "
            f"{precision_words(config)}, all-reduce {reduction}{coded}, "
            f"{self.images.device.type}, ranks on hosts {places} x {world.threads} threads"
        )


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


def schedules_of(config: TrainConfig, names: Sequence[str]) -> Collection[str]:
    """Return the schedules that the runtime supports for this run, or the requested one."""
    if config.schedule is not None:
        return (config.schedule,)
    if not isinstance(config.plan_request, Chosen):
        return ("1f1b",)
    # A schedule that splits backward is verified on one rank first, which may exceed the limit.
    splits = not reason_against_split_backward(config, names) and config.memory_gib is None
    return ("1f1b", "interleaved", "zb-h1") if splits else ("1f1b", "interleaved")


def local_times(
    subject: Subject,
    world: World,
    message: Callable[[], None] | None = None,
    replicas: int | None = None,
    disturb: Disturb | None = None,
) -> RankTimes:
    """Return the measured times and memory of each component on this rank. Collective.

    Args:
        message: sends one byte to this rank itself; None if there are no other ranks.
        replicas: that compressed gradients are sent among; None: all ranks.
        disturb: starts all-reduces, to measure how much they slow the components down.
    """
    config, images = subject.config, subject.images
    room = min(world.gather(spare_bytes(subject, world)))  # all ranks measure the same
    sizes = _fitting_sizes(subject, room, world.size)
    channels, height, width = input_shape(subject.image_size)
    largest = sizes[-1]
    shape = (largest, height, width, channels)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)

    def source(rows: int) -> Tensor:
        return images(pixels[:rows])

    def link(name: str) -> Link:
        model = subject.parts.model(name)
        return Link(model, list(model.parameters().values()), subject.parts.optimizer(model))

    state = torch.get_rng_state()
    components: dict[str, ComponentTimes] = {}
    first: dict[int, Seconds] = {}
    before, most_activations = held_bytes(images.device), -1
    memory = MeasuredMemory(before, 1.0)
    chains = _chains(subject, largest, room / 2)
    for number, names in enumerate(chains):
        chain = Chain(
            links=[link(name) for name in names],
            source=source,
            device=images.device,
            is_first=number == 0,
            is_last=number == len(chains) - 1,
            dtype=AUTOCAST.get(config.precision),
            loss=subject.loss,
            message=message,
        )
        measured = _measured(
            chain,
            sizes,
            world,
            in_halves="zb-h1" in schedules_of(config, subject.names),
            is_emulated=config.emulate is not None,
            disturb=disturb,
        )
        counted = partial(_counted_bytes, subject, names)
        activations = counted(largest) - counted(0)
        if activations > most_activations:  # the chain with the most is the most accurate one
            most_activations = activations
            memory = memory_of(counted, before, measured.held)
        components |= {name: _times(measured, place) for place, name in enumerate(names)}
        first = first or measured.whole
        source = partial(_first_rows, chain.emitted(largest))
        del chain
        _give_back(images.device)
    torch.set_rng_state(state)
    load = Curve.of(first, [float(np.median(seconds.load)) for seconds in first.values()])
    message_seconds = np.median([float(np.median(item.message)) for item in first.values()])
    # Memory that was added later stays allocated, such as kernels for all sizes.
    resident = max(memory.resident, held_bytes(images.device))
    times = RankTimes(
        components, load, resident, float(message_seconds), memory.factor, memory.spread
    )
    if not subject.methods:
        return times

    def parameters_of(name: str) -> Mapping[str, nn.Parameter]:
        return subject.parts.model(name).parameters()

    coding = measure_coding(
        parameters_of, subject.names, subject.methods, replicas or world.size, world
    )
    return times.with_coding(coding)


def _give_back(device: torch.device) -> None:
    """Return free memory to the system or to the GPU."""
    give_back(device)
    return_freed_memory()


def _fitting_sizes(subject: Subject, room: float, ranks: int) -> tuple[int, ...]:
    """Return the numbers of samples to measure; under a limit those that fit in `room` bytes."""
    config = subject.config
    sizes = measured_sizes(config.batch_size, ranks, config.microbatches)
    if config.memory_gib is None:
        return sizes
    fitting = tuple(rows for rows in sizes if max(_needed(subject, rows)) <= room)
    # A curve, and the real bytes of activations, need two sizes.
    return fitting if len(fitting) > 1 else sizes[:2]


def _chains(subject: Subject, rows: int, room: float) -> list[list[str]]:
    """Return groups of components to measure together; each fits in `room` bytes if it can."""
    most = max(1, int(room))
    groups = group_by_bytes(_needed(subject, rows), most, most)
    return [[subject.names[k] for k in group] for group in groups]


def _needed(subject: Subject, rows: int) -> list[int]:
    """Return the bytes that each component's measurement on `rows` samples may need."""
    needed = []
    for name in subject.names:
        lasting, counted = (_counted_bytes(subject, [name], count) for count in (0, rows))
        needed.append(lasting + MORE * (counted - lasting))
    return needed


def _counted_bytes(subject: Subject, names: Sequence[str], rows: int) -> int:
    """Return the counted bytes of components in their measurement on `rows` samples."""
    costs = [cost for cost in subject.costs if cost.name in names]
    return held_memory(costs, subject.config.optimizer, activation_bytes(costs, rows)).total


def spare_bytes(subject: Subject, world: World) -> float:
    """Return the bytes that this rank may still allocate."""
    device, limit = subject.images.device, subject.config.memory_gib
    spare = free_bytes(device, world.local_size)
    if limit is not None:
        spare = min(spare, limit * GIB - held_bytes(device))
    return max(spare, 0.0)


def _first_rows(activations: Tensor, rows: int) -> Tensor:
    return activations[:rows]


def _measured(
    chain: Chain,
    sizes: Sequence[int],
    world: World,
    in_halves: bool = False,
    is_emulated: bool = False,
    disturb: Disturb | None = None,
) -> Measured:
    """Measure all sizes of a chain several times unless they are emulated. Collective.

    A shared machine may be slow for seconds, which would make one size seem slower than others,
    and so pipelines slower than data parallelism, or the reverse. Of the measurements of a size,
    which are apart in time, the median counts; of two, which is all that long passes get, the
    faster one.
    """
    began = time.perf_counter()
    split = _split_sizes(sizes) if in_halves else ()
    visits = [_visit(chain, sizes, split, world)]
    if is_emulated:
        return visits[0]
    seconds = max(world.gather(time.perf_counter() - began))
    # Not the largest size: all-reduces beside it would take a third of the measurements.
    contention = _contention(chain, sizes[-2:][0], visits[0].whole, disturb, world)
    for number in range(1, FEW if seconds > LONG_VISIT else MANY):
        order = sizes[::-1] if number % 2 else sizes
        visits.append(_visit(chain, order, split, world))
    return Measured(
        {rows: _typical([one.whole[rows] for one in visits]) for rows in visits[0].whole},
        {rows: _typical([one.halves[rows] for one in visits]) for rows in visits[0].halves},
        visits[0].held,
        contention,
    )


def _contention(
    chain: Chain,
    rows: int,
    whole: Mapping[int, Seconds],
    disturb: Disturb | None,
    world: World,
) -> np.ndarray | None:
    """Return `contention` of `Measured`. Collective.

    Components that move memory are slowed down more than those that multiply matrices.
    """
    if disturb is None:
        return None
    alone = np.median(whole[rows].backward, axis=0)
    slowest = np.max(world.gather(alone), axis=0)
    beside = chain.contended(rows, disturb, (LONGER * slowest).tolist())
    is_telling = alone > TELLING_SECONDS
    ratios = np.median(beside, axis=0) / np.where(is_telling, alone, 1.0)
    clipped: np.ndarray = np.where(is_telling, np.clip(ratios, 1.0, MOST_SLOWDOWN), np.nan)
    return clipped


def _visit(chain: Chain, sizes: Sequence[int], split: Sequence[int], world: World) -> Measured:
    """Measure sizes in an order, and those in `split` in halves, too. Collective."""
    measured = Measured({}, {}, {})
    for rows in sizes:
        world.barrier()
        _give_back(chain.device)  # blocks that the previous size freed do not fit this one
        measured.whole[rows] = chain.whole(rows)
        measured.held[rows] = held_bytes(chain.device)
        if rows in split:
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
