"""`--plan auto`: measures components and network on the ranks of the run, and chooses its plan."""

import socket
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from pathlib import Path

from torch import nn

from hvdtrain.config import TrainConfig
from hvdtrain.device import check_horovod_on, free_bytes, give_back, held_bytes
from hvdtrain.host.files import check_target
from hvdtrain.host.memory import return_freed_memory
from hvdtrain.options.planrequest import Chosen
from hvdtrain.parallel.stage import AUTOCAST
from hvdtrain.plan.passes import group_by_bytes
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.plan.planfile import reason_against_split_backward
from hvdtrain.planner import clusters, profilefile
from hvdtrain.planner.agreement import EXACT, agreement_of, rank_bytes, size, typical_coding
from hvdtrain.planner.candidate import play
from hvdtrain.planner.chain import Disturb, Link
from hvdtrain.planner.coding import measure_coding
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.measure import Setting, measure_rank, measured_sizes
from hvdtrain.planner.memory import GIB, RESERVE, activation_bytes, held_memory
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.probe import (
    Disturbance,
    Start,
    horovod_sum,
    measure_network,
    message_to_self,
    started_mpi_sum,
)
from hvdtrain.planner.profile import Profile, RankTimes
from hvdtrain.planner.solve import solve
from hvdtrain.planner.subject import Subject
from hvdtrain.sync.engine import reduction_library
from hvdtrain.sync.mpi import MPICollectives
from hvdtrain.world import World, communicator_among, temporary_horovod

LEAST_SPARE = 2**30  # bytes a rank needs to measure all-reduces beside its computation
MORE = 2  # factor on the counted activations before anything is measured


@dataclass(frozen=True)
class Choice:
    """A plan that was chosen automatically, and why.

    The other attributes are set on rank 0 only, if there was a choice.

    Attributes:
        remarks: notes on the choice, in words.
        predicted_seconds: per step.
        question: the model, batch and machine that the plan was chosen for.
        predicted_bytes: that a rank sends per step to agree with other replicas, their mean.
    """

    plan: Plan
    remarks: tuple[str, ...] = ()
    predicted_seconds: float | None = None
    question: Question | None = None
    predicted_bytes: float | None = None


def choose_plan(subject: Subject, world: World) -> Choice:
    """Measure, choose the plan on rank 0, and broadcast it. Collective.

    Raises:
        UsageError: if nothing fits.
    """
    config = subject.config
    if world.size == 1 and config.memory_limit is None:
        return Choice(replicated(subject.names, 1, config.microbatches, config.schedule))
    started = time.perf_counter()
    known, how = _known(subject, world)
    measured = time.perf_counter()
    chosen = None
    if known is not None:
        problem = question(config, known, world.size)
        solution, agreement = solve(problem), problem.known.agreement
        plan = solution.chosen.plan
        sent = rank_bytes(agreement, plan, problem.known.by_name)
        seconds = time.perf_counter() - measured
        remarks = [
            f"plan: {how} in {measured - started:.1f} s, chosen in {seconds:.2f} s",
            *solution.reasons(),
        ]
        if problem.limits is not None:
            remarks.append(
                f"memory: a rank needs up to {max(solution.chosen.rank_bytes) / GIB:.2f} GiB "
                f"(predicted, of {min(problem.limits) / GIB:.2f} GiB after the reserve)"
            )
        if agreement != EXACT:
            remarks.append(f"to agree, a rank sends up to {size(max(sent))} per step (predicted)")
        chosen = Choice(
            plan,
            tuple(remarks),
            solution.chosen.seconds,
            problem,
            predicted_bytes=statistics.mean(sent),
        )
    agreed: Plan = world.broadcast(chosen.plan if chosen else None)
    return chosen or Choice(agreed)


def without_split_backward(chosen: Choice, remark: str = "") -> Choice:
    """Return the choice without a backward pass in halves, for this plan and for replans."""
    plan, question = chosen.plan, chosen.question
    if plan.splits_backward:
        plan = replace(plan, schedule="1f1b")
    if question is None:  # not on rank 0
        return replace(chosen, plan=plan)
    question = replace(
        question, schedules=[name for name in question.schedules if name != "zb-h1"]
    )
    remarks = (*chosen.remarks, remark) if remark else chosen.remarks
    seconds = play(question, plan, "").seconds
    return replace(
        chosen, plan=plan, remarks=remarks, predicted_seconds=seconds, question=question
    )


