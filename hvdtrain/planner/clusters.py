"""Predicts times on hardware that you do not have, from figures of its kind.

The time of a component is a fixed time plus the longer of two: its counted operations at the rate
of the device, or its bytes at the rate of its memory. An all-reduce uses a ring, within each node
first if there are several. All of it is prediction: nothing is measured.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UsageError, on_one_line
from hvdtrain.host.records import read_mapping
from hvdtrain.options.names import nearest, unknown_key
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.memory import GIB, optimizer_copies
from hvdtrain.planner.network import Contention, Curve, Line
from hvdtrain.planner.profile import ComponentTimes, Profile, RankTimes

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

MOST_RANKS = 1024
BACKWARD = 2  # a backward takes as long as this many forwards


DEVICES, LINKS = "devices", "links"
KEYS = ("slows", "factor", "ranks", "from_step", "to_step")
REQUIRED = ("gbytes", "gflops", "memory_gbytes", "memory_gib", "ranks", "ranks_per_node")
SLOWEST = 1000.0  # factor
SMALLEST, LARGEST = 1e-9, 1e12  # limits of every number: sums and quotients stay finite


@dataclass(frozen=True)
class Event:
    """A slowdown of devices or links.

    Attributes:
        slows: "devices" or "links".
        factor: how many times longer everything takes; below 1 for a faster device or link.
        ranks: whose devices, or whose links to all other ranks; None: all.
        from_step, to_step: the first step, counted from 1, and the first one after it; None: to
            the end.
    """

    slows: str
    factor: float
    ranks: tuple[int, ...] | None = None
    from_step: int = 0
    to_step: int | None = None

    def concerns(self, slows: str, ranks: Iterable[int], step: int) -> bool:
        """Return whether it slows a device or link of one of these ranks in this step."""
        if slows != self.slows or step < self.from_step:
            return False
        if self.to_step is not None and step >= self.to_step:
            return False
        return self.ranks is None or not set(self.ranks).isdisjoint(ranks)


def slowdown(events: Iterable[Event], slows: str, ranks: Iterable[int], step: int) -> float:
    """Return how many times longer a device, or a transfer among ranks, takes in a step.

    The factors of events at the same time multiply.
    """
    ranks = tuple(ranks)
    return prod(event.factor for event in events if event.concerns(slows, ranks, step))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A machine whose ranks are all alike, except for its events.

    Attributes:
        ranks, ranks_per_node: ranks in all, and on one node.
        gflops: 1e9 operations per second that a rank sustains in convolutions and matrix products:
            about a third of the peak in most reports.
        memory_gbytes: 1e9 bytes per second of a rank's memory.
        memory_gib: memory of a rank in GiB.
        fixed_microseconds: time of a component's forward that does not depend on the samples;
            twice as much for a backward.
        latency_microseconds, gbytes: latency and 1e9 bytes per second between ranks of a node.
        node_latency_microseconds, node_gbytes: the same between nodes, for a whole node.
        compute_contention, reduce_contention: slowdown of computing and of an all-reduce when both
            run at the same time, at least 1.
        events: devices and links that are slow. A prediction is for the first step.
    """

    ranks: int
    ranks_per_node: int
    gflops: float
    memory_gbytes: float
    memory_gib: float
    fixed_microseconds: float = 0.0
    latency_microseconds: float
    gbytes: float
    node_latency_microseconds: float = 0.0
    node_gbytes: float = 0.0
    compute_contention: float = 1.0
    reduce_contention: float = 1.0
    events: tuple[Event, ...] = ()

    def profile(self, costs: "Sequence[ComponentCost]", copies: int) -> Profile:
        """Return the predicted times of each component on each rank.

        Args:
            copies: copies of the parameters that the optimizer keeps.
        """
        parts = {cost.name: self._component(cost, copies) for cost in costs}
        slower = [slowdown(self.events, DEVICES, [rank], 1) for rank in range(self.ranks)]
        alike = {factor: RankTimes(parts).times(factor) for factor in set(slower)}
        return Profile(tuple(alike[factor] for factor in slower))

    def _component(self, cost: "ComponentCost", copies: int) -> ComponentTimes:
        moved = 2 * (cost.saved_bytes + cost.output_bytes)
        rate, memory = 1e9 * self.gflops, 1e9 * self.memory_gbytes
        per_sample = max(cost.forward_flops / rate, moved / memory)
        fixed = 1e-6 * self.fixed_microseconds
        update = (3 + 2 * copies) * cost.parameter_bytes / memory + fixed
        forward = Curve.straight(Line(fixed, per_sample), 1024)
        return ComponentTimes(
            forward=forward,
            backward=forward.times(BACKWARD),
            input_half=forward,
            weight_half=forward,
            update=update if copies else 0.0,
        )


