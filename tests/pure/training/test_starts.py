from pathlib import Path

import pytest

from hvdtrain.errors import RankError
from hvdtrain.training import starts
from hvdtrain.training.starts import MOST_FRUITLESS_STARTS, SUBMISSION
from tests.single.training.checkpoints import make, save


def slurm(job: int, requeued: int, submission: str = "") -> dict[str, str]:
    variables = {"SLURM_JOB_ID": str(job)}
    variables |= {"SLURM_RESTART_COUNT": str(requeued)} if requeued else {}
    return variables | ({SUBMISSION: submission} if submission else {})


@pytest.mark.proves(
    "A run that Slurm starts three times in a row without a new checkpoint ends with the reason."
)
def test_a_job_that_never_saves_is_not_requeued_for_ever(tmp_path: Path) -> None:
    for number in range(MOST_FRUITLESS_STARTS):
        starts.count_start(tmp_path, slurm(7, number))
    for number in (MOST_FRUITLESS_STARTS, MOST_FRUITLESS_STARTS + 1):
        with pytest.raises(RankError, match=rf"{number} starts in a row .* newest is none"):
            starts.count_start(tmp_path, slurm(7, number))


def test_a_chain_that_never_saves_comes_to_an_end(tmp_path: Path) -> None:
    """Each of its jobs is started once."""
    for job in range(MOST_FRUITLESS_STARTS):
        starts.count_start(tmp_path, slurm(job, 0, "ours"))
    with pytest.raises(RankError):
        starts.count_start(tmp_path, slurm(MOST_FRUITLESS_STARTS, 0, "ours"))


def test_a_new_checkpoint_is_progress(tmp_path: Path) -> None:
    for number in range(20):
        starts.count_start(tmp_path, slurm(7, number))
        if number % MOST_FRUITLESS_STARTS == 0:
            save(tmp_path / "checkpoints", make(number + 1))
    with pytest.raises(RankError, match="the newest is step-00000019"):
        for number in range(20, 24):
            starts.count_start(tmp_path, slurm(7, number))


@pytest.mark.parametrize(
    "next_start",
    [
        pytest.param({}, id="by hand"),
        pytest.param(slurm(8, 0), id="submitted again"),
        pytest.param(slurm(8, 0, "other"), id="made again"),
        pytest.param(slurm(7, 2), id="by the same job"),
    ],
)
def test_what_a_user_starts_is_not_counted(tmp_path: Path, next_start: dict[str, str]) -> None:
    for number in range(MOST_FRUITLESS_STARTS):
        starts.count_start(tmp_path, slurm(7, number))
    starts.count_start(tmp_path, next_start)


def test_a_job_whose_starts_each_try_several_times_comes_to_an_end(tmp_path: Path) -> None:
    """Once, the launcher's own restarts within one start by Slurm set the count to zero."""
    for number in range(MOST_FRUITLESS_STARTS):
        for _ in range(3):
            starts.count_start(tmp_path, slurm(7, number))
    for _ in range(2):
        with pytest.raises(RankError):
            starts.count_start(tmp_path, slurm(7, MOST_FRUITLESS_STARTS))


def test_a_count_that_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    for number in range(MOST_FRUITLESS_STARTS):
        starts.count_start(tmp_path, slurm(7, number))
    (tmp_path / starts.STARTS).write_text("[]")
    starts.count_start(tmp_path, slurm(7, MOST_FRUITLESS_STARTS))
