"""`--plan auto`: measure components and network on the ranks of the run, and choose its plan."""

import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from hvdtrain import world
from hvdtrain.config import TrainConfig
from hvdtrain.files import check_target
from hvdtrain.models.component import Component
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.plan import Plan, replicated
from hvdtrain.parallel.stage import DTYPES, Images
from hvdtrain.planner import profilefile
from hvdtrain.planner.components import Profile, RankTimes
from hvdtrain.planner.cost import Known
from hvdtrain.planner.explain import explain
from hvdtrain.planner.measure import Built, Setting, measure_rank, measured_sizes
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.probe import measure_network
from hvdtrain.planner.solve import GIB, Solution, solve
from hvdtrain.planner.tables import Question
from hvdtrain.training.optimizer import make_optimizer
from hvdtrain.training.parts import build_model, recomputed_components, what_forbids_halves
from hvdtrain.world import World

AUTO = ("auto", "adaptive")


@dataclass(frozen=True)
class Chosen:
    """A plan, and in words why it was chosen; the rest on rank 0, where there was a choice."""

    plan: Plan
    remarks: tuple[str, ...] = ()
    solution: Solution | None = None
    question: Question | None = None

    @property
    def predicted_seconds(self) -> float | None:
        """Of a step."""
        return self.solution.chosen.seconds if self.solution else None


def choose_plan(
    config: TrainConfig,
    components: Sequence[Component],
    image_size: int,
    classes: int,
    images: Images,
    here: World,
) -> Chosen:
    """Measure, solve on rank 0, and tell all ranks. Collective.

    Raises:
        UsageError: if nothing fits.
    """
    names = [part.name for part in components]
    if here.size == 1 and config.memory_limit is None:
        return Chosen(replicated(names, 1, config.microbatches, config.schedule))
    began = time.perf_counter()
    dtype = DTYPES[config.precision]
    costs = component_costs(components, image_size, classes=classes, dtype=dtype)
    known, how = _known(config, components, costs, image_size, images, here)
    measured = time.perf_counter()
    chosen = None
    if here.rank == 0:
        assert known is not None
        asked = question(config, known, here.size)
        solution = solve(asked)
        ended = time.perf_counter()
        remarks = (
            f"plan: {how} in {measured - began:.1f} s, chosen in {ended - measured:.2f} s",
            *explain(asked, solution),
        )
        chosen = Chosen(solution.chosen.plan, remarks, solution, asked)
    told = here.broadcast(chosen.plan if chosen else None)
    return chosen or Chosen(told)


def _known(
    config: TrainConfig,
    components: Sequence[Component],
    costs: Sequence[ComponentCost],
    image_size: int,
    images: Images,
    here: World,
) -> tuple[Known | None, str]:
    """What is known of the ranks, on rank 0, and how. Collective.

    Raises:
        UsageError: if --profile is a profile of something else.
    """
    path, first = Path(config.profile or ""), here.rank == 0
    subject = _subject(config, image_size, classes_of(costs), images, here)
    read: tuple[Known | None, str] | None = None
    if config.profile is not None and first:
        read = _read(config, path, subject, costs, here.size)
    held, said = here.broadcast((read[0] is not None, read[1]) if read else (False, ""))
    if held:
        return (read[0], said) if read else (None, said)
    found = measure(config, components, costs, image_size, images, here)
    if config.profile is not None and first and not said:
        assert isinstance(found.network, MeasuredNetwork)
        profilefile.save(path, subject, found.profile, found.network)
    return found, f"measured{said}"


def _read(
    config: TrainConfig, path: Path, subject: str, costs: Sequence[ComponentCost], ranks: int
) -> tuple[Known | None, str] | None:
    """What --profile holds, and in words whether it is of use; None if it is to be written.

    Raises:
        UsageError: if it is no profile, or cannot be written.
    """
    if not path.exists():
        check_target(str(path), "--profile")
        return None
    names = [cost.name for cost in costs]
    found = profilefile.load(path, subject, names, ranks)
    if isinstance(found, str):
        return None, f" ({path} is of other settings: {found})"
    recomputed = recomputed_components(config.recompute, names)
    return Known(costs, *found, recomputed), f"read from {path}"


