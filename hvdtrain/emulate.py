"""The emulation of a run: its modelled devices and links, on a dilated clock.

The planner's measurements send small payloads, whatever size they measure.

Transfers and all-reduces end when the modelled ones would, with real small payloads.

Components sleep for as long as the real ones would compute. Their weights, activations and
gradients are real tensors, a scale smaller than the real ones, which are sent, summed, updated and
saved as those of any model. Their values mean nothing.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.engine.machine import Machine
from hvdtrain.engine.session import Device
from hvdtrain.errors import UsageError
from hvdtrain.host.activity import Activity
from hvdtrain.host.process import usable_cores
from hvdtrain.models.component import Component
from hvdtrain.models.costs import ComponentCost, CountedComponent, component_costs
from hvdtrain.options.requests import Chosen
from hvdtrain.options.sections import parse_emulate
from hvdtrain.parallel.exchange import Exchange, Receipt
from hvdtrain.parallel.stage import AUTOCAST, DTYPES
from hvdtrain.plan.cut import COMPUTE
from hvdtrain.plan.plan import Plan, recomputed_components
from hvdtrain.plan.traffic import Operation
from hvdtrain.planner import clusters, profilefile
from hvdtrain.planner.adapt import seconds_to_migrate
from hvdtrain.planner.candidate import Candidate, play
from hvdtrain.planner.clusters import DEVICES, Cluster, ClusterNetwork, Event, slowdown
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.memory import optimizer_copies
from hvdtrain.planner.network import Network
from hvdtrain.planner.probe import Start, Tools
from hvdtrain.planner.solve import lower_bound
from hvdtrain.sync.collectives import Collectives
from hvdtrain.world import World

if TYPE_CHECKING:
    from hvdtrain.planner.profile import ComponentTimes

SCALE = 1024  # bytes of the modelled tensors per byte of the emulated ones
READ = 64  # values per sample from which the output is computed


@dataclass(frozen=True)
class Work:
    """The seconds of a component on this rank's device.

    Attributes:
        compute: lets modelled seconds pass; its second argument is the slowdown beside an
            all-reduce, None for that of the network.
    """

    times: "ComponentTimes"
    compute: Callable[[float, float | None], None]

    def forward(self, rows: int) -> None:
        """Let the seconds of a forward pass."""
        self.compute(self.times.forward(rows), None)

    def backward_part(self, rows: int, part: float) -> None:
        """Let a part of the seconds of a backward pass."""
        self.compute(part * self.times.backward(rows), self.times.contention)

    def update(self) -> None:
        """Let the seconds of an update pass."""
        self.compute(self.times.update, None)


class EmulatedComponent(nn.Module):
    """A module that sleeps in forward and backward.

    The backward has two halves, on the path to the input and on that to the weights, so that a
    schedule may split it. Without one of these paths the other one takes all of the time.

    Args:
        sizes: elements of the weights.
        width: elements of the output per sample.
    """

    def __init__(self, sizes: Sequence[int], width: int, work: Work) -> None:
        super().__init__()
        self.width, self.work = width, work
        for number, size in enumerate(sizes):
            self.register_parameter(f"weight{number}", nn.Parameter(0.1 * torch.randn(size)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [n, width] for [n, ...]."""
        rows, weights = len(inputs), tuple(self.parameters())
        if not inputs.is_meta:
            self.work.forward(rows)
        # tanh saves its result: recomputation starts when a backward needs a saved tensor. The
        # path to the input comes last, because autograd runs the newest operations first.
        bias = torch.tanh(torch.cat(weights).mean()) if weights else None
        output = torch.tanh(inputs.flatten(1)[:, :READ].mean(1, keepdim=True))
        paths = [path for path in (output, bias) if path is not None and path.requires_grad]
        for path in paths:
            if not inputs.is_meta:
                path.register_hook(partial(self._backward, rows, 1 / len(paths)))
        output = output if bias is None else output + bias
        return output.expand(rows, self.width).contiguous()

    def _backward(self, rows: int, part: float, _: Tensor) -> None:
        self.work.backward_part(rows, part)


