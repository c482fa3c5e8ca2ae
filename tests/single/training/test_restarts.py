"""`train --restarts`: a job that loses ranks and resumes."""

import time
from pathlib import Path

import psutil
import pytest

from hvdtrain.checkpoint import store
from hvdtrain.plan.plan import refit
from hvdtrain.training import starts
from tests.conftest import Program
from tests.single.training.checkpoints import make, save
from tests.single.training.jobs import assert_each_sample_once, begin, ranks_of, saves, summary_of

EPOCHS = 12


@pytest.mark.proves(
    "`--restarts N,min-ranks=M` resumes on fewer ranks, and not after an error of the user."
)
@pytest.mark.parametrize(
    ("plan", "ranks", "expected"),
    [
        (None, 3, None),
        ("dp", 3, "dp"),
        ("mp", 2, "mp"),
        ("hp:2x2", 3, "dp"),
        ("hp:2x3", 4, "hp:2x2"),
        ("hp:4x2", 6, "hp:3x2"),
        ("hp:2x2", 1, "single"),
        ("plan.json", 3, "dp"),
        ("plan.json", 1, "single"),
    ],
)
def test_a_plan_fits_other_ranks(plan: str | None, ranks: int, expected: str | None) -> None:
    assert refit(plan, ranks) == expected


def test_a_job_that_loses_a_rank_goes_on_with_fewer_until_it_has_the_fewest(
    small_set: Path, tmp_path: Path
) -> None:
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    options = ["train", "--model", "cnn", "--data", small_set, "--ranks", 3, "--run", run]
    options += ["--batch-size", 30, "--epochs", EPOCHS, "--checkpoint-every", "3 steps"]
    options += ["--ledger", ledger, "--restarts", "2,min-ranks=2"]
    process = begin([str(option) for option in options], lambda: saves(run))
    dead: list[psutil.Process] = []
    for size in (3, 2):
        last, ranks = newest(run), ranks_of(process)
        while newest(run) <= last or len(ranks) != size or set(ranks) & set(dead):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
            ranks = ranks_of(process)
        dead += ranks
        ranks[-1].kill()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert errors.count("was ended by signal 9") == 2
    assert f"restarting on 2 rank(s) from the last checkpoint of {run}" in errors
    assert "; 0 restart(s) left" in errors
    assert summary_of(run)["ranks"] == 2
    assert_each_sample_once(ledger, EPOCHS)


@pytest.mark.proves("A job that lost a rank starts on all ranks again later, and loses no sample.")
@pytest.mark.proof
def test_a_job_that_lost_a_rank_starts_on_all_ranks_again(small_set: Path, tmp_path: Path) -> None:
    run, ledger, epochs = tmp_path / "run", tmp_path / "ledger.csv", 60
    options = ["train", "--model", "cnn", "--data", small_set, "--ranks", 3, "--run", run]
    options += ["--batch-size", 30, "--epochs", epochs, "--checkpoint-every", "40 steps"]
    options += ["--ledger", ledger, "--restarts", "1,min-ranks=2,grow-after=1", "--eval-every", 0]
    process = begin([str(option) for option in options], lambda: saves(run))
    ranks_of(process)[-1].kill()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert errors.count("was ended by signal 9") == 1
    assert f"restarting on 2 rank(s) from the last checkpoint of {run}" in errors
    assert "starting again on 3 rank(s), after 1 s on fewer" in errors
    assert summary_of(run)["ranks"] == 3
    assert_each_sample_once(ledger, epochs)


def test_a_start_that_saves_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    """Also if it saved the same step again that the earlier start had ended with."""
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    assert starts.newest_checkpoint(None) == starts.newest_checkpoint(tmp_path / "run") is None
    save(checkpoints, make(3))
    first = starts.newest_checkpoint(tmp_path / "run")
    assert first == starts.newest_checkpoint(tmp_path / "run") is not None
    save(checkpoints, make(3))
    assert starts.newest_checkpoint(tmp_path / "run") != first


def newest(run: Path) -> str:
    return max((path.name for path in store.stored(run / "checkpoints")), default="")


def test_what_the_user_has_to_fix_is_no_reason_to_start_again(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    model = ("--model", "tests.single.training.models:raises")
    common = ("train", "--data", small_set, "--ranks", 2, "--run", tmp_path / "run")
    done = hvdtrain(*common, "--model", "cnn", "--restarts", 3, "--plan", "hp:4x4")
    assert done.returncode == 2
    assert "restarting" not in done.stderr
    done = hvdtrain(*common, *model, "--restarts", 1, FAULTY_RANKS="1")
    assert done.returncode == 4
    assert done.stderr.count("restarting") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--restarts", "2,ranks=2"), "'ranks=2' is none of what it takes after a comma"),
        (("--restarts", "-1"), "--restarts -1 is not known: use N"),
        (
            ("--restarts", "2,grow-after=9"),
            "--restarts 2,grow-after=9: grow-after needs min-ranks=M",
        ),
    ],
)
def test_wrong_options_are_one_line(
    hvdtrain: Program, small_set: Path, options: tuple[str, ...], message: str
) -> None:
    done = hvdtrain("train", "--model", "cnn", "--data", small_set, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