def _subject(
    config: TrainConfig, image_size: int, classes: int, images: Images, here: World
) -> str:
    """What is measured, in words: two that are alike are worth the same. Collective."""
    hosts = here.gather(socket.gethostname())
    places = ",".join(str(list(dict.fromkeys(hosts)).index(host)) for host in hosts)
    patches = f", patches of {config.patch_size}" if config.patch_size else ""
    return (
        f"{config.model}{patches}, {classes} classes, {image_size} px, {config.batch_size} images,"
        f" {config.precision}{', compiled' if config.compile else ''}, {config.optimizer}, "
        f"all-reduce {config.allreduce}, {images.device.type}, ranks on hosts {places} x "
        f"{here.threads} threads"
    )


def classes_of(costs: Sequence[ComponentCost]) -> int:
    """What the last component tells apart."""
    return costs[-1].output_shape[-1]


def question(config: TrainConfig, known: Known, ranks: int) -> Question:
    """What a plan is wanted for."""
    limit = config.memory_limit
    return Question(
        known,
        config.batch_size,
        config.optimizer,
        _schedules(config, [cost.name for cost in known.costs]),
        config.microbatches,
        None if limit is None else (limit * GIB,) * ranks,
        config.batch_norm == "sync",
    )


def _schedules(config: TrainConfig, names: Sequence[str]) -> Collection[str]:
    """Those that the runtime can run for this configuration, or the one that is asked for."""
    if config.schedule is not None:
        return (config.schedule,)
    splits = not what_forbids_halves(config, names)
    return ("1f1b", "interleaved", "zb-h1") if splits else ("1f1b", "interleaved")


def measure(
    config: TrainConfig,
    components: Sequence[Component],
    costs: Sequence[ComponentCost],
    image_size: int,
    images: Images,
    here: World,
) -> Known:
    """What is known of the ranks of this run. Collective."""
    names = [part.name for part in components]
    own = own_times(config, components, image_size, images, here)
    profile = Profile(tuple(here.gather(own)))
    recomputed = recomputed_components(config.recompute, names)
    if here.communicator is None:
        return Known(costs, profile, MeasuredNetwork((socket.gethostname(),)), recomputed)
    exchange = Exchange(here.communicator, images.device)
    parameter_bytes = sum(cost.parameter_bytes for cost in costs)
    handed = max(cost.output_bytes for cost in costs) * config.batch_size
    with world.horovod_for_a_while() as horovod:
        network = measure_network(here, horovod, exchange, parameter_bytes, handed)
    return Known(costs, profile, network, recomputed)


def own_times(
    config: TrainConfig,
    components: Sequence[Component],
    image_size: int,
    images: Images,
    here: World,
) -> RankTimes:
    """What each component takes on this rank. Collective."""
    by_name = {part.name: part for part in components}
    recomputed = recomputed_components(config.recompute, list(by_name))
    resident = psutil.Process().memory_info().rss if images.device.type == "cpu" else 0

    def build(name: str) -> Built:
        # What is recomputed is timed as if it were not: its forward counts twice in a plan.
        model = build_model([by_name[name]], config, images.device)
        parameters = model.parameters()
        return Built(model, make_optimizer(config, parameters) if parameters else None)

    setting = Setting(
        build,
        images,
        image_size,
        measured_sizes(config.batch_size, here.size, config.microbatches),
        config.precision == "bf16",
        "zb-h1" in _schedules(config, list(by_name)) and not recomputed,
    )
    found = measure_rank(list(by_name), setting, here)
    if images.device.type == "cuda":
        torch.cuda.empty_cache()
    return RankTimes(found.components, found.load, found.action, resident)
