"""How the replicas of each stage agree, as the options request it."""

from collections.abc import Mapping
from typing import Literal

from hvdtrain import world as worlds
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.host.installed import has_horovod
from hvdtrain.options.syncrequest import NO_HIERARCHY
from hvdtrain.parallel.stage import StageModel
from hvdtrain.plan.plan import Plan
from hvdtrain.sync.collectives import Collectives, HorovodCollectives
from hvdtrain.sync.gradients import Gradients, ReplicatedGradients, SerialGradients
from hvdtrain.sync.mpi import MPICollectives
from hvdtrain.sync.sharded import ShardedGradients
from hvdtrain.sync.states import States
from hvdtrain.world import World

Library = Literal["horovod", "mpi"]

WITHOUT_HOROVOD = (
    "Horovod is not installed on all ranks: MPI sums the gradients, as with --reduce-with mpi"
)


def reduction_library(requested: Library | None, world: World) -> Library:
    """Return the library that sums gradients, the same on all ranks. Collective.

    Args:
        requested: None for Horovod if all ranks have it, else MPI.
    """
    if requested is not None:
        return requested
    return "horovod" if all(world.gather(has_horovod())) else "mpi"


def check_algorithm(algorithm: str) -> None:
    """Refuse an algorithm that MPI's non-blocking all-reduce cannot use.

    Raises:
        UsageError: if it is hierarchical, or the library is not Open MPI.
    """
    if algorithm == "auto":
        return
    if algorithm == "hierarchical":
        raise UsageError(NO_HIERARCHY)
    library = worlds.mpi().Get_library_version()
    if "Open MPI" not in library:
        name = library.split(",")[0].split(chr(10))[0].strip()
        raise UsageError(
            f"--allreduce {algorithm} with --reduce-with mpi needs Open MPI, and this is {name}: "
            "use --allreduce auto, or --reduce-with horovod"
        )


def remarks(requested: Library | None, world: World) -> list[str]:
    """Return what a user should know about the library that sums gradients. Collective."""
    if requested is not None or world.size == 1:
        return []
    return [] if reduction_library(requested, world) == "horovod" else [WITHOUT_HOROVOD]


def stage_gradients(
    config: TrainConfig, plan: Plan, models: Mapping[int, StageModel], world: World
) -> dict[int, Gradients]:
    """Return the gradients of each of this rank's stages. Collective."""
    groups = [stage.ranks for stage in plan.stages if len(stage.ranks) > 1]
    if not groups:
        return {number: SerialGradients(model.parameters()) for number, model in models.items()}
    library = reduction_library(config.reduce_with, world)
    if library == "mpi":
        check_algorithm(config.allreduce)
    if library == "horovod":
        _start_horovod(models, groups, world)
    gradients: dict[int, Gradients] = {}
    for number, stage in enumerate(plan.stages):
        is_replicated = len(stage.ranks) > 1
        if is_replicated:
            open_group(library, stage.ranks)
        if number not in models:
            continue
        model = models[number]
        if not is_replicated or not model.tensors():
            gradients[number] = SerialGradients(model.parameters())
            continue
        collectives = collectives_of(library, stage.ranks, world.rank, f"stage{number}")
        gradients[number] = _replicated(config, model, collectives)
    return gradients


def _start_horovod(
    models: Mapping[int, StageModel], groups: list[tuple[int, ...]], world: World
) -> None:
    parameters = [value for model in models.values() for value in model.parameters().values()]
    largest = max(world.gather(sum(value.numel() * value.element_size() for value in parameters)))
    worlds.start_horovod(largest, groups)


def _replicated(config: TrainConfig, model: StageModel, collectives: Collectives) -> Gradients:
    """Return the gradients of a stage on several ranks."""
    parameters, statistics = model.parameters(), model.statistics()
    states = States(model.states, model.put)
    if config.shard_optimizer and parameters:
        return ShardedGradients(parameters, statistics, states, collectives)
    return ReplicatedGradients(parameters, statistics, states, collectives)


def open_group(library: Library, ranks: tuple[int, ...]) -> None:
    """Make a group of ranks known to the library. Collective: all ranks of the world call it."""
    if library == "horovod":
        worlds.process_set(ranks)
    else:
        worlds.communicator_among(ranks)


def collectives_of(library: Library, ranks: tuple[int, ...], rank: int, name: str) -> Collectives:
    """Return the collective operations of a group that is open."""
    if library == "horovod":
        replicas = worlds.process_set(ranks)
        return HorovodCollectives(worlds.horovod(), replicas, ranks, rank, name)
    return MPICollectives(ranks, rank, name)