def _known(subject: Subject, world: World) -> tuple[Known | None, str]:
    """Return what is known of the ranks (on rank 0) and how it was obtained. Collective.

    Raises:
        UsageError: if --profile is not a profile, or cannot be written.
    """
    path, words, first = subject.config.profile, subject.words(world), world.rank == 0
    read, why = None, ""
    if path is not None and first:
        read, why = _read(subject, Path(path), words, world.size)
    if world.broadcast(read is not None):
        return read, f"read from {path}"
    known = measure(subject, world)
    if not first:
        return None, ""
    if path is not None and not why:
        assert isinstance(known.network, MeasuredNetwork)
        profilefile.save(Path(path), words, known.profile, known.network)
    return known, f"measured{why}"


def _read(subject: Subject, path: Path, words: str, ranks: int) -> tuple[Known | None, str]:
    """Read a profile.

    Returns:
        Its content, or None. With None, the reason why the file is not used and must not be
        overwritten; empty if there is no file yet.

    Raises:
        UsageError: if the file is not a profile, or cannot be written.
    """
    if not path.exists():
        check_target(str(path), "--profile")
        return None, ""
    profile = profilefile.load(path, escape(words), subject.names, ranks, subject.methods)
    if isinstance(profile, str):
        return None, f" ({path} has other settings: {profile})"
    times, network = profile
    largest = next(iter(times.ranks[0].components.values())).forward.points[-1][0]
    size = subject.config.batch_size
    # With the most micro-batches: every measurement without a limit has at least these samples.
    if subject.config.memory_limit is None and largest < measured_sizes(size, ranks, size)[-1]:
        return None, f" ({path} was measured under a memory limit, up to {largest:.0f} samples)"
    return Known(subject.costs, times, network, subject.recomputed), ""


def question(config: TrainConfig, known: Known, ranks: int) -> Question:
    """Return the question that the solver answers with a plan."""
    limit = config.memory_limit
    return Question(
        replace(
            known,
            profile=known.profile if limit is None else known.profile.with_margin(),
            is_synchronised=config.batch_norm == "sync",
            agreement=agreement_of(config),
        ),
        config.batch_size,
        config.optimizer,
        schedules=_schedules(config, [cost.name for cost in known.costs]),
        microbatches=config.microbatches,
        limits=None if limit is None else ((1 - RESERVE) * limit * GIB,) * ranks,
    )


def predicted_question(subject: Subject, cluster_name: str, ranks: int) -> Question:
    """Return the question for some ranks of a cluster; nothing is measured.

    Raises:
        UsageError: if there is no such cluster.
    """
    config, cluster = subject.config, clusters.load(cluster_name, ranks)
    predicted = clusters.question_of(
        cluster, subject.costs, config.batch_size, config.optimizer, subject.recomputed
    )
    coding = typical_coding(subject.methods, subject.costs, 1e9 * cluster.memory_gbytes)
    profile = predicted.known.profile.with_coding(coding)
    known = replace(predicted.known, profile=profile)
    return replace(question(config, known, ranks), limits=predicted.limits)


def _schedules(config: TrainConfig, names: Sequence[str]) -> Collection[str]:
    """Return the schedules that the runtime supports for this run, or the requested one."""
    if config.schedule is not None:
        return (config.schedule,)
    if not isinstance(config.plan_request, Chosen):
        return ("1f1b",)
    # A schedule that splits backward is verified on one rank first, which may exceed the limit.
    splits = not reason_against_split_backward(config, names) and config.memory_limit is None
    return ("1f1b", "interleaved", "zb-h1") if splits else ("1f1b", "interleaved")


