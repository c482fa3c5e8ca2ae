"""All files of a checkpoint are on the disk before it counts, so that a power cut loses none.

The tests record real system calls. A test that kills processes cannot detect a missing fsync:
written data is in the memory of the system, which survives.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.checkpoint import store
from hvdtrain.host import files
from hvdtrain.jobs import watch
from tests.single.training.checkpoints import make, save
from tests.single.training.jobs import summary_of

State = tuple[int, int]  # size, and time of the last change


class Disk:
    """The state that is certainly on the disk, from recorded calls.

    Attributes:
        synced: the state of each file and folder when it was last synced, by inode.
        names: folders whose entries have changed since, by inode.
        final: the paths that got their final names, in order.
        faults: files that got their final names too early.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_recorded: bool = True) -> None:
        self.synced: dict[int, State] = {}
        self.names: dict[int, Path] = {}
        self.final: list[Path] = []
        self.faults: list[str] = []
        fsync, mkdir = os.fsync, os.mkdir

        def synced(file: int) -> None:
            fsync(file)
            if is_recorded:
                status = os.fstat(file)
                self.synced[status.st_ino] = state(status)
                self.names.pop(status.st_ino, None)

        def made(path: Any, *arguments: Any, **options: Any) -> None:
            mkdir(path, *arguments, **options)
            self.changed(Path(path).parent)

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "mkdir", made)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self.recorded(getattr(os, name)))

    def changed(self, folder: Path) -> None:
        self.names[folder.stat().st_ino] = folder

    def recorded(self, rename: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def recording(source: Any, target: Any) -> None:
            path = Path(target)
            counts = not path.name.startswith(".") and path.parent.name != "heartbeats"
            if counts:
                self.check(Path(source), path)
            rename(source, target)
            if counts:
                self.final.append(path)
                self.changed(path.parent)

        return recording

    def check(self, source: Path, target: Path) -> None:
        """Note the files of `source` that are not on the disk when it is renamed to `target`."""
        for path in (source, *(source.rglob("*") if source.is_dir() else ())):
            status = path.stat()
            if self.synced.get(status.st_ino) != state(status):
                kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
                self.faults.append(f"{target.name}: {kind} {path.name}")
        if store.NAME.fullmatch(target.name):
            above = [path.stat().st_ino for path in target.parent.parents]
            lost = [self.names[inode] for inode in above if inode in self.names]
            self.faults += [f"{target.name}: {folder}" for folder in lost]


def state(status: os.stat_result) -> State:
    return status.st_size, status.st_mtime_ns


@pytest.mark.proves(
    "What a checkpoint rests on is brought to the disk before it counts: content, then name."
)
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    files.make_folders(tmp_path / "a" / "checkpoints")
    for step in (1, 2, 2):
        save(tmp_path / "a" / "checkpoints", make(step))
        assert disk.names == {}
    assert [path.name for path in disk.final if path.suffix == ""] == [
        *("step-00000001", "step-00000002", "step-00000002")
    ]
    assert disk.faults == []


def test_a_missing_fsync_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the negative control of these tests."""
    disk = Disk(monkeypatch, is_recorded=False)
    save(tmp_path, make(1))
    assert {fault.partition(": ")[2] for fault in disk.faults} >= {
        *("file part-0000.safetensors", "file part-0001.safetensors", "file manifest.json"),
        "folder .unfinished--step-00000001",
    }


def test_whatever_is_replaced_is_on_the_disk_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    files.write_text(tmp_path / "text", "content", "the file")
    store.mark_best(tmp_path, "step-00000001", "val_accuracy", 0.5)
    watch.write(tmp_path, watch.Record("slurm", "h", "n", ("1",), 1, 1, "logs", 0.0, "1"))
    assert [path.name for path in disk.final] == ["text", "best.json", "job.json"]
    assert disk.faults == []
    assert disk.names == {}


def test_a_run_brings_all_that_a_checkpoint_rests_on_to_the_disk_first(
    small_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records have at least the length in the checkpoint; a resume cuts them to it."""
    run, ledger = tmp_path / "runs" / "new" / "run", tmp_path / "ledger.csv"
    disk, short = Disk(monkeypatch), list[str]()
    commit = store.commit

    def committed(
        folder: Path, name: str, writers: Any, kept: dict[str, Any], *others: Any
    ) -> Path:
        for path, size in ((run / "metrics.jsonl", "metrics_bytes"), (ledger, "ledger_bytes")):
            on_disk, _ = disk.synced.get(path.stat().st_ino, (-1, 0))
            if on_disk < kept[size]:
                short.append(f"{name}: {on_disk} of {kept[size]} bytes of {path.name}")
        return commit(folder, name, writers, kept, *others)

    monkeypatch.setattr(store, "commit", committed)
    words = ["train", "--model", "cnn", "--data", str(small_set), "--run", str(run)]
    words += ["--checkpoint-every", "2 steps", "--ledger", str(ledger), "--resume", "auto"]
    for steps in ("3", "5"):
        assert cli.run([*words, "--max-steps", steps]) == 0
    assert summary_of(run)["steps"] == 5
    assert {path.name for path in disk.final} >= {
        *("config.yaml", "summary.json", "best.json", "metrics.jsonl", "ledger.csv", "owner.json"),
        *(store.name_of(step) for step in (2, 3, 4, 5)),
    }
    assert (disk.faults, short) == ([], [])
    assert run not in disk.names.values()
