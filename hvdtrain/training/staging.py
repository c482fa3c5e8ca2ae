"""`--stage` in a run: one rank per host copies the data set, and all ranks read the copy."""

from dataclasses import replace

from hvdtrain.data.index import Index, read_index
from hvdtrain.data.staging import stage, staged_folder
from hvdtrain.errors import DataError, UsageError
from hvdtrain.world import World


def staged(index: Index, directory: str | None, world: World) -> Index:
    """Return the index of this host's copy; of the data set itself without a copy. Collective.

    Args:
        directory: for the copy; None for no copy.

    Raises:
        DataError, UsageError: on all ranks, the error of the first host that has one.
    """
    if directory is None:
        return index
    own_error: DataError | UsageError | None = None
    if world.local_rank == 0:
        try:
            stage(index, directory)
        except (DataError, UsageError) as error:
            own_error = error
    for rank_error in world.gather(own_error):
        if rank_error is not None:
            raise rank_error
    folder = staged_folder(index, directory)
    read_index(folder)
    return replace(index, folder=folder)  # with the data set's hashes, to check the copy
