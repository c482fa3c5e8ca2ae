"""`--replicate`: second copies of checkpoints, and repairs when a disk is lost."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from hvdtrain.checkpoint import restore
from hvdtrain.checkpoint.store import load
from hvdtrain.config import TrainConfig
from hvdtrain.engine.folders import RunFolder
from hvdtrain.errors import DataError, UsageError
from hvdtrain.world import World
from tests.conftest import Program
from tests.single.training.checkpoints import make, save
from tests.single.training.jobs import assert_each_sample_once, summary_of


@pytest.mark.proves("`--replicate` restores what a lost disk held.")
@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),  # ranks alternate between the hosts
        ("aaa", [1, 2, 0]),
        ("a", [0]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("aaab", [3, 0, 1, 2]),
    ],
)
def test_each_part_has_one_copy_on_another_host(hosts: str, expected: list[int]) -> None:
    result = restore.owners_of(hosts)
    assert result == expected
    assert sorted(result) == list(range(len(hosts)))
    if max(map(hosts.count, hosts)) <= len(hosts) / 2:
        assert all(hosts[rank] != hosts[owner] for rank, owner in enumerate(result))


def test_a_copy_gives_back_what_is_lost_and_nothing_else(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", make(3))
    homes = [tmp_path / "disk-0", tmp_path / "disk-1"]
    for rank, home in enumerate(homes):
        restore.copy_part(path, 1 - rank, home)
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    (path / "part-0001.safetensors").unlink()
    damaged = bytearray(whole["part-0000.safetensors"])
    damaged[-1] ^= 1
    (path / "part-0000.safetensors").write_bytes(damaged)
    for home in homes:
        restore.repair(path, home)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == whole
    shutil.rmtree(path)
    for home in homes:
        restore.repair(path, home)
    assert load(path).progress["step"] == 3


def test_a_damaged_copy_is_not_given_back(tmp_path: Path) -> None:
    path, home = save(tmp_path / "checkpoints", make(3)), tmp_path / "disk"
    restore.copy_part(path, 1, home)
    copy = home / path.name / "part-0001.safetensors"
    copy.write_bytes(copy.read_bytes()[:-1] + b"\1")
    (path / "part-0001.safetensors").unlink()
    restore.repair(path, home)
    with pytest.raises(DataError, match="is missing"):
        load(path)


def test_copies_of_checkpoints_that_are_gone_are_removed(tmp_path: Path) -> None:
    home = tmp_path / "disk"
    for step in (1, 2, 3):
        path = save(tmp_path / "checkpoints", make(step))
        restore.copy_part(path, 1, home)
        if step == 2:
            shutil.rmtree(tmp_path / "checkpoints" / "step-00000001")
    assert restore.copied(home) == ["step-00000002", "step-00000003"]


def test_a_checkpoint_made_again_is_waited_for(tmp_path: Path) -> None:
    path, home = save(tmp_path / "checkpoints", make(3)), tmp_path / "disk"
    before = restore.identity(path)
    assert before is not None
    changed = make(3)
    changed.tensors["head.half"] += 1
    again = threading.Timer(0.5, lambda: save(tmp_path / "checkpoints", changed))
    again.start()
    restore.wait_for(path, before)
    restore.copy_part(path, 1, home)
    again.join()
    assert restore.identity(path) != before
    part = "part-0001.safetensors"
    assert (home / path.name / part).read_bytes() == (path / part).read_bytes()


def test_a_record_is_copied_as_it_grows_and_cut_where_it_was_cut(tmp_path: Path) -> None:
    record, home = tmp_path / "metrics.jsonl", tmp_path / "disk"
    home.mkdir()
    for text, size in (("one\ntwo\n", 4), ("one\ntwo\nthree\n", 14), ("one\n", 4)):
        record.write_text(text)
        restore.copy_record(record, size, home, is_new=False)
        assert (home / record.name).read_text() == text[:size]
    record.write_text("new\nand longer\n")
    restore.copy_record(record, 8, home, is_new=True)
    assert (home / record.name).read_text() == "new\nand "


def test_copies_that_others_may_change_are_refused(tmp_path: Path) -> None:
    """The folder's name is predictable, and a lost run restores its configuration from it."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    home = restore.home_of(str(disk), run, 0)
    home.mkdir(parents=True)
    (home / "config.yaml").write_text("on_alert: theirs\n")
    home.chmod(0o775)
    config = TrainConfig(
        model="cnn", data="data", run=str(run), resume="auto", replicate=str(disk)
    )
    world = World("none", 0, 1, 0, 1, 1)
    with pytest.raises(UsageError, match=f"^--replicate: {home} can be changed by other users"):
        restore.repair_records(config, world)
    with pytest.raises(UsageError, match="can be changed by other users"):
        restore.open_replication(config, RunFolder(run), world, print)
    assert not run.exists()
    home.chmod(0o755)
    restore.repair_records(config, world)
    assert (run / "config.yaml").exists()


