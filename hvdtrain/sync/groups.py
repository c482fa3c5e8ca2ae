"""The library that carries out collective operations: Horovod, or MPI alone."""

from hvdtrain import world as worlds
from hvdtrain.errors import UsageError
from hvdtrain.host.launchers import has_horovod
from hvdtrain.options.sections import Library
from hvdtrain.sync.collectives import Collectives, HorovodCollectives
from hvdtrain.sync.mpi import MPICollectives
from hvdtrain.world import World

NO_HIERARCHY = (
    "--allreduce hierarchical needs Horovod, since the all-reduces of --reduce-with mpi do not "
    "block: use --reduce-with horovod (hvdtrain setup installs it), or another --allreduce"
)
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
