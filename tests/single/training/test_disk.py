"""A disk that fails for a while: unreadable files are not treated as damaged, and failed writes
are repeated."""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain import cli
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.tensorfile import Entry
from hvdtrain.errors import DataError
from tests.conftest import Program
from tests.single.training.checkpoints import make, save
from tests.single.training.jobs import (
    assert_each_sample_once,
    begin,
    events_of,
    fill,
    small_disk,
    summary_of,
)

# Fails the first reads of files whose path contains $FAULT_PATH, in each process separately.
FAULTY_READ = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int made = 0;
ssize_t read(int file, void *target, size_t count) {
    static ssize_t (*real)(int, void *, size_t) = 0;
    if (!real) real = (ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    const char *part = getenv("FAULT_PATH"), *times = getenv("FAULT_TIMES");
    if (part && times && length > 0) {
        path[length] = 0;
        if (strstr(path, part) && made < atoi(times)) {
            made++;
            errno = atoi(getenv("FAULT_ERRNO"));
            return -1;
        }
    }
    return real(file, target, count);
}
"""
EIO, ESTALE = 5, 116


@pytest.fixture(scope="module")
def faulty_read(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    (folder / "read.c").write_text(FAULTY_READ)
    library = folder / "read.so"
    options = ("-x", "c++", "-shared", "-fPIC", "-ldl")
    subprocess.run(["g++", *options, "-o", library, folder / "read.c"], check=True)
    return library


@pytest.mark.parametrize(
    ("file", "error", "times", "code"),
    [
        ("step-00000004/part-0000", ESTALE, 2, 0),
        ("step-00000004/part-0000", EIO, 1000, 3),
        pytest.param("step-00000004/manifest", EIO, 1000, 3, marks=pytest.mark.weekly),
    ],
)
def test_a_good_checkpoint_that_cannot_be_read_for_a_while_stays_one(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    faulty_read: Path,
    file: str,
    error: int,
    times: int,
    code: int,
) -> None:
    """Once, it was renamed to damaged-..., and the run resumed from an older one."""
    run = tmp_path / "run"
    common = ["train", "--model", "cnn", "--data", small_set, "--run", run]
    common += ["--checkpoint-every", "2 steps"]
    assert hvdtrain(*common, "--max-steps", 4).returncode == 0
    names = {path.name for path in (run / "checkpoints").iterdir()}
    done = hvdtrain(
        *(*common, "--max-steps", 5, "--resume"),
        cold=True,
        LD_PRELOAD=str(faulty_read),
        FAULT_PATH=file,
        FAULT_TIMES=str(times),
        FAULT_ERRNO=str(error),
    )
    assert done.returncode == code, done.stderr
    if code:
        assert len(done.stderr.splitlines()) == 1
        assert f"cannot be read: {os.strerror(error)}, 4 times in a row" in done.stderr
        assert {path.name for path in (run / "checkpoints").iterdir()} == names
    else:
        assert "resumed after step 4" in done.stdout
    assert not list((run / "checkpoints").glob("damaged-*"))


@pytest.mark.proves("A disk that fails for a while costs no run and no good checkpoint.")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_not_the_run(
    small_set: Path, tmp_path: Path, ranks: int
) -> None:
    """The alert frees space, as a user would who reads it."""
    with small_disk(tmp_path / "disk", "32m") as disk:
        run, filler = disk.seen / "run", disk.seen / "filler"
        words = ["train", "--model", "cnn", "--data", small_set, "--run", disk.folder / "run"]
        words += ["--epochs", 3, "--checkpoint-every", "3 steps", "--ranks", ranks]
        words += ["--ledger", disk.folder / "ledger.csv"]
        words += ["--log-every", 1, "--inject", "slow step=4 seconds=0.7 steps=7"]
        alert = f'[ "$HVDTRAIN_CAUSE" != "checkpoint failed" ] || rm -f {disk.folder / "filler"}'
        third = run / "checkpoints" / store.name_of(3)
        words += ["--on-alert", alert]
        process = begin(list(map(str, words)), third.exists, bool(disk.launcher), disk.launcher)
        fill(filler)
        errors = process.communicate(timeout=240)[1]
        assert process.returncode == 0, errors
        assert not filler.exists()
        faults = [line for line in events_of(run, "fault") if line["cause"] == "checkpoint failed"]
        assert 1 <= len(faults) <= 2
        assert "cannot be written: No space left on device; the run cont" in faults[0]["message"]
        steps = [line["step"] for line in events_of(run, "step")]
        assert steps == list(range(1, summary_of(run)["steps"] + 1)), "no record is lost"
        assert_each_sample_once(disk.seen / "ledger.csv", 3)
        _, path, skipped = store.load_newest(run / "checkpoints")
        assert path is not None
        assert (path.name, skipped) == (store.name_of(summary_of(run)["steps"]), [])
        assert not list((run / "checkpoints").glob(".*"))


def test_what_could_not_be_saved_is_not_the_best(
    small_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with equal accuracies, the first epoch stayed the best, but had no checkpoint."""
    commit, names = store.commit, list[str]()

    def refuses_the_first(folder: Path, name: str, *others: Any) -> None:
        names.append(name)
        if len(names) == 1:
            raise DataError(f"{name} cannot be written: Input/output error")
        commit(folder, name, *others)

    monkeypatch.setattr(store, "commit", refuses_the_first)
    run = tmp_path / "run"
    words = ["train", "--model", "cnn", "--data", small_set, "--run", run, "--epochs", 3]
    words += ["--holdout", 0.2, "--batch-size", 200, "--lr", 1e-12]
    assert cli.run([str(word) for word in words]) == 0
    assert [line["cause"] for line in events_of(run, "fault")] == ["checkpoint failed"]
    # The failure is known in epoch 2 or at its end, by the speed of the disk.
    assert store.best(run / "checkpoints") in [run / "checkpoints" / name for name in names[1:]]


def damage(part: Path, how: str) -> None:
    content = part.read_bytes()
    match how:
        case "bit":
            part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "lost":
            part.unlink()
        case "short":
            part.write_bytes(content[:-1])


@pytest.mark.parametrize("how", ["bit", "lost", "short"])
def test_no_checkpoint_goes_before_the_new_one_was_read_back(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, only receipts were checked: good checkpoints were removed for a damaged one."""
    save(tmp_path, make(1))
    before = files_of(tmp_path)
    write = store.write_tensors

    def write_badly(path: Path, tensors: dict[str, np.ndarray]) -> Entry:
        entry = write(path, tensors)
        damage(path, how)
        return entry

    monkeypatch.setattr(store, "write_tensors", write_badly)
    with pytest.raises(DataError, match=r"step-00000002 cannot be written: .*part-0000"):
        store.write_part(tmp_path, store.name_of(2), 0, {"model/0": np.arange(9.0)})
    store.discard(tmp_path, store.name_of(2), 0, "")
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("how", ["lost", "short"])
def test_a_file_that_is_gone_when_the_others_are_done_is_noticed(tmp_path: Path, how: str) -> None:
    save(tmp_path, make(1))
    before = files_of(tmp_path)
    for rank in range(2):
        store.write_part(tmp_path, store.name_of(2), rank, {f"model/{rank}": np.arange(9.0)})
    damage(next(tmp_path.glob(f"{store.UNFINISHED}*/part-0001*")), how)
    with pytest.raises(DataError, match=r"step-00000002 cannot be written: .*part-0001"):
        store.commit(tmp_path, store.name_of(2), range(2), {"step": 2}, {})
    store.prune(tmp_path, keep_last=1)
    assert files_of(tmp_path) == before


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_a_resumed_run_could_not_use_takes_no_place_of_what_it_can(tmp_path: Path) -> None:
    for step in (5, 7, 9, 8):
        save(tmp_path, make(step))
    store.prune(tmp_path, keep_last=2, newest=store.name_of(8))
    names = [path.name for path in store.stored(tmp_path)]
    assert names == [store.name_of(step) for step in (7, 8, 9)]
