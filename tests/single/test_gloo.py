"""Communicators of ranks that torchrun started, on three of them."""

from pathlib import Path

from tests.single.torch.test_programs import run_script

SPLIT = """
import sys
from pathlib import Path
import numpy as np
from hvdtrain import gloo
world = gloo.start()
backwards = world.Split(0, -world.rank)
pair = world.Split(int(world.rank > 0), 5 - world.rank)
row, rows = np.array([world.rank], np.int64), np.zeros((3, 1), np.int64)
request = backwards.Iallgather(row, rows)
while not request.Test():
    pass
seen = [backwards.rank, backwards.allgather(world.rank), rows[:, 0].tolist()]
seen += [pair.rank, pair.allgather(world.rank), backwards.bcast(world.rank, 0)]
Path(sys.argv[1], str(world.rank)).write_text(repr(seen))
"""


def test_communicators_have_their_ranks_in_the_order_of_keys(tmp_path: Path) -> None:
    launcher = ("torchrun", "--no-python", "--nproc-per-node", "3")
    done = run_script(3, SPLIT, tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    all_backwards = [2, 1, 0]
    pairs = {0: (0, [0]), 1: (1, [2, 1]), 2: (0, [2, 1])}
    for rank in range(3):
        place, members = pairs[rank]
        expected = [2 - rank, all_backwards, all_backwards, place, members, 2]
        assert (tmp_path / str(rank)).read_text() == repr(expected)
