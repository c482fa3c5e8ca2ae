import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.host.files import SHARED_SETTINGS
from hvdtrain.world import World


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "collective",
    [
        World.barrier,
        lambda world: world.gather(world.rank),
        lambda world: world.gather_on_first(world.rank),
        lambda world: world.broadcast(world.rank, root=world.size - 1),
    ],
    ids=["barrier", "gather", "gather_on_first", "broadcast"],
)
def test_ranks_that_are_early_leave_their_cores_to_others(
    world: World, collective: Callable[[World], object]
) -> None:
    world.barrier()
    used = time.thread_time()
    if world.rank == world.size - 1:
        time.sleep(1)
    collective(world)
    assert time.thread_time() - used < 0.5


def test_a_rank_receives_what_another_sends(world: World) -> None:
    if world.communicator is None:
        with pytest.raises(AssertionError, match="one rank receives nothing"):
            world.receive(0, tag=5)
    elif world.rank == 0:
        received = [world.receive(source, tag=5) for source in range(1, world.size)]
        assert received == [
            {"rank": source, "row": [source] * 1000} for source in range(1, world.size)
        ]
    else:
        world.send({"rank": world.rank, "row": [world.rank] * 1000}, 0, 5)()


@pytest.mark.several_ranks
@pytest.mark.usefixtures("horovod")  # of Open MPI, as its segments are
def test_what_ranks_share_is_in_a_folder_of_their_job(world: World) -> None:
    """Otherwise two jobs whose names Open MPI hashes to the same 16 bits mix their messages."""
    world.barrier()
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    folders = {Path(path).parent for path in maps if "_segment." in path}
    assert folders == {Path(os.environ[SHARED_SETTINGS[0]])}
    assert world.gather(folders) == [folders] * world.size