def emulated(
    components: Sequence[Component],
    costs: Sequence[ComponentCost],
    work: Callable[[str], Work],
    itemsize: int,
) -> list[Component]:
    """Return components of the same names and costs that sleep.

    Args:
        work: of a component, by its name.
        itemsize: bytes of a value.
    """
    made: list[Component] = []
    for place, (component, cost) in enumerate(zip(components, costs, strict=True)):
        is_last = place == len(components) - 1
        width = cost.output_shape[-1] if is_last else cost.output_bytes // (itemsize * SCALE)
        sizes = scaled_sizes([gradient.elements for gradient in cost.sizes.gradients])
        build = partial(EmulatedComponent, sizes, max(1, width), work(component.name))
        made.append(CountedComponent(component.name, build, cost=cost))
    return made


def scaled_sizes(elements: Sequence[int], scale: int = SCALE) -> list[int]:
    """Return sizes of tensors with 1/scale of the elements in all, and at least one.

    Small tensors are left out; their elements count for the ones after them.
    """
    totals = [total // scale for total in accumulate(elements)]
    sizes = [end - start for start, end in zip([0, *totals], totals, strict=False) if end > start]
    return sizes or [1] * (sum(elements) > 0)


def sleep_in_updates(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
    """Let the updates of emulated components take their modelled seconds."""
    slow = [module for module in modules if isinstance(module, EmulatedComponent)]
    if not slow:
        return

    def sleep(*_: object) -> None:
        for module in slow:
            module.work.update()

    optimizer.register_step_pre_hook(sleep)


class Clock:
    """Lets modelled seconds pass by sleeping.

    A sleep ends late: the timer is not exact, and the cores may be busy with other ranks. What
    follows is shortened by the same time, so that such delays do not add up.

    Args:
        dilation: real seconds per modelled second.
        now: returns real seconds.
        sleep: lets real seconds pass.

    Attributes:
        slept: real seconds of `work` so far.
        late: real seconds by which this rank is behind the modelled device.
    """

    def __init__(
        self,
        dilation: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.dilation, self.now, self._sleep = dilation, now, sleep
        self.slept = self.late = 0.0

    def modelled_now(self) -> float:
        """Return the real time at which the modelled device has reached this point."""
        return self.now() - self.late

    def until(self, deadline: float) -> None:
        """Sleep until a real time, if the modelled device reaches it later than now."""
        if self.modelled_now() >= deadline:
            return
        left = deadline - self.now()
        if left > 0:
            self._sleep(left)
        self.late = max(0.0, self.now() - deadline)

    def work(self, seconds: float) -> None:
        """Let modelled seconds pass."""
        self.until(self.modelled_now() + self.dilation * seconds)
        self.slept += self.dilation * seconds


@dataclass
class Flight:
    """An all-reduce in flight, as far as this rank knows: it may start later on other ranks.

    Attributes:
        start: real time at which this rank started it, or the one before it ends.
        seconds: real seconds that it takes alone.
    """

    start: float
    seconds: float


@dataclass
class Hardware:
    """The modelled device and links of a rank.

    Attributes:
        network_in: returns the network in a step.
        step: returns the number of the current step, for events.
        flights: the all-reduces in flight.
    """

    network_in: Callable[[int], Network]
    rank: int
    clock: Clock
    events: Sequence[Event] = ()
    step: Callable[[], int] = lambda: 1
    flights: list[Flight] = field(default_factory=list)

    @classmethod
    def of_cluster(cls, cluster: Cluster, rank: int, clock: Clock) -> "Hardware":
        """Return the hardware of a rank of a cluster."""
        return cls(partial(ClusterNetwork, cluster), rank, clock, cluster.events)

    @property
    def network(self) -> Network:
        """The network in the current step."""
        return self.network_in(self.step())

    def compute(self, seconds: float, contention: float | None = None) -> None:
        """Let a computation of `seconds` on an undisturbed device pass.

        It is slower in events, and while all-reduces are in flight.

        Args:
            contention: its slowdown beside an all-reduce; None for that of the network.
        """
        slow = slowdown(self.events, DEVICES, [self.rank], self.step())
        alone, start = slow * seconds * self.clock.dilation, self.clock.modelled_now()
        compute, reduce = self.network.contention
        compute = compute if contention is None else contention
        if compute > 1:
            for flight in self.flights:
                end = flight.start + flight.seconds * reduce
                overlap = min(max(0.0, end - max(start, flight.start)), alone * compute)
                alone += overlap * (1 - 1 / compute)
        self.clock.work(alone / self.clock.dilation)

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """Return the real seconds of an all-reduce of modelled bytes alone."""
        return self.clock.dilation * self.network.reduce_seconds(ranks, size)

    def end_of(self, start: float, seconds: float, waiting_since: float) -> float:
        """Return the real time at which an all-reduce ends.

        It is slower while this rank computes, which it does until it waits.

        Args:
            start: when its last member started it.
            seconds: real seconds that it takes alone.
        """
        _, reduce = self.network.contention
        overlap = min(max(0.0, waiting_since - start), seconds * reduce)
        return start + overlap + seconds - overlap / reduce


class DelayedExchange(Exchange):
    """Transfers that take as long as on modelled links.

    As the cost model of the planner has it: the latency passes from the send on, and the bytes
    move while the receiver waits for them, because MPI makes no progress during computing.

    Args:
        scale: modelled bytes per byte of a message.
    """

    def __init__(
        self, world: World, device: torch.device, hardware: Hardware, scale: float
    ) -> None:
        assert world.communicator is not None, "a single rank transfers nothing"
        self.hardware, self.scale = hardware, scale
        super().__init__(world.communicator, device)

    def now(self) -> float:
        """Return the time at which the modelled device is ready to send."""
        return self.hardware.clock.modelled_now()

    def complete(self, receipts: Sequence[Receipt], start: float) -> None:
        """Return when the messages would have arrived."""
        clock = self.hardware.clock
        start -= clock.late
        super().complete(receipts, start)
        network, rank = self.hardware.network, self.communicator.rank
        moving = 0.0
        for receipt in receipts:
            latency = network.send_seconds(receipt.sender, rank, 1)
            size = self.scale * receipt.rows.nbytes
            moving += network.send_seconds(receipt.sender, rank, size) - latency
            sent = self.sent_at(receipt)
            start = max(start, sent + clock.dilation * latency)
        clock.until(start + clock.dilation * moving)


class Started(NamedTuple):
    """An operation in flight.

    Attributes:
        handle, stamps: of the operation, and of the sum of all members' start times.
        size: bytes of the modelled tensor whose all-reduce takes as long.
    """

    handle: Any
    stamps: Any
    size: float
    flight: Flight


class DelayedCollectives:
    """Collective operations that take as long as on a modelled network.

    The last member's start counts: every operation is followed by the sum of a vector with the
    start time of each member. The operations of a group take place one after another.

    Args:
        collectives: do the real operations.
        ranks: of the group.
        scale: modelled bytes per byte of a tensor.
    """

    def __init__(
        self, collectives: Collectives, ranks: Sequence[int], hardware: Hardware, scale: float
    ) -> None:
        self.collectives, self.ranks = collectives, tuple(ranks)
        self.hardware, self.scale = hardware, scale
        self.size, self.place, self.sent_bytes = collectives.size, collectives.place, 0.0
        self.free_at = 0.0  # real time at which the previous operation ends

    def all_reduce(self, tensor: Tensor, name: str) -> Started:
        """Start a sum in place."""
        return self._start("all_reduce", tensor, name)

    def all_gather(self, tensor: Tensor, name: str) -> Started:
        """Start to gather the replicas' tensors."""
        return self._start("all_gather", tensor, name)

    def reduce_scatter(self, tensor: Tensor, name: str) -> Started:
        """Start to sum, each replica for its slice."""
        return self._start("reduce_scatter", tensor, name)

    def all_to_all(self, tensor: Tensor, name: str) -> Started:
        """Start to send each replica its slice."""
        return self._start("all_to_all", tensor, name)

    def progress(self) -> None:
        """Let operations in flight continue."""
        self.collectives.progress()

    def wait(self, handle: Started) -> Tensor:
        """Return the result of an operation when the modelled one would have ended."""
        clock = self.hardware.clock
        waiting_since = clock.modelled_now()
        starts = self.collectives.wait(handle.stamps)
        result = self.collectives.wait(handle.handle)
        start = max(self.free_at, float(starts.max()))
        seconds = self.hardware.reduce_seconds(self.ranks, handle.size)
        self.free_at = self.hardware.end_of(start, seconds, waiting_since)
        self.hardware.flights.remove(handle.flight)
        clock.until(self.free_at)
        return result

    def _start(self, kind: Any, tensor: Tensor, name: str) -> Started:
        operation = Operation(kind, round(self.scale * tensor.nbytes))
        self.sent_bytes += operation.sent_bytes(self.size)
        size = operation.as_all_reduce(self.size)
        now = self.hardware.clock.modelled_now()
        flights = self.hardware.flights
        start = max([now, *(flight.start + flight.seconds for flight in flights)])
        flight = Flight(start, self.hardware.reduce_seconds(self.ranks, size))
        handle = getattr(self.collectives, kind)(tensor, name)
        stamps = torch.zeros(self.size, dtype=torch.float64)
        stamps[self.place] = now
        flights.append(flight)
        return Started(handle, self.collectives.all_reduce(stamps, _stamps(name)), size, flight)


def _stamps(name: str) -> str:
    return f"{name}.start"


REMARK = (
    "Seconds and images per second are those of the modelled cluster; peak memory is predicted; "
    "losses and weights mean nothing. Real: startup_seconds, and overhead_seconds_per_step, in "
    "which a rank neither slept nor waited since the last start."
)
# Seconds of the runtime itself, by measurement: per step, and on each core for every rank that
# shares it, per step, and per action and per component in it.
STEP_SECONDS, SHARED_STEP_SECONDS, ACTION_SECONDS = 12e-3, 2e-3, 0.15e-3
OVERHEAD = 0.03  # part of a dilated step that the runtime itself may take
MOST_BELOW = 2  # a smaller factor is not worth a warning


@dataclass(frozen=True)
class Emulation(Machine):
    """One rank's part of an emulation.

    Attributes:
        name: of the cluster.
        question: the model, batch and modelled machine, for predictions.
        components: of the model; they sleep.
    """

    is_modelled = True
    name: str
    hardware: Hardware
    question: Question
    components: list[Component]

    @property
    def clock(self) -> Clock:
        """The dilated clock."""
        return self.hardware.clock

    @override
    def exchange(self, world: World, device: torch.device) -> Exchange:
        return DelayedExchange(world, device, self.hardware, SCALE)

    @override
    def whole_exchange(self, world: World, device: torch.device) -> Exchange:
        return DelayedExchange(world, device, self.hardware, 1.0)

    @override
    def collectives(self, collectives: Collectives, ranks: Sequence[int]) -> Collectives:
        return DelayedCollectives(collectives, ranks, self.hardware, SCALE)

    @override
    def tools(self, start: Start, world: World, device: torch.device) -> Tools:
        clock = copy(self.clock)  # the time that real sums take must not shorten other work

        def group_sum(communicator: Any) -> Start:
            return self._delayed(_blocking(communicator), range(communicator.size), clock)

        return Tools(
            self._delayed(start, range(world.size), clock),
            group_sum,
            clock=clock.modelled_now,
            contention=self.hardware.network.contention,
        )

    def _delayed(self, start: Start, ranks: Sequence[int], clock: Clock) -> Start:
        """Return all-reduces that end, on the modelled clock, when those of its network would.

        Args:
            start: starts the real ones.
            ranks: the members.
            clock: of the measurement.
        """
        hardware = self.hardware

        def begin(tensor: torch.Tensor, name: str) -> Callable[[], bool]:
            stamps = torch.zeros(len(ranks), dtype=torch.float64)
            stamps[hardware.rank] = clock.modelled_now()
            is_summed = start(stamps, name)

            def is_over() -> bool:
                if not is_summed():
                    return False
                end = float(stamps.max()) + hardware.reduce_seconds(ranks, tensor.nbytes)
                clock.late += max(0.0, clock.modelled_now() - end)  # that of the real sum
                clock.until(end)
                return True

            return is_over

        return begin

    @override
    def parameters(self, components: Sequence[Component]) -> int:
        return sum(cost.parameters for cost in self.question.known.costs)

    @override
    def device(
        self, device: torch.device, world: World, activity: Activity, plan: Callable[[], Plan]
    ) -> Device:
        self.hardware.step = lambda: activity.now()[0]  # events follow the steps from now on
        self.clock.slept = 0.0  # without the planner's measurements
        rank = self.hardware.rank

        def report(step_seconds: float, steps: int, busy_seconds: float) -> dict[str, Any]:
            # The runtime itself takes real seconds, which do not shrink with the dilation.
            overhead = (self.clock.dilation * busy_seconds - self.clock.slept) / max(1, steps)
            return {
                "emulated": {
                    "cluster": self.name,
                    "dilation": self.clock.dilation,
                    "step_seconds": step_seconds,
                    "simulated_step_seconds": self.predicted(plan()).seconds,
                    "overhead_seconds_per_step": float(np.mean(world.gather(overhead))),
                    "remark": REMARK,
                }
            }

        return Device(
            accelerator=f"{self.name} (emulated)",
            notice=(
                f"emulated on {self.name}: each rank sleeps for as long as a device of it would "
                f"compute, {self.clock.dilation:g} real seconds per second; losses mean nothing, "
                "nothing is evaluated"
            ),
            dilation=self.clock.dilation,
            peak_memory_bytes=lambda: round(self.predicted(plan()).rank_bytes[rank]),
            report=report,
        )

    @override
    def remarks(self, plan: Plan, is_chosen: bool) -> list[str]:
        dilation, enough = self.clock.dilation, self.sufficient_dilation(plan)
        remarks = []
        if enough > MOST_BELOW * dilation:
            remarks.append(
                f"--emulate {self.name}:{dilation:g} is too fast: the program itself adds about "
                f"{OVERHEAD * enough / dilation:.0%} to a step, so that reported seconds are too "
                f"long; with {enough:g} it adds {OVERHEAD:.0%}"
            )
        if is_chosen:
            remarks.append(
                "the planner measures and lists plans in real seconds, "
                f"{dilation:g} per emulated one"
            )
        return remarks

    def sufficient_dilation(self, plan: Plan | None) -> float:
        """Return a dilation that makes the runtime's overhead a small part of a step.

        Args:
            plan: of the run; None if it will be chosen.
        """
        ranks = self.question.ranks
        if plan is None:
            seconds = lower_bound(self.question)
            actions = 8 * ranks + 2 * len(self.components)
        else:
            candidate = self.predicted(plan)
            seconds = candidate.seconds
            actions = max(
                len(done)
                + sum(len(plan.stages[a.stage].components) for a in done if a.kind in COMPUTE)
                for done in candidate.schedule.values()
            )
        sharing = max(1.0, ranks / len(usable_cores()))
        overhead = STEP_SECONDS + sharing * (SHARED_STEP_SECONDS + ACTION_SECONDS * actions)
        return max(1.0, float(math.ceil(overhead / (OVERHEAD * seconds))))

    @override
    def migrated(self, before: Plan, after: Plan) -> None:
        self.clock.work(seconds_to_migrate(self.question, before, after))

    def predicted(self, plan: Plan) -> Candidate:
        """Return the simulated step of a plan."""
        return play(self.question, plan, "")


def _blocking(communicator: Any) -> Start:
    """Return a function that runs MPI's blocking all-reduce in place."""

    def start(tensor: torch.Tensor, _: str) -> Callable[[], bool]:
        total = np.empty_like(tensor.numpy())
        communicator.Allreduce(tensor.numpy(), total)
        tensor.copy_(torch.from_numpy(total))
        return lambda: True

    return start


def emulate(
    config: TrainConfig,
    components: Sequence[Component],
    index: Index,
    world: World,
    plan_of: Callable[[Sequence[Component]], Plan],
) -> tuple[TrainConfig, list[Component], World]:
    """Return the configuration, components and world of an emulated run. Collective.

    Nothing is evaluated: accuracies would mean nothing.

    Args:
        plan_of: returns the plan of the run for these components, if none will be chosen.

    Raises:
        UsageError: if the cluster is not valid, or the plan does not fit.
    """
    size, names = index.image_shape[0], [part.name for part in components]
    costs = component_costs(
        components,
        size,
        dtype=DTYPES[config.precision],
        autocast="cpu" if config.precision in AUTOCAST else None,
    )
    recomputed = recomputed_components(config.recompute, names)
    made = emulation(config, components, costs, recomputed, size, world)
    assert config.emulate is not None
    if parse_emulate(config.emulate)[1] is None:
        dilation = 0.0
        if world.rank == 0:
            is_chosen = isinstance(config.plan_request, Chosen)
            plan = None if is_chosen else plan_of(made.components)
            dilation = made.sufficient_dilation(plan)
        made.clock.dilation = world.broadcast(dilation)
    config = replace(config, eval_every=0, device="cpu")
    return config, made.components, replace(world, machine=made)


def emulation(
    config: TrainConfig,
    components: Sequence[Component],
    costs: Sequence[ComponentCost],
    recomputed: Collection[str],
    image_size: int,
    world: World,
) -> Emulation:
    """Return the emulation of a run.

    Args:
        components, costs: of the real model.
        recomputed: names of the components that are recomputed in backward.
        image_size: height and width of the images in pixels.

    Raises:
        UsageError: if the ranks are on several hosts, whose clocks cannot be compared, or the
            cluster or the profile is not valid.
    """
    assert config.emulate is not None
    if world.local_size < world.size:
        raise UsageError(
            f"--emulate runs on one host, and these {world.size} ranks are on several: use --ranks"
        )
    name, dilation = parse_emulate(config.emulate)
    clock = Clock(dilation or 1.0)
    if profilefile.is_profile(Path(name)):
        known = _measured(name, config, costs, recomputed, image_size, world.size)
        question = Question(known, config.batch_size, config.optimizer)
        times = known.profile.ranks[world.rank]
        hardware = Hardware(lambda step: known.network, world.rank, clock)
    else:
        cluster = clusters.load(name, world.size, "--emulate")
        question = clusters.question_of(
            cluster, costs, config.batch_size, config.optimizer, recomputed
        )
        undisturbed = replace(cluster, events=())  # the hardware adds the events of each step
        profile = undisturbed.profile(costs, optimizer_copies(config.optimizer))
        times = profile.ranks[world.rank]
        hardware = Hardware.of_cluster(cluster, world.rank, clock)
    itemsize = DTYPES[config.precision].itemsize

    def work(name: str) -> Work:
        return Work(times.components[name], hardware.compute)

    made = emulated(components, costs, work, itemsize)
    return Emulation(name, hardware, question, made)


def _measured(
    path: str,
    config: TrainConfig,
    costs: Sequence[ComponentCost],
    recomputed: Collection[str],
    image_size: int,
    ranks: int,
) -> Known:
    """Return what a profile file knows of the ranks that it was measured on.

    Raises:
        UsageError: if it is not valid, or of another model.
    """
    names = [cost.name for cost in costs]
    subjects = profilefile.subjects_of(config, costs, image_size)
    advice = "--emulate needs as many ranks as were measured, or another file"
    read = profilefile.load(Path(path), subjects, names, ranks, advice=advice)
    if isinstance(read, str):
        raise UsageError(
            f"--emulate {path} is a profile of other settings ({read}): use the same model, image "
            "size, precision and optimizer, or measure again with --plan auto --profile FILE.json"
        )
    return Known(costs, *read, recomputed)
