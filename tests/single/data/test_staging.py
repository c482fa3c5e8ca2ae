"""`--stage`: copies of a data set on the disks of hosts."""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from hvdtrain import data
from hvdtrain.data.index import read_index
from hvdtrain.data.shards import stage, staged_folder
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from tests.conftest import Program
from tests.single.training.jobs import assert_each_sample_once, small_disk, summary_of


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_copy_is_made_once_and_mended_where_it_is_damaged(
    small_set: Path, tmp_path: Path
) -> None:
    index = read_index(small_set)
    shards = sum(path.stat().st_size for path in small_set.glob("*.h5"))
    assert stage(index, str(tmp_path)) == shards
    folder = staged_folder(index, str(tmp_path))
    names = {path.name for path in small_set.iterdir()}
    assert {path.name for path in folder.iterdir()} == names
    assert all((folder / name).read_bytes() == (small_set / name).read_bytes() for name in names)
    assert stage(index, str(tmp_path)) == 0
    victim = folder / "test-00000.h5"
    flip_last_bit(victim)
    assert stage(index, str(tmp_path)) == victim.stat().st_size
    assert data.verify(folder) == []


def test_a_copy_in_shared_memory_outlives_the_next_start(small_set: Path, tmp_path: Path) -> None:
    """The next start of several ranks removed the copy of --stage /dev/shm as a killed job's."""
    index = read_index(small_set)
    stage(index, str(tmp_path))
    with files.temporary_folder(tmp_path):
        assert stage(index, str(tmp_path)) == 0


def test_a_damaged_source_is_named_and_not_copied(tmp_path: Path) -> None:
    source, disk = tmp_path / "source", tmp_path / "disk"
    index = data.synth(source, 100, 4, size=8)
    flip_last_bit(source / "test-00000.h5")
    with pytest.raises(DataError, match=r"test-00000\.h5: shard differs from the index"):
        stage(index, str(disk))
    assert [path.name for path in staged_folder(index, str(disk)).iterdir()] == ["train-00000.h5"]


def test_a_disk_without_room_is_one_line_and_keeps_nothing_half(
    small_set: Path, tmp_path: Path
) -> None:
    index = read_index(small_set)
    with small_disk(tmp_path / "disk", "256k") as disk:
        with pytest.raises(DataError, match=r"No space left on device\): leave --stage out"):
            stage(index, str(disk.seen))
        assert list(staged_folder(index, str(disk.seen)).iterdir()) == []


def test_files_of_copies_that_were_killed_are_removed_after_a_while(
    small_set: Path, tmp_path: Path
) -> None:
    index = read_index(small_set)
    folder = staged_folder(index, str(tmp_path))
    folder.mkdir()
    old, new = folder / ".train-00000.h5.1", folder / ".train-00000.h5.2"
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    stage(index, str(tmp_path))
    assert new.exists()
    assert not old.exists()


def test_processes_that_copy_at_the_same_time_all_end_with_a_whole_copy(
    small_set: Path, tmp_path: Path
) -> None:
    index = read_index(small_set)
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(partial(stage, index), [str(tmp_path)] * 8))
    folder = staged_folder(index, str(tmp_path))
    assert data.verify(folder) == []
    assert not list(folder.glob(".*"))


@pytest.mark.proves(
    "Copies on node-local disks are the user's own: a folder that another user may have "
    "made is refused."
)
@pytest.mark.parametrize("how", ["link", "group", "all", "owner"])
def test_a_folder_that_another_user_may_have_made_is_refused(
    small_set: Path, tmp_path: Path, how: str
) -> None:
    """The name is predictable: another user who made it could change the copy after its check."""
    index = read_index(small_set)
    folder = staged_folder(index, str(tmp_path / "disk"))
    folder.mkdir(parents=True)
    message = "can be changed by other users: check its content, then run chmod go-w "
    if how == "link":
        folder.rename(tmp_path / "theirs")
        folder.symlink_to(tmp_path / "theirs")
        message = "is a symbolic link: remove it"
    elif how == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root may give a folder away")
        os.chown(folder, 1234, 1234)
        message = r"belongs to another user \(uid 1234\): choose another folder"
    else:
        folder.chmod(0o775 if how == "group" else 0o757)
    with pytest.raises(UsageError, match=f"^--stage: {folder} {message}") as caught:
        stage(index, str(tmp_path / "disk"))
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == []


def test_a_copy_is_its_users_alone_whatever_the_umask(small_set: Path, tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        stage(read_index(small_set), str(tmp_path))
    finally:
        os.umask(before)
    folder = staged_folder(read_index(small_set), str(tmp_path))
    assert folder.stat().st_mode & 0o777 == 0o700
    stage(read_index(small_set), str(tmp_path))


def test_a_variable_is_that_of_the_host(
    small_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = read_index(small_set)
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path))
    assert staged_folder(index, "$LOCAL_DISK/data").parent == tmp_path / "data"
    monkeypatch.delenv("LOCAL_DISK")
    with pytest.raises(UsageError, match=r"\$LOCAL_DISK/data: a variable in it is not set on"):
        stage(index, "$LOCAL_DISK/data")


def test_a_run_reads_the_copy_and_is_the_same_run(hvdtrain: Program, tmp_path: Path) -> None:
    source, disk = tmp_path / "source", tmp_path / "disk"
    data.synth(source, 300, 4, size=8)
    common = ("train", "--model", "cnn", "--data", source, "--ranks", 2, "--batch-size", 50)
    plain, run = tmp_path / "plain", tmp_path / "run"
    assert hvdtrain(*common, "--epochs", 2, "--run", plain).returncode == 0
    ledger = ("--ledger", tmp_path / "ledger.csv")
    done = hvdtrain(*common, *ledger, "--epochs", 2, "--run", run, "--stage", "$D", D=str(disk))
    assert done.returncode == 0, done.stderr
    assert f"reading the copy of {source} in {disk}/hvdtrain-" in done.stdout
    assert summary_of(run)["weights_sha256"] == summary_of(plain)["weights_sha256"]
    assert_each_sample_once(tmp_path / "ledger.csv", 2, 300)
    done = hvdtrain(*common, "--run", tmp_path / "none", "--stage", "$ABSENT/x")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--stage $ABSENT/x: a variable in it is not set on" in done.stderr
