"""Two starts of one run: one of them trains, and the other one does not disturb it."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from hvdtrain.checkpoint import store
from hvdtrain.errors import UsageError
from hvdtrain.host.ownership import NAME, STALE_SECONDS, claim
from hvdtrain.training.metrics import AppendOnly
from tests import warm
from tests.conftest import Program
from tests.single.training.checkpoints import make, save
from tests.single.training.jobs import assert_each_sample_once, begin, ranks_of, saves, summary_of

SLOW = ("--inject", "slow step=1 seconds=0.3 steps=100000")


def command(data: Path, run: Path, *options: object) -> list[str]:
    words = ["train", "--model", "cnn", "--data", data, "--batch-size", 60, "--run", run]
    words += ["--checkpoint-every", "1 step", "--ledger", run.with_suffix(".csv")]
    return [str(word) for word in (*words, *options)]


def grow_old(run: Path) -> None:
    """Change the last heartbeat to some time ago."""
    for path in (run / NAME, *(run / "heartbeats").iterdir()):
        then = path.stat().st_mtime - STALE_SECONDS - 1
        os.utime(path, (then, then))


@pytest.mark.proves(
    "A run folder has one owner: a second start is refused while the first one lives, a "
    "killed run resumes, one that comes back late commits nothing."
)
@pytest.mark.parametrize(
    "options",
    [
        ("--ranks", 2),
        pytest.param(("--framework", "tensorflow"), marks=pytest.mark.weekly),
    ],
    ids=["torch", "tensorflow"],
)
def test_a_second_start_of_a_run_that_lives_is_refused_and_costs_it_nothing(
    hvdtrain: Program, small_set: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    """Once, the clean-up of a double submission removed the first run's unfinished checkpoints."""
    run = tmp_path / "run"
    common = command(small_set, run, "--resume", "auto", *options)
    first = begin([*common, "--epochs", "1000", *SLOW], lambda: saves(run))
    second = hvdtrain(*common, "--max-steps", 20)
    assert second.returncode == 2, second.stderr
    owners = ranks_of(first) or [warm.fork_of(psutil.Process(first.pid))]
    assert f"{run} is in use by process {owners[0].pid} on " in second.stderr
    assert len(second.stderr.splitlines()) == 1
    first.send_signal(signal.SIGTERM)
    errors = first.communicate(timeout=600)[1]
    assert first.returncode == 75, errors
    assert not (run / NAME).exists()
    newest = store.stored(run / "checkpoints")[-1]
    epochs = store.step_of(newest.name) // 11 + 1
    done = hvdtrain(*common, "--epochs", epochs)
    assert done.returncode == 0, done.stderr
    assert "waiting" not in done.stdout
    assert_each_sample_once(run.with_suffix(".csv"), epochs)


def test_a_run_that_was_given_up_and_comes_back_ends_and_takes_nothing(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The process was stopped, as on a hung host; meanwhile another start finished the run."""
    run = tmp_path / "run"
    common = command(small_set, run, "--resume", "auto")
    old = begin(
        [*common, "--epochs", "1000", *SLOW],
        lambda: (run / "checkpoints" / "step-00000003").exists(),
    )
    rank = warm.fork_of(psutil.Process(old.pid))
    rank.suspend()
    grow_old(run)
    own_events = set((run / "tensorboard").iterdir())  # with the writer's buffered events
    done = hvdtrain(*common, "--epochs", 3)
    assert done.returncode == 0, done.stderr

    def contents() -> dict[Path, bytes]:
        files = {path for path in run.rglob("*") if path.is_file()} - own_events
        return {path: path.read_bytes() for path in files}

    before = contents()
    rank.resume()
    errors = old.communicate(timeout=600)[1]
    assert old.returncode == 2, errors
    assert f"{run} no longer belongs to this run" in errors
    assert len(errors.splitlines()) == 1
    after = contents()
    changed = [path for path in before | after if before.get(path) != after.get(path)]
    assert not changed
    assert_each_sample_once(run.with_suffix(".csv"), 3)


def test_a_run_that_was_killed_goes_on_at_once(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    common = command(small_set, run)
    killed = hvdtrain(*common, "--inject", "kill step=5 rank=0")
    assert killed.returncode == -signal.SIGKILL
    assert (run / NAME).exists()
    done = hvdtrain(*common, "--epochs", 1, "--resume")
    assert done.returncode == 0, done.stderr
    assert "waiting" not in done.stdout
    assert summary_of(run)["steps"] == 11
    assert not (run / NAME).exists()
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.parametrize("again", [False, True])
def test_an_owner_that_was_replaced_commits_and_removes_nothing(
    tmp_path: Path, again: bool
) -> None:
    """Also if it starts another checkpoint, and if a checkpoint of the step exists."""
    old, name = claim(tmp_path, tmp_path, print), store.name_of(2)
    save(tmp_path, make(1))
    store.write_part(tmp_path, name, 0, {"model/x": make(1).tensors["head.half"]}, old.token)
    (tmp_path / NAME).unlink()
    new = claim(tmp_path, tmp_path, print)
    store.clean(tmp_path)
    save(tmp_path, make(2))
    store.write_part(tmp_path, store.name_of(3), 0, {}, new.token)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if again:
        store.write_part(tmp_path, name, 0, {"model/x": make(1).tensors["head.half"]}, old.token)
    with pytest.raises(UsageError, match="no longer belongs to this run"):
        store.commit(tmp_path, name, [0], {"step": 2, "position": 0}, {}, old)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert store.commit(tmp_path, store.name_of(3), [0], {"step": 3}, {}, new).is_dir()


def test_what_a_replaced_run_still_records_is_not_in_the_new_ones_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old = AppendOnly(path, 0)
    old.write("one\ntwo\n")
    old.flush()
    new = AppendOnly(path, len("one\n"))
    old.write("two again\n")
    old.flush()
    new.write("three\n")
    new.flush()
    assert path.read_text() == "one\nthree\n"
