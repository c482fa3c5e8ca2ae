"""`--stage` in a run: one rank a host copies, and all read the copy."""

from dataclasses import replace

from hvdtrain.data.index import Index, read_index
from hvdtrain.data.staging import stage, staged_folder
from hvdtrain.errors import DataError, UsageError
from hvdtrain.world import World


def staged(index: Index, directory: str | None, here: World) -> Index:
    """The index of the copy on this host; of the data set itself if none is wanted. Collective.

    Raises:
        DataError, UsageError: on all ranks, what went wrong on the first host where it did.
    """
    if directory is None:
        return index
    fault: DataError | UsageError | None = None
    if here.local_rank == 0:
        try:
            stage(index, directory)
        except (DataError, UsageError) as error:
            fault = error
    for found in here.gather(fault):
        if found is not None:
            raise found
    folder = staged_folder(index, directory)
    read_index(folder)
    return replace(index, folder=folder)  # the copy is held to the hashes of the data set itself