def test_a_job_goes_on_when_a_disk_is_lost(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Each rank has a separate disk, as if it were on a separate host."""
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    common = ["train", "--model", "cnn", "--data", small_set, "--ranks", 2, "--batch-size", 60]
    common += ["--run", run, "--ledger", ledger, "--replicate", tmp_path / "disk{rank}"]

    def go_on(epochs: int, *options: object) -> str:
        done = hvdtrain(*common, "--epochs", epochs, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    go_on(1)
    (run / "checkpoints" / "step-00000011" / "part-0001.safetensors").unlink()
    output = go_on(2, "--resume")
    assert "repaired step-00000011 from the copies of --replicate: " in output
    assert "resumed after step 11" in output
    shutil.rmtree(run)  # the shared disk
    assert "resumed after step 22" in go_on(3, "--resume")
    lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    assert [line["epoch"] for line in lines if line["event"] == "epoch"] == [1, 2, 3]
    shutil.rmtree(tmp_path / "disk1")
    assert "resumed after step 33" in go_on(4, "--resume"), "the first copy is there"
    assert_each_sample_once(ledger, 4)
    plain = tmp_path / "plain"
    done = hvdtrain(*common[:-6], "--run", plain, "--epochs", 4)
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["weights_sha256"] == summary_of(plain)["weights_sha256"]


def test_a_new_run_takes_nothing_from_the_copies_of_another_one(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The run folder was removed, and a new run of the same name dies before it has saved."""
    run = tmp_path / "run"
    plain = ("train", "--model", "cnn", "--data", small_set, "--ranks", 2, "--epochs", 1)
    common = (*plain, "--run", run, "--replicate", tmp_path / "disk")
    assert hvdtrain(*common, "--seed", 1).returncode == 0
    shutil.rmtree(run)
    done = hvdtrain(*common, "--seed", 2, "--restarts", 1, "--inject", "kill step=3 rank=1")
    assert done.returncode == 0, done.stderr
    assert "resumed" not in done.stdout
    alone = tmp_path / "alone"
    done = hvdtrain(*plain, "--run", alone, "--seed", 2)
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["weights_sha256"] == summary_of(alone)["weights_sha256"]


def test_copies_of_a_run_whose_configuration_is_lost_are_not_cleared(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """A requeued job must not silently start over, and remove copies that could be restored."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    plain = ("train", "--model", "cnn", "--data", small_set, "--ranks", 2, "--epochs", 1)
    common = (*plain, "--run", run, "--replicate", disk, "--resume", "auto")
    done = hvdtrain(*common)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(run)
    for path in disk.rglob("config.yaml"):
        path.unlink()
    held = sorted(path.name for path in disk.rglob("*"))
    done = hvdtrain(*common)
    assert done.returncode == 2, done.stderr
    assert "holds copies of checkpoints of a run whose config.yaml is missing" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in disk.rglob("*")) == held


def test_a_disk_that_takes_no_copy_costs_a_line_and_not_the_run(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    common = ("train", "--model", "cnn", "--data", small_set, "--run", tmp_path / "run")
    done = hvdtrain(*common, "--epochs", 1, "--replicate", tmp_path / "file" / "folder")
    assert done.returncode == 2
    assert "--replicate: " in done.stderr
    assert "cannot be made: Not a directory" in done.stderr
    assert len(done.stderr.splitlines()) == 1
