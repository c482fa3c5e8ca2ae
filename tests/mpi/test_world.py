import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.shared_memory import SETTINGS
from hvdtrain.world import World


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "collective",
    [
        World.barrier,
        lambda here: here.gather(here.rank),
        lambda here: here.gather_on_first(here.rank),
        lambda here: here.broadcast(here.rank, root=here.size - 1),
    ],
    ids=["barrier", "gather", "gather_on_first", "broadcast"],
)
def test_ranks_that_are_early_leave_their_cores_to_others(
    here: World, collective: Callable[[World], object]
) -> None:
    here.barrier()
    used = time.thread_time()
    if here.rank == here.size - 1:
        time.sleep(1)
    collective(here)
    assert time.thread_time() - used < 0.5


def test_a_rank_receives_what_another_sends(here: World) -> None:
    if here.communicator is None:
        with pytest.raises(AssertionError, match="one rank receives nothing"):
            here.receive(0, tag=5)
    elif here.rank == 0:
        received = [here.receive(source, tag=5) for source in range(1, here.size)]
        assert received == [
            {"rank": source, "row": [source] * 1000} for source in range(1, here.size)
        ]
    else:
        here.communicator.send({"rank": here.rank, "row": [here.rank] * 1000}, 0, 5)


@pytest.mark.several_ranks
def test_what_ranks_share_is_in_a_folder_of_their_job(here: World) -> None:
    """Two jobs whose names Open MPI hashes to the same 16 bits read each other's messages."""
    here.barrier()
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    folders = {Path(path).parent for path in maps if "_segment." in path}
    assert folders == {Path(os.environ[SETTINGS[0]])}
    assert here.gather(folders) == [folders] * here.size
