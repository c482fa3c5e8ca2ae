"""One rank's checkpoint files, and a run that loses its folder while they are written."""

from pathlib import Path

import numpy as np
import pytest

from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.store import Saver
from hvdtrain.host.activity import Activity


@pytest.mark.parametrize("copies", [{"model/weight": np.ones(3)}, {}])
def test_a_run_that_lost_its_folder_withdraws_the_checkpoint_it_was_writing(
    tmp_path: Path, copies: dict[str, np.ndarray]
) -> None:
    """Once, a run suspended at the start of a checkpoint left a file of it."""
    saver = Saver(tmp_path, 0, "token", Activity(None, 0, 600, print))
    saver.begin(store.name_of(4), lambda: copies, lambda: None)
    saver.withdraw()
    assert not list(tmp_path.iterdir())
    saver.activity.close()


def test_a_withdrawal_leaves_the_files_of_other_ranks_and_runs(tmp_path: Path) -> None:
    name = store.name_of(4)
    store.write_part(tmp_path, name, 1, {"model/weight": np.ones(3)}, "token")
    store.write_part(tmp_path, name, 0, {"model/weight": np.ones(3)}, "another")
    before = sorted(tmp_path.rglob("*"))
    saver = Saver(tmp_path, 0, "token", Activity(None, 0, 600, print))
    saver.begin(name, lambda: {"model/bias": np.ones(3)}, lambda: None)
    saver.withdraw()
    assert sorted(tmp_path.rglob("*")) == before
    saver.activity.close()