@dataclass(frozen=True)
class ClusterNetwork:
    """The network of a cluster in one step; implements `Network`."""

    cluster: Cluster
    step: int = 1

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the host of each rank."""
        cluster = self.cluster
        return tuple(f"node{rank // cluster.ranks_per_node}" for rank in range(cluster.ranks))

    @property
    def contention(self) -> Contention:
        """Return the slowdown of computing and all-reduces that run at the same time."""
        return Contention(self.cluster.compute_contention, self.cluster.reduce_contention)

    @property
    def has_unlike_links(self) -> bool:
        """Return whether an event slows the links of some ranks."""
        return any(event.slows == LINKS and event.ranks for event in self.cluster.events)

    @property
    def breakpoints(self) -> Sequence[float]:
        """Return no breakpoints: the time of a ring is a straight line."""
        return ()

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """Return the seconds of a ring all-reduce; on several nodes within each node first.

        A ring of n ranks sends 2 (n - 1) messages of 1/n of the bytes each. Source: Patarasuk and
        Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
        """
        nodes = {rank // self.cluster.ranks_per_node for rank in ranks}
        local = -(-len(ranks) // len(nodes))
        cluster = self.cluster
        within = _ring(local, size, cluster.latency_microseconds, cluster.gbytes)
        between = _ring(len(nodes), size, cluster.node_latency_microseconds, cluster.node_gbytes)
        return (within + between) * self._slowdown(ranks)

    def send_seconds(self, sender: int, receiver: int, size: float) -> float:
        """Return the seconds from a send of `size` bytes to their arrival."""
        cluster = self.cluster
        if sender == receiver:
            return 0.0
        slow = self._slowdown((sender, receiver))
        if sender // cluster.ranks_per_node == receiver // cluster.ranks_per_node:
            return slow * (1e-6 * cluster.latency_microseconds + size / (1e9 * cluster.gbytes))
        # The ranks of a node share its link to the other nodes.
        rank_gbytes = cluster.node_gbytes / min(cluster.ranks_per_node, cluster.ranks)
        return slow * (1e-6 * cluster.node_latency_microseconds + size / (1e9 * rank_gbytes))

    def _slowdown(self, ranks: Sequence[int]) -> float:
        return slowdown(self.cluster.events, LINKS, ranks, self.step)


def _ring(members: int, size: float, microseconds: float, gbytes: float) -> float:
    if members < 2:
        return 0.0
    return 2 * (members - 1) * (1e-6 * microseconds + size / members / (1e9 * gbytes))


# Reported rates that such machines sustain in training, not their peaks: V100 about 7 of 15.7
# TFLOP/s in fp32, 900 GB/s of memory; H200 about 200 of 989 TFLOP/s in bf16 (MLPerf Training 4.0,
# ResNet-50), 4.8 TB/s of memory; a node with two processors about 1.5 TFLOP/s in fp32.
_V100 = Cluster(
    ranks=8,
    ranks_per_node=8,
    gflops=7_000,
    memory_gbytes=700,
    memory_gib=32,
    fixed_microseconds=60,
    latency_microseconds=10,
    gbytes=60,
    compute_contention=1.1,
    reduce_contention=1.1,
)
_H200 = replace(
    _V100,
    gflops=200_000,
    memory_gbytes=3_800,
    memory_gib=141,
    fixed_microseconds=40,
    latency_microseconds=8,
    gbytes=350,
)
_CPU_NODES = Cluster(
    ranks=16,
    ranks_per_node=1,
    gflops=1_500,
    memory_gbytes=300,
    memory_gib=192,
    fixed_microseconds=30,
    latency_microseconds=1,
    gbytes=10,
    node_latency_microseconds=30,
    node_gbytes=1.1,
    compute_contention=1.15,
    reduce_contention=1.15,
)
PRESETS: Mapping[str, Cluster] = {
    "8-v100": _V100,
    "8-h200": _H200,
    "16-cpu-10g": _CPU_NODES,
    "16-cpu-100g": replace(_CPU_NODES, node_latency_microseconds=2, node_gbytes=11),
}


def load(name: str, ranks: int | None = None, option: str = "--cluster") -> Cluster:
    """Return a preset or the cluster of a YAML file, with another number of ranks if requested.

    Raises:
        UsageError: naming the file and the key.
    """
    if name in PRESETS:
        cluster = PRESETS[name]
    elif Path(name).suffix in (".yaml", ".yml") or Path(name).exists():
        cluster = _from_file(Path(name))
    else:
        known = (*PRESETS, "FILE.yaml")
        raise UsageError(f"{option} {name} is unknown{nearest(name, known)}")
    cluster = replace(cluster, ranks=ranks or cluster.ranks)
    for event in cluster.events:
        if absent := [rank for rank in event.ranks or () if rank >= cluster.ranks]:
            raise UsageError(
                f"{name}: an event slows {event.slows} of rank {absent[0]}, and the cluster has "
                f"ranks 0 to {cluster.ranks - 1}: change its ranks, or --ranks"
            )
    if not 1 <= cluster.ranks <= MOST_RANKS:
        raise UsageError(f"--ranks must be between 1 and {MOST_RANKS}, not {cluster.ranks}")
    if cluster.ranks > cluster.ranks_per_node and not cluster.node_gbytes:
        raise UsageError(
            f"{name} has {cluster.ranks_per_node} rank(s) per node and no network between nodes: "
            f"use at most {cluster.ranks_per_node} rank(s), or a cluster file with node_gbytes"
        )
    return cluster


def _from_file(path: Path) -> Cluster:
    """Return the cluster of a file; its numbers must be known, complete and in range."""
    content = read_mapping(path, "cluster")
    events = parse_events(path, content.pop("events", []))
    types = {item.name: item.type for item in fields(Cluster)}
    for key, value in content.items():
        if key not in types:
            raise unknown_key(path, key, types)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise UsageError(f"{path}: {key} must be a number of at least 0, not {value!r}")
        if value and not SMALLEST <= value <= LARGEST:
            raise UsageError(
                f"{path}: {key} must be between {SMALLEST:g} and {LARGEST:g}, not {value:g}"
            )
        if types[key] is int and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{path}: {key} must be a whole number above 0, not {value!r}")
        if key in ("compute_contention", "reduce_contention") and value < 1:
            raise UsageError(f"{path}: {key} must be at least 1, not {value}")
    for key in REQUIRED:
        if not content.get(key):
            raise UsageError(f"{path}: {key} is missing, or zero")
    return Cluster(**{"latency_microseconds": 0.0} | content, events=events)


def parse_events(path: Path, content: object) -> tuple[Event, ...]:
    """Return the events in the value of the key `events` of a cluster file.

    Raises:
        UsageError: naming the file and the event.
    """
    if not isinstance(content, list):
        raise UsageError(f"{path}: events must be a list, not {on_one_line(content, 60)}")
    return tuple(_event(f"{path}: event {place + 1}", item) for place, item in enumerate(content))


def _event(source: str, content: object) -> Event:
    if not isinstance(content, dict):
        raise UsageError(f"{source} must have the keys slows and factor")
    for key in content:
        if key not in KEYS:
            raise unknown_key(source, key, KEYS)
    slows, factor = content.get("slows"), content.get("factor")
    if slows not in (DEVICES, LINKS):
        raise UsageError(
            f"{source}: slows must be devices or links, not {on_one_line(slows, 60)}"
            f"{nearest(str(slows), (DEVICES, LINKS)) if slows else ''}"
        )
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not is_number or not 1 / SLOWEST <= float(factor or 0) <= SLOWEST:
        raise UsageError(
            f"{source}: factor must be a number between {1 / SLOWEST:g} and {SLOWEST:g}, "
            f"not {on_one_line(factor, 60)}"
        )
    start, stop = _step(source, content, "from_step") or 0, _step(source, content, "to_step")
    if stop is not None and stop <= start:
        raise UsageError(f"{source}: to_step must be above from_step {start}, not {stop}")
    return Event(slows, float(factor or 0), _ranks(source, content), start, stop)


def _step(source: str, content: dict[str, Any], key: str) -> int | None:
    step = content.get(key)
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise UsageError(
            f"{source}: {key} must be a step, 0 or above, not {on_one_line(step, 60)}"
        )
    return step


def _ranks(source: str, content: dict[str, Any]) -> tuple[int, ...] | None:
    ranks = content.get("ranks")
    if ranks is None:
        return None
    if not isinstance(ranks, list) or not ranks:
        raise UsageError(f"{source}: ranks must be a list of ranks, not {on_one_line(ranks, 60)}")
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise UsageError(f"{source}: {on_one_line(rank, 60)} is not a rank: use 0 or above")
    return tuple(ranks)


def question_of(
    cluster: Cluster,
    costs: "Sequence[ComponentCost]",
    batch_size: int,
    optimizer: str,
    recomputed: Collection[str] = (),
) -> Question:
    """Return the question that the planner answers for a cluster."""
    profile, network = cluster.profile(costs, optimizer_copies(optimizer)), ClusterNetwork(cluster)
    limits = (cluster.memory_gib * GIB,) * cluster.ranks
    return Question(
        Known(costs, profile, network, recomputed), batch_size, optimizer, limits=limits
    )
