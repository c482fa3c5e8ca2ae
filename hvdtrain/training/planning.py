"""`--plan auto`: measure components and network on the ranks of the run, and choose its plan."""

import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch

from hvdtrain import world
from hvdtrain.config import TrainConfig
from hvdtrain.files import check_target
from hvdtrain.memory import give_back_freed_memory
from hvdtrain.models.component import Component
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.parallel.buckets import group_by_bytes
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.plan import replicated
from hvdtrain.parallel.stage import DTYPES, Images
from hvdtrain.planner import profilefile
from hvdtrain.planner.chain import Built
from hvdtrain.planner.components import Profile, RankTimes
from hvdtrain.planner.cost import Known
from hvdtrain.planner.explain import explain
from hvdtrain.planner.measure import Setting, measure_rank, measured_sizes
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.overview import OPTIMIZER_COPIES
from hvdtrain.planner.play import play
from hvdtrain.planner.probe import measure_network, message_to_oneself
from hvdtrain.planner.solve import GIB, solve
from hvdtrain.planner.tables import Question
from hvdtrain.training.parts import (
    build_model,
    own_optimizer,
    recomputed_components,
    what_forbids_halves,
)
from hvdtrain.training.session import Chosen
from hvdtrain.world import World

RESERVE = 0.15  # share of a memory limit for what is not counted: on a slow day it was 0.106
MORE = 2  # times what is counted of activations, when nothing has been measured


@dataclass(frozen=True)
class Subject:
    """What is measured: a model in the settings of a run.

    Attributes:
        costs: of the components, in their order.
        image_size: height and width in pixels.
    """

    config: TrainConfig
    components: Sequence[Component]
    costs: Sequence[ComponentCost]
    image_size: int
    images: Images

    @property
    def names(self) -> list[str]:
        """The components."""
        return [cost.name for cost in self.costs]

    @property
    def recomputed(self) -> Collection[str]:
        """Those that run again in backward."""
        return recomputed_components(self.config.recompute, self.names)

    def words(self, here: World) -> str:
        """Two that are described alike are worth the same on these ranks. Collective."""
        config, hosts = self.config, here.gather(socket.gethostname())
        places = ",".join(str(list(dict.fromkeys(hosts)).index(host)) for host in hosts)
        patches = f", patches of {config.patch_size}" if config.patch_size else ""
        compiled = ", compiled" if config.compile else ""
        return (
            f"{config.model}{patches}, {self.costs[-1].output_shape[-1]} classes, "
            f"{self.image_size} px, {config.batch_size} images, {config.precision}{compiled}, "
            f"{config.optimizer}, all-reduce {config.allreduce}, {self.images.device.type}, "
            f"ranks on hosts {places} x {here.threads} threads"
        )


def subject_of(
    config: TrainConfig,
    components: Sequence[Component],
    image_size: int,
    classes: int,
    images: Images,
) -> Subject:
    """What a run would measure."""
    dtype = DTYPES[config.precision]
    autocast = images.device.type if config.precision == "bf16" else None
    costs = component_costs(
        components, image_size, classes=classes, dtype=dtype, autocast=autocast
    )
    return Subject(config, components, costs, image_size, images)


def choose_plan(subject: Subject, here: World) -> Chosen:
    """Measure, solve on rank 0, and tell all ranks. Collective.

    Raises:
        UsageError: if nothing fits.
    """
    config = subject.config
    if here.size == 1 and config.memory_limit is None:
        return Chosen(replicated(subject.names, 1, config.microbatches, config.schedule))
    began = time.perf_counter()
    known, how = _known(subject, here)
    measured = time.perf_counter()
    chosen = None
    if known is not None:
        asked = question(config, known, here.size)
        solution = solve(asked)
        ended = time.perf_counter()
        remarks = (
            f"plan: {how} in {measured - began:.1f} s, chosen in {ended - measured:.2f} s",
            *explain(asked, solution),
        )
        best = solution.chosen
        chosen = Chosen(best.plan, remarks, best.seconds, asked)
    told = here.broadcast(chosen.plan if chosen else None)
    return chosen or Chosen(told)


def without_halves(chosen: Chosen, remark: str = "") -> Chosen:
    """A choice with no backward in halves, the plan otherwise the same, and none chosen later."""
    plan, asked = chosen.plan, chosen.question
    if plan.splits_backward:
        plan = replace(plan, schedule="1f1b")
    if asked is None:  # not on rank 0
        return replace(chosen, plan=plan)
    asked = replace(asked, schedules=[name for name in asked.schedules if name != "zb-h1"])
    remarks = (*chosen.remarks, remark) if remark else chosen.remarks
    seconds = play(asked, plan, "").seconds
    return Chosen(plan, remarks, seconds, asked)


def _known(subject: Subject, here: World) -> tuple[Known | None, str]:
    """What is known of the ranks, on rank 0 alone, and how. Collective.

    Raises:
        UsageError: if --profile is no profile, or cannot be written.
    """
    given, words, first = subject.config.profile, subject.words(here), here.rank == 0
    read, why = None, ""
    if given is not None and first:
        read, why = _read(subject, Path(given), words, here.size)
    if here.broadcast(read is not None):
        return read, f"read from {given}"
    found = measure(subject, here)
    if not first:
        return None, ""
    if given is not None and not why:
        assert isinstance(found.network, MeasuredNetwork)
        profilefile.save(Path(given), words, found.profile, found.network)
    return found, f"measured{why}"