def measure(subject: Subject, world: World) -> Known:
    """Measure the ranks and the network of this run. Collective."""
    costs, recomputed = subject.costs, subject.recomputed
    if world.communicator is None:
        profile = Profile((local_times(subject, world),))
        return Known(costs, profile, MeasuredNetwork((socket.gethostname(),)), recomputed)
    exchange = subject.parts.exchange(world)
    parameter_bytes = sum(cost.parameter_bytes for cost in costs)
    handed = max(cost.output_bytes for cost in costs) * subject.config.batch_size
    config, message = subject.config, partial(message_to_self, exchange)
    # All of it while Horovod runs, whose thread takes part of a core, and memory.
    with _sum_of_training(subject, world) as start:
        tools = subject.parts.tools(start, world)
        network = measure_network(world, tools, exchange, parameter_bytes, handed)
        disturb = None
        uses_horovod = reduction_library(config.reduce_with, world) == "horovod"
        # All-reduces beside the computation hold memory too, which a limit must leave.
        spare = min(world.gather(_spare_bytes(subject, world)))
        if config.emulate is None and uses_horovod and spare > LEAST_SPARE:
            ranks = range(world.size)
            disturb = Disturbance(start, tools.device, partial(network.reduce_seconds, ranks))
        times = local_times(subject, world, message, disturb=disturb)
    profile = Profile(tuple(world.gather(times)))
    slowdowns = [one for one in world.gather(disturb and disturb.slowdown()) if one is not None]
    if slowdowns:  # measured beside the model's own components
        contention = network.contention._replace(reduce=statistics.median(slowdowns))
        network = replace(network, contention=contention)
    return Known(costs, profile, network, recomputed)


@contextmanager
def _sum_of_training(subject: Subject, world: World) -> Iterator[Start]:
    """Yield a function that starts an all-reduce over all ranks as training does. Collective."""
    if reduction_library(subject.config.reduce_with, world) == "horovod":
        check_horovod_on(subject.images.device, world)
        with temporary_horovod() as horovod:
            yield horovod_sum(horovod)
        return
    everybody = tuple(range(world.size))
    communicator_among(everybody)
    yield started_mpi_sum(MPICollectives(everybody, world.rank, "planner"))


def local_times(
    subject: Subject,
    world: World,
    message: Callable[[], None] | None = None,
    replicas: int | None = None,
    disturb: Disturb | None = None,
) -> RankTimes:
    """Return the measured times and memory of each component on this rank. Collective.

    Args:
        replicas: that compressed gradients are sent among; None: all ranks.
        disturb: starts all-reduces, to measure how much they slow the components down.
    """
    config, images = subject.config, subject.images

    def build(name: str) -> Link:
        model = subject.parts.model(name)
        return Link(model, list(model.parameters().values()), subject.parts.optimizer(model))

    room = min(world.gather(_spare_bytes(subject, world)))  # all ranks measure the same
    sizes = _fitting_sizes(subject, room, world.size)
    setting = Setting(
        build=build,
        images=images,
        image_size=subject.image_size,
        sizes=sizes,
        dtype=AUTOCAST.get(config.precision),
        loss=subject.loss,
        in_halves="zb-h1" in _schedules(config, subject.names),
        message=message,
        counted=partial(_counted_bytes, subject),
        held=partial(held_bytes, subject.images.device),
        give_back=partial(_give_back, subject),
        is_emulated=config.emulate is not None,
        disturb=disturb,
    )
    times = measure_rank(_chains(subject, sizes[-1], room / 2), setting, world)
    if not subject.methods:
        return times

    def parameters_of(name: str) -> Mapping[str, nn.Parameter]:
        return subject.parts.model(name).parameters()

    coding = measure_coding(
        parameters_of, subject.names, subject.methods, replicas or world.size, world
    )
    return times.with_coding(coding)


def _fitting_sizes(subject: Subject, room: float, ranks: int) -> tuple[int, ...]:
    """Return the numbers of samples to measure; under a limit those that fit in `room` bytes."""
    config = subject.config
    sizes = measured_sizes(config.batch_size, ranks, config.microbatches)
    if config.memory_limit is None:
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


def _give_back(subject: Subject) -> None:
    """Return free memory to the system or to the GPU."""
    give_back(subject.images.device)
    return_freed_memory()


def _spare_bytes(subject: Subject, world: World) -> float:
    """Return the bytes that this rank may still allocate."""
    device, limit = subject.images.device, subject.config.memory_limit
    spare = free_bytes(device, world.local_size)
    if limit is not None:
        spare = min(spare, limit * GIB - held_bytes(device))
    return max(spare, 0.0)
