"""A temporary folder: kept while a process claims it, removed after a kill."""

import os
import signal
from pathlib import Path

import pytest

from hvdtrain.host import files
from tests.children import end_of, in_child


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_it_is_kept_while_one_of_its_processes_lives(base: Path) -> None:
    def be_killed() -> None:
        folder = files.claim_folder("shared")
        assert folder is not None
        (folder / "segment").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    mine = files.claim_folder("shared")
    assert mine is not None
    assert mine.stat().st_mode & 0o777 == 0o700
    assert end_of(in_child(be_killed)) == -signal.SIGKILL
    files.claim_folder("another")
    assert (mine / "segment").exists()


def test_what_the_killed_leave_goes_with_the_next_job(base: Path) -> None:
    def be_killed() -> None:
        folder = files.claim_folder("killed")
        assert folder is not None
        (folder / "segment").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    assert end_of(in_child(be_killed)) == -signal.SIGKILL
    assert [path.name for path in base.glob("*/*")] == ["segment"]
    mine = files.claim_folder("next")
    assert list(base.iterdir()) == [mine]


def test_ranks_that_come_and_go_at_once_all_have_one(base: Path) -> None:
    """Each rank removes unclaimed folders, but never one that another rank is about to claim."""

    def come_and_go() -> None:
        for _ in range(300):
            folder = files.claim_folder("shared")
            assert folder is not None
            (folder / f"segment-{os.getpid()}").touch()

    children = [in_child(come_and_go) for _ in range(4)]
    assert [end_of(child) for child in children] == [0] * 4


def test_a_link_in_its_place_is_not_followed(base: Path) -> None:
    (base / "elsewhere").mkdir()
    (base / f"hvdtrain-job-{os.getuid()}-mine").symlink_to(base / "elsewhere")
    assert files.claim_folder("mine") is None


def test_where_there_is_no_room_open_mpi_does_as_it_would(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SHARED_MEMORY", base / "none")
    assert files.claim_folder("mine") is None


def test_a_folder_ends_with_its_block_and_that_of_the_killed_with_the_next(base: Path) -> None:
    def be_killed() -> None:
        with files.temporary_folder(base) as folder:
            (folder / "file").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    assert end_of(in_child(be_killed)) == -signal.SIGKILL
    assert [path.name for path in base.glob("*/*")] == ["file"]
    with files.temporary_folder(base) as one, files.temporary_folder(base) as two:
        assert sorted(base.iterdir()) == sorted([one, two])
    assert not list(base.iterdir())
