"""`--plan auto`: measures components and network on the ranks of the run, and chooses its plan."""

import hashlib
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch

from hvdtrain.backends.pytorch.parts import (
    build_model,
    reason_against_split_backward,
    recomputed_components,
    stage_optimizer,
)
from hvdtrain.config import TrainConfig
from hvdtrain.host.files import check_target
from hvdtrain.host.memory import return_freed_memory
from hvdtrain.models.component import Component
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.options.givenmodel import PREFIX
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.stage import DTYPES, Images
from hvdtrain.plan.passes import group_by_bytes
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.planner import profile as profiles
from hvdtrain.planner.candidate import play
from hvdtrain.planner.chain import Link
from hvdtrain.planner.cost import Known, Question, activation_bytes, held_memory
from hvdtrain.planner.measure import Setting, measure_rank, measured_sizes
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.probe import (
    Start,
    horovod_sum,
    measure_network,
    message_to_self,
    started_mpi_sum,
)
from hvdtrain.planner.profile import Profile, RankTimes
from hvdtrain.planner.solve import GIB, solve
from hvdtrain.sync.engine import reduction_library
from hvdtrain.sync.mpi import MPICollectives
from hvdtrain.world import World, communicator_among, temporary_horovod

RESERVE = 0.15  # share of a memory limit for memory that is not counted: up to 0.106 was measured
MORE = 2  # factor on the counted activations before anything is measured


@dataclass(frozen=True)
class Choice:
    """A plan that was chosen automatically, and why.

    The other attributes are set on rank 0 only, if there was a choice.

    Attributes:
        remarks: notes on the choice, in words.
        predicted_seconds: per step.
        question: the model, batch and machine that the plan was chosen for.
    """

    plan: Plan
    remarks: tuple[str, ...] = ()
    predicted_seconds: float | None = None
    question: Question | None = None


@dataclass(frozen=True)
class Subject:
    """The model that is measured, with the settings of a run.

    Attributes:
        costs: costs of the components, in their order.
        image_size: height and width in pixels.
    """

    config: TrainConfig
    components: Sequence[Component]
    costs: Sequence[ComponentCost]
    image_size: int
    images: Images

    @property
    def names(self) -> list[str]:
        """Names of the components."""
        return [cost.name for cost in self.costs]

    @property
    def recomputed(self) -> Collection[str]:
        """Names of the components that are recomputed in backward."""
        return recomputed_components(self.config.recompute, self.names)

    def words(self, world: World) -> str:
        """Return the settings that decide the measurements. Collective.

        A profile of equal settings is valid for this subject on these ranks.
        """
        config, hosts = self.config, world.gather(socket.gethostname())
        places = ",".join(str(list(dict.fromkeys(hosts)).index(host)) for host in hosts)
        patches = f", patches of {config.patch_size}" if config.patch_size else ""
        compiled = ", compiled" if config.compile else ""
        library = reduction_library(config.reduce_with, world)
        reduction = f"{config.allreduce}{' by MPI' if library == 'mpi' else ''}"
        content = ""
        if config.model.startswith(PREFIX):  # other models may have the same name
            content = f" {hashlib.sha256(repr(self.costs).encode()).hexdigest()[:8]}"
        return (
            f"{config.model}{content}{patches}, {self.costs[-1].output_shape[-1]} classes, "
            f"{self.image_size} px, {config.batch_size} images, {config.precision}{compiled}, "
            f"{config.optimizer}, all-reduce {reduction}, {self.images.device.type}, "
            f"ranks on hosts {places} x {world.threads} threads"
        )


def subject_of(
    config: TrainConfig,
    components: Sequence[Component],
    image_size: int,
    classes: int,
    images: Images,
) -> Subject:
    """Return the subject that a run measures."""
    dtype = DTYPES[config.precision]
    autocast = images.device.type if config.precision == "bf16" else None
    costs = component_costs(
        components, image_size, classes=classes, dtype=dtype, autocast=autocast
    )
    return Subject(config, components, costs, image_size, images)


