"""A job executes nothing from a folder that another user could have changed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.host import files
from hvdtrain.jobs import task


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """A task blocks signals until its exec; programs that later tests start would inherit that."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, with a configuration."""
    folder = tmp_path / "run"
    folder.mkdir(0o755)
    (folder / "config.yaml").write_text("model: cnn\n")
    (folder / "config.yaml").chmod(0o644)
    return folder


@pytest.mark.parametrize("task_mode", ["rank", "runs"])
@pytest.mark.parametrize("name", ["", "config.yaml"])
@pytest.mark.parametrize("permissions", [0o775, 0o757])
def test_a_folder_that_others_may_change_is_not_executed(
    run: Path, capfd: pytest.CaptureFixture[str], task_mode: str, name: str, permissions: int
) -> None:
    """A colleague could replace a waiting job's program under umask 002, usual on clusters."""
    (run / name).chmod(permissions)
    assert task.main([task_mode, str(run)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"hvdtrain: {run / name} can be changed by other users: ")
    assert "chmod go-w" in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_not_executed(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.chown(run, 1234, 1234)
    assert task.main(["rank", str(run)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{run} belongs to another user (uid 1234)" in line


def test_a_run_that_is_gone_is_one_line(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").unlink()
    assert task.main(["rank", str(run)]) == 3
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("config.yaml: No such file or directory: submit the run again")


def test_its_own_folder_is_executed(run: Path) -> None:
    task.check(run)


def test_what_is_made_is_writable_by_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with files.only_owner_may_write():
            (tmp_path / "own").mkdir()
        (tmp_path / "usual").mkdir()
        files.write_text(tmp_path / "secret", "s", "the secret", mode=files.PRIVATE)
        files.write_text(tmp_path / "file", "f", "the file")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"own": 0o755, "usual": 0o775, "secret": 0o600, "file": 0o664}
