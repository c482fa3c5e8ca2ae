"""`--plan auto`: measures components and network on the ranks of the run, and chooses its plan."""

import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from pathlib import Path

import torch

from hvdtrain.config import TrainConfig
from hvdtrain.host.files import check_target
from hvdtrain.options.sections import Library
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.planner import clusters, profilefile
from hvdtrain.planner.agreement import EXACT, agreement_of, rank_bytes, size, typical_coding
from hvdtrain.planner.candidate import play
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.measure import (
    Subject,
    local_times,
    measured_sizes,
    schedules_of,
    spare_bytes,
)
from hvdtrain.planner.memory import GIB, RESERVE
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.probe import (
    Disturbance,
    Start,
    horovod_sum,
    measure_network,
    message_to_self,
    started_sum,
)
from hvdtrain.planner.profile import Profile
from hvdtrain.planner.solve import solve
from hvdtrain.sync.collectives import check_horovod, open_group, reduction_library
from hvdtrain.world import World, temporary_horovod

LEAST_SPARE = 2**30  # bytes a rank needs to measure all-reduces beside its computation


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
    if world.size == 1 and config.memory_gib is None:
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
    if subject.config.memory_gib is None and largest < measured_sizes(size, ranks, size)[-1]:
        return None, f" ({path} was measured under a memory limit, up to {largest:.0f} samples)"
    return Known(subject.costs, times, network, subject.recomputed), ""


def question(config: TrainConfig, known: Known, ranks: int) -> Question:
    """Return the question that the solver answers with a plan."""
    limit = config.memory_gib
    return Question(
        replace(
            known,
            profile=known.profile if limit is None else known.profile.with_margin(),
            is_synchronised=config.batch_norm == "sync",
            agreement=agreement_of(config),
        ),
        config.batch_size,
        config.optimizer,
        schedules=schedules_of(config, [cost.name for cost in known.costs]),
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
    library = reduction_library(config.reduce_with, world, subject.images.device)
    # All of it while Horovod runs, whose thread takes part of a core, and memory.
    with _sum_of_training(library, subject.images.device, world) as start:
        tools = subject.parts.tools(start, world)
        network = measure_network(world, tools, exchange, parameter_bytes, handed)
        disturb = None
        # All-reduces beside the computation hold memory too, which a limit must leave.
        spare = min(world.gather(spare_bytes(subject, world)))
        if config.emulate is None and library == "horovod" and spare > LEAST_SPARE:
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
def _sum_of_training(library: Library, device: torch.device, world: World) -> Iterator[Start]:
    """Yield a function that starts an all-reduce over all ranks as training does. Collective."""
    if library == "horovod":
        check_horovod(device, world)
        with temporary_horovod() as horovod:
            yield horovod_sum(horovod)
        return
    group = open_group(library, tuple(range(world.size)), world, device, "planner")
    yield started_sum(group("sums"))