def choose_plan(subject: Subject, world: World) -> Choice:
    """Measure, choose a plan on rank 0, and broadcast it. Collective.

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
        solution = solve(problem)
        ended = time.perf_counter()
        remarks = (
            f"plan: {how} in {measured - started:.1f} s, chosen in {ended - measured:.2f} s",
            *solution.reasons(),
        )
        best = solution.chosen
        chosen = Choice(best.plan, remarks, best.seconds, problem)
    plan = world.broadcast(chosen.plan if chosen else None)
    return chosen or Choice(plan)


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
    return Choice(plan, remarks, seconds, question)


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
        profiles.save(Path(path), words, known.profile, known.network)
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
    profile = profiles.load(path, words, subject.names, ranks)
    if isinstance(profile, str):
        return None, f" ({path} has other settings: {profile})"
    times, network = profile
    return Known(subject.costs, times, network, subject.recomputed), ""


def question(config: TrainConfig, known: Known, ranks: int) -> Question:
    """Return the question that the solver answers with a plan."""
    limit = config.memory_limit
    return Question(
        replace(known, is_synchronised=config.batch_norm == "sync"),
        config.batch_size,
        config.optimizer,
        schedules=_schedules(config, [cost.name for cost in known.costs]),
        microbatches=config.microbatches,
        limits=None if limit is None else ((1 - RESERVE) * limit * GIB,) * ranks,
    )


def _schedules(config: TrainConfig, names: Sequence[str]) -> Collection[str]:
    """Return the schedules that the runtime supports for this run, or the requested one."""
    if config.schedule is not None:
        return (config.schedule,)
    # A schedule that splits backward is verified on one rank first, which may exceed the limit.
    splits = not reason_against_split_backward(config, names) and config.memory_limit is None
    return ("1f1b", "interleaved", "zb-h1") if splits else ("1f1b", "interleaved")


def measure(subject: Subject, world: World) -> Known:
    """Measure the ranks and the network of this run. Collective."""
    costs, recomputed = subject.costs, subject.recomputed
    if world.communicator is None:
        profile = Profile((local_times(subject, world),))
        return Known(costs, profile, MeasuredNetwork((socket.gethostname(),)), recomputed)
    exchange = Exchange(world.communicator, subject.images.device)
    parameter_bytes = sum(cost.parameter_bytes for cost in costs)
    handed = max(cost.output_bytes for cost in costs) * subject.config.batch_size
    with _sum_of_training(subject.config, world) as start:
        network = measure_network(world, start, exchange, parameter_bytes, handed)
    # After it, so that the memory that Horovod holds is counted.
    times = local_times(subject, world, partial(message_to_self, exchange))
    profile = Profile(tuple(world.gather(times)))
    return Known(costs, profile, network, recomputed)


@contextmanager
def _sum_of_training(config: TrainConfig, world: World) -> Iterator[Start]:
    """Yield a function that starts an all-reduce over all ranks as training does. Collective."""
    if reduction_library(config.reduce_with, world) == "horovod":
        with temporary_horovod() as horovod:
            yield horovod_sum(horovod)
        return
    everybody = tuple(range(world.size))
    communicator_among(everybody)
    yield started_mpi_sum(MPICollectives(everybody, world.rank, "planner"))


def local_times(
    subject: Subject, world: World, message: Callable[[], None] | None = None
) -> RankTimes:
    """Return the measured times and memory of each component on this rank. Collective."""
    config, images = subject.config, subject.images
    by_name = {part.name: part for part in subject.components}

    def build(name: str) -> Link:
        # Measured without recomputation: in a plan its forward counts twice.
        model = build_model([by_name[name]], config, images.device)
        parameters = list(model.parameters().values())
        return Link(model, parameters, stage_optimizer(config, model))

    setting = Setting(
        build=build,
        images=images,
        image_size=subject.image_size,
        sizes=measured_sizes(config.batch_size, world.size, config.microbatches),
        is_bf16=config.precision == "bf16",
        in_halves="zb-h1" in _schedules(config, subject.names),
        message=message,
        counted=partial(_counted_bytes, subject),
        held=partial(_held_bytes, subject),
        give_back=partial(_give_back, subject),
    )
    return measure_rank(_chains(subject, setting.sizes[-1], world), setting, world)


def _chains(subject: Subject, rows: int, world: World) -> list[list[str]]:
    """Return groups of components to measure together; each fits in half of the free memory."""
    held = []
    for name in subject.names:
        lasting, counted = (_counted_bytes(subject, [name], count) for count in (0, rows))
        held.append(lasting + MORE * (counted - lasting))
    # All ranks measure a chain at the same time, so all need the same chains.
    room = max(1, int(min(world.gather(_spare_bytes(subject, world))) / 2))
    groups = group_by_bytes(held, room, room)
    return [[subject.names[k] for k in group] for group in groups]


def _counted_bytes(subject: Subject, names: Sequence[str], rows: int) -> int:
    """Return the counted bytes of components in their measurement on `rows` samples."""
    costs = [cost for cost in subject.costs if cost.name in names]
    return held_memory(costs, subject.config.optimizer, activation_bytes(costs, rows)).total


def _give_back(subject: Subject) -> None:
    """Return free memory to the system or to the GPU."""
    if subject.images.device.type == "cuda":
        torch.cuda.empty_cache()
    return_freed_memory()


def _spare_bytes(subject: Subject, world: World) -> float:
    """Return the bytes that this rank may still allocate."""
    device, limit = subject.images.device, subject.config.memory_limit
    if device.type == "cuda":
        spare = float(torch.cuda.mem_get_info(device)[0])
    else:
        spare = psutil.virtual_memory().available / world.local_size
    if limit is not None:
        spare = min(spare, limit * GIB - _held_bytes(subject))
    return max(spare, 0.0)


def _held_bytes(subject: Subject) -> int:
    """Return the bytes that this process holds, or has reserved on its GPU.

    Memory that was freed but not returned counts.
    """
    if subject.images.device.type == "cuda":
        return torch.cuda.memory_reserved(subject.images.device)
    return psutil.Process().memory_info().rss
