"""The reported state of runs whose files are half-written, old or deleted."""

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.errors import DataError, UsageError
from hvdtrain.jobs import watch
from hvdtrain.jobs.watch import Record

RECORD = Record(
    cluster="local",
    host=socket.gethostname(),
    name="run",
    jobs=("999999999",),
    ranks=2,
    nodes=1,
    logs="logs",
    submitted=0.0,
    version="0.1.0",
)


def test_a_run_whose_process_is_gone_has_failed_unless_it_has_a_summary(tmp_path: Path) -> None:
    watch.write(tmp_path, RECORD)
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"event": "step", "step": 7, "epoch": 2, "images_per_second": 10.5})
        + '\n{"event": "epo'
    )
    (row,) = watch.rows(*watch.runs_of([str(tmp_path)]))
    assert (row.state, row.step, row.epoch, row.images_per_second) == ("FAILED", 7, 2, 10.5)
    (tmp_path / "summary.json").write_text("{}")
    (row,) = watch.rows(*watch.runs_of([str(tmp_path)]))
    assert row.state == "COMPLETED"


def test_the_accuracy_is_that_of_the_last_evaluation(tmp_path: Path) -> None:
    watch.write(tmp_path, RECORD)
    epochs: list[dict[str, float | None]] = [
        {"test_accuracy": 0.3, "val_accuracy": None},
        {"test_accuracy": 0.5, "val_accuracy": 0.4},
        {"test_accuracy": None, "val_accuracy": None},
    ]
    accuracies = []
    for last in range(4):
        lines = [{"event": "epoch", "step": 1, "epoch": 1, **line} for line in epochs[:last]]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "metrics.jsonl").write_text(text)
        (row,) = watch.rows(*watch.runs_of([str(tmp_path)]))
        accuracies.append(row.accuracy)
    assert accuracies == [None, 0.3, 0.4, 0.4]


def test_a_run_whose_turn_has_not_come_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process makes all runs of a study without Slurm."""
    monkeypatch.setattr(watch, "_is_alive", lambda number: number == RECORD.jobs[0])
    watch.write(tmp_path, replace(RECORD, submitted=1000.0))
    beat = tmp_path / "heartbeats" / "rank-0000.json"
    beat.parent.mkdir()
    states = []
    # No heartbeat yet, one of an earlier start, one of a living process, one of a dead process.
    for moment, process in ((None, 0), (900, os.getpid()), (1100, os.getpid()), (1200, 2**22 + 1)):
        if moment is not None:
            beat.write_text(json.dumps({"time": moment, "pid": process}))
        (row,) = watch.rows(*watch.runs_of([str(tmp_path)]))
        states.append(row.state)
    assert states == ["PENDING", "PENDING", "RUNNING", "FAILED"]


def test_a_run_of_another_host_runs_as_long_as_it_gives_signs_of_life(tmp_path: Path) -> None:
    watch.write(tmp_path, replace(RECORD, host="elsewhere"))
    beat = tmp_path / "heartbeats" / "rank-0000.json"
    beat.parent.mkdir()
    active = []
    for ago in (3, 600):
        beat.write_text(json.dumps({"time": time.time() - ago, "pid": 1}))
        active.append(watch.active([tmp_path])[tmp_path])
    assert active == [list(RECORD.jobs), []]


def test_the_last_words_of_hvdtrain_are_the_note(tmp_path: Path) -> None:
    logs = tmp_path / watch.LOGS
    watch.write(tmp_path, replace(RECORD, logs=str(logs)))
    logs.mkdir()
    (logs / f"{RECORD.jobs[0]}_0_log.err").write_text(
        "hvdtrain: disk full\nslurmstepd: error: killed\n"
    )
    (row,) = watch.rows(*watch.runs_of([str(tmp_path)]))
    assert row.note == "disk full"
    assert "disk full" in watch.as_text([row])


def test_a_run_with_brackets_in_its_name_is_shown_as_it_is(tmp_path: Path) -> None:
    """rich raised an error for such a name, and `jobs status` showed no run at all."""
    run = tmp_path / "x[/b]:b:[red]"
    run.mkdir(parents=True)
    watch.write(run, RECORD)
    (row,) = watch.rows(*watch.runs_of([str(run)]))
    assert "x[/b]:b:[red]" in watch.as_text([replace(row, run="x[/b]:b:[red]")])


def test_the_sign_of_life_is_that_of_the_rank_silent_longest(tmp_path: Path) -> None:
    watch.write(tmp_path, RECORD)
    beats = tmp_path / "heartbeats"
    beats.mkdir()
    for rank, ago in enumerate((5, 90)):
        text = json.dumps({"time": time.time() - ago, "pid": 1})
        (beats / f"rank-{rank:04d}.json").write_text(text)
    (row,) = watch.rows(*watch.runs_of([str(tmp_path)]))
    assert row.heartbeat_seconds == pytest.approx(90, abs=5)


def test_a_folder_of_runs_is_looked_into(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        watch.write(tmp_path / name, RECORD)
    (tmp_path / "c").mkdir()
    assert [run.name for run in watch.runs_of([str(tmp_path)])[0]] == ["a", "b"]
    for name, problem in (("c", "c holds no run with a job"), ("d", "d is not a folder")):
        with pytest.raises(UsageError, match=f"{problem}: start a job with hvdtrain jobs submit"):
            watch.runs_of([str(tmp_path / name)])


def test_a_run_whose_record_is_bad_stops_neither_status_nor_cancel(tmp_path: Path) -> None:
    for name, text in (("a", "{"), ("b", None), ("c", None)):
        (tmp_path / name).mkdir()
        watch.write(tmp_path / name, replace(RECORD, ranks=10**18))
        if text is not None:
            (tmp_path / name / watch.RECORD).write_text(text)
    (tmp_path / "c" / "metrics.jsonl").write_text('{"event": "step", "step": "many"}\n')
    bad, good, half = watch.rows(*watch.runs_of([str(tmp_path)]))
    assert (bad.state, good.state, half.state) == (watch.UNREADABLE, "FAILED", "FAILED")
    assert "job.json is not valid" in bad.note
    assert "metrics.jsonl is not valid (step cannot be 'many')" in half.note
    cancelled = watch.cancel([str(tmp_path)])
    assert [next(cancelled), next(cancelled)] == [
        f"{tmp_path / name}: no job is waiting or running" for name in ("b", "c")
    ]
    with pytest.raises(DataError, match=r"job.json is not valid .*the other runs are cancelled"):
        next(cancelled)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"jobs": 3}', "[" * 5000])
def test_a_record_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / watch.RECORD).write_text(text)
    with pytest.raises(DataError, match="is not valid"):
        watch.read(tmp_path)