def _read(subject: Subject, path: Path, words: str, ranks: int) -> tuple[Known | None, str]:
    """What a profile holds; or None, and why it is neither of use nor to be written.

    Raises:
        UsageError: if it is no profile, or cannot be written.
    """
    if not path.exists():
        check_target(str(path), "--profile")
        return None, ""
    found = profilefile.load(path, words, subject.names, ranks)
    if isinstance(found, str):
        return None, f" ({path} is of other settings: {found})"
    return Known(subject.costs, *found, subject.recomputed), ""


def question(config: TrainConfig, known: Known, ranks: int) -> Question:
    """What a plan is wanted for."""
    limit = config.memory_limit
    return Question(
        replace(known, is_synchronised=config.batch_norm == "sync"),
        config.batch_size,
        config.optimizer,
        _schedules(config, [cost.name for cost in known.costs]),
        config.microbatches,
        None if limit is None else ((1 - RESERVE) * limit * GIB,) * ranks,
    )


def _schedules(config: TrainConfig, names: Sequence[str]) -> Collection[str]:
    """Those that the runtime can run for this configuration, or the one that is asked for."""
    if config.schedule is not None:
        return (config.schedule,)
    # What splits is verified on one rank first, which a limit may not allow.
    splits = not what_forbids_halves(config, names) and config.memory_limit is None
    return ("1f1b", "interleaved", "zb-h1") if splits else ("1f1b", "interleaved")


def measure(subject: Subject, here: World) -> Known:
    """What is known of the ranks of this run. Collective."""
    costs, recomputed = subject.costs, subject.recomputed
    if here.communicator is None:
        profile = Profile((own_times(subject, here),))
        return Known(costs, profile, MeasuredNetwork((socket.gethostname(),)), recomputed)
    exchange = Exchange(here.communicator, subject.images.device)
    parameter_bytes = sum(cost.parameter_bytes for cost in costs)
    handed = max(cost.output_bytes for cost in costs) * subject.config.batch_size
    with world.horovod_for_a_while() as horovod:
        network = measure_network(here, horovod, exchange, parameter_bytes, handed)
    # Behind it, so that what Horovod holds is found to be held.
    times = own_times(subject, here, partial(message_to_oneself, exchange))
    profile = Profile(tuple(here.gather(times)))
    return Known(costs, profile, network, recomputed)


def own_times(
    subject: Subject, here: World, message: Callable[[], None] | None = None
) -> RankTimes:
    """What each component takes on this rank. Collective."""
    config, images = subject.config, subject.images
    by_name = {part.name: part for part in subject.components}

    def build(name: str) -> Built:
        # What is recomputed is timed as if it were not: its forward counts twice in a plan.
        model = build_model([by_name[name]], config, images.device)
        return Built(model, own_optimizer(config, model))

    setting = Setting(
        build=build,
        images=images,
        image_size=subject.image_size,
        sizes=measured_sizes(config.batch_size, here.size, config.microbatches),
        is_bf16=config.precision == "bf16",
        in_halves="zb-h1" in _schedules(config, subject.names),
        message=message,
        counted={cost.name: _bytes(cost, config.optimizer) for cost in subject.costs},
        held=partial(_held_bytes, subject),
        give_back=partial(_give_back, subject),
    )
    return measure_rank(_chains(subject, setting.sizes[-1], here), setting, here)


def _chains(subject: Subject, rows: int, here: World) -> list[list[str]]:
    """Components that are measured together, as many as half of the memory that is left holds."""
    counted = [_bytes(cost, subject.config.optimizer) for cost in subject.costs]
    held = [fixed + MORE * rows * each for fixed, each in counted]
    # A chain is measured at once on all ranks: all have to have the same.
    room = max(1, int(min(here.gather(_spare_bytes(subject, here))) / 2))
    groups = group_by_bytes(held, room, room)
    return [[subject.names[k] for k in group] for group in groups]


def _bytes(cost: ComponentCost, optimizer: str) -> tuple[int, int]:
    """What is counted of a component in its measurement: its own, and what a sample leaves."""
    copies = 2 + OPTIMIZER_COPIES[optimizer]
    own = copies * cost.parameter_bytes + cost.buffer_bytes
    return own, cost.saved_bytes + cost.output_bytes


def _give_back(subject: Subject) -> None:
    """Give memory that is free back, to the system or to the GPU."""
    if subject.images.device.type == "cuda":
        torch.cuda.empty_cache()
    give_back_freed_memory()


def _spare_bytes(subject: Subject, here: World) -> float:
    """What this rank may hold besides what it holds."""
    device, limit = subject.images.device, subject.config.memory_limit
    if device.type == "cuda":
        spare = float(torch.cuda.mem_get_info(device)[0])
    else:
        spare = psutil.virtual_memory().available / here.local_size
    if limit is not None:
        spare = min(spare, limit * GIB - _held_bytes(subject))
    return max(spare, 0.0)


def _held_bytes(subject: Subject) -> int:
    """What this process has in memory, or has allocated on its GPU; freed memory is kept."""
    if subject.images.device.type == "cuda":
        return torch.cuda.memory_reserved(subject.images.device)
    return psutil.Process().memory_info().rss
