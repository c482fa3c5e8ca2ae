"""The table of faults in the documentation: each is injected by `--inject`."""

import json
from pathlib import Path

import pytest

from hvdtrain.checkpoint import store
from tests.conftest import Program
from tests.single.training.jobs import (
    SOON_SECONDS,
    assert_each_sample_once,
    events_of,
    small_disk,
    summary_of,
)

EPOCHS = 3
ALERT = (
    'printf \'%s|%s|%s|%s\\n\' "$HVDTRAIN_CAUSE" "$HVDTRAIN_MESSAGE" "$HVDTRAIN_RUN"'
    ' "$(date +%s.%N)" >> '
)
COMMAND_LINES_WITH_SECRET = (
    "for f in $(grep -la 'T0[K]EN' /proc/[0-9]*/cmdline); do tr '\\0' ' ' < $f; echo; done > "
)
DIES = {
    "kill": "was ended by signal 9 (Killed) in step ",
    "segfault": "was ended by signal 11 (Segmentation fault) in step ",
    "memory": " is out of memory: ",
    "stop": "has been stuck for longer than --stall-timeout allows, in step 8",
}


def command(data: Path, run: Path, *options: object, ranks: int = 2) -> list[object]:
    common = ["train", "--model", "cnn", "--data", data, "--ranks", ranks, "--batch-size", 60]
    common += ["--epochs", EPOCHS, "--checkpoint-every", "3 steps", "--run", run]
    return [*common, "--ledger", run.with_suffix(".csv"), "--stall-timeout", 10, *options]


def failures_of(run: Path) -> list[str]:
    """Return the causes of restarts, without stragglers, which busy cores may cause."""
    faults = events_of(run, "fault")
    return [line["message"] for line in faults if line["cause"] == "rank failed"]


@pytest.fixture(scope="module")
def undisturbed_run(
    tmp_path_factory: pytest.TempPathFactory, hvdtrain: Program, small_set: Path
) -> Path:
    """Return an undisturbed run."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done = hvdtrain(*command(small_set, run))
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run: Path) -> str:
    """Return the hash of the undisturbed run's weights."""
    digest: str = summary_of(undisturbed_run)["weights_sha256"]
    return digest


@pytest.mark.proves(
    "A rank that is killed, crashes, hangs or runs out of memory ends the job by name, "
    "and `--restarts` resumes it."
)
@pytest.mark.parametrize(
    ("kind", "library"),
    [
        ("kill", "horovod"),
        ("stop", "horovod"),
        ("kill", "torch"),
        pytest.param("stop", "torch", marks=pytest.mark.weekly),
        pytest.param("segfault", "horovod", marks=pytest.mark.weekly),
        pytest.param("memory", "horovod", marks=pytest.mark.weekly),
    ],
)
def test_a_rank_that_fails_ends_the_job_and_another_start_finishes_it(
    hvdtrain: Program, small_set: Path, tmp_path: Path, undisturbed: str, kind: str, library: str
) -> None:
    run, alerts = tmp_path / "run", tmp_path / "alerts"
    fault = f"{kind} step=8 rank=1"
    options = ("--inject", fault, "--restarts", 1, "--on-alert", f"{ALERT}{alerts}")
    done = hvdtrain(*command(small_set, run, *options, "--reduce-with", library))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: ")]
    assert DIES[kind] in lines[0]
    assert lines[1].startswith("hvdtrain: restarting on 2 rank(s) from the last checkpoint")
    assert len(lines) == 2
    assert summary_of(run)["weights_sha256"] == undisturbed
    assert_each_sample_once(run.with_suffix(".csv"), EPOCHS)
    (message,) = failures_of(run)
    assert f"hvdtrain: {message}" == lines[0]
    (alert,) = [
        line for line in alerts.read_text().splitlines() if line.startswith("rank failed|")
    ]
    words, _, sent_at = alert.rpartition("|")
    assert words == f"rank failed|{message}; restarting|{run}"
    (mark,) = (run / "injected").iterdir()
    if kind != "stop":  # a hang takes --stall-timeout
        assert float(sent_at) - mark.stat().st_mtime < SOON_SECONDS


def test_a_job_goes_on_with_fewer_ranks_and_without_the_faults_of_those_that_are_gone(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run, fault = tmp_path / "run", "kill step=8..9 rank=2; kill step=20 rank=any seed=1"
    options = ("--inject", fault, "--restarts", "2,min-ranks=1")
    done = hvdtrain(*command(small_set, run, *options, ranks=3))
    assert done.returncode == 0, done.stderr
    summary = summary_of(run)
    starts = done.stderr.count("restarting on")
    assert summary["ranks"] == 3 - starts
    assert len(failures_of(run)) == starts
    assert len(list((run / "injected").iterdir())) == starts >= 1
    assert_each_sample_once(run.with_suffix(".csv"), EPOCHS)


def test_a_job_without_a_name_makes_one_folder(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    common = ("train", "--model", "cnn", "--data", small_set, "--ranks", 2, "--max-steps", 1)
    done = hvdtrain(*common, "--restarts", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "summary.json").exists()


def test_a_rank_that_hangs_is_named_by_the_others(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    options = ("--inject", "stop step=8 rank=1", "--stall-timeout", 14)
    done = hvdtrain(*command(small_set, tmp_path / "run", *options))
    assert done.returncode == 4
    assert "rank 1 on " in done.stderr
    assert "has sent no heartbeat for" in done.stderr


def test_a_rank_that_hangs_while_others_wait_for_its_part_of_a_checkpoint(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The rank hangs between two steps, where the ranks meet to save."""
    options = ("--inject", "stop step=1 rank=1", "--checkpoint-every", "1 step")
    done = hvdtrain(*command(small_set, tmp_path / "run", *options))
    assert done.returncode == 4
    assert "has been stuck for longer" in done.stderr


@pytest.mark.proves(
    "The command of `--on-alert` is not shown to other users: neither by `ps` nor by "
    "files of the run."
)
@pytest.mark.proves("Alerts, heartbeats and step lines report what happens to each rank.")
@pytest.mark.proves("A straggler is named with what it costs, and the run continues.")
def test_a_slow_rank_is_named_with_what_it_costs(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run, alerts = tmp_path / "run", tmp_path / "alerts"
    fault, seen = "slow step=6 rank=1 seconds=0.2", tmp_path / "seen"
    alert = f"{ALERT}{alerts}; {COMMAND_LINES_WITH_SECRET}{seen}; : T0KEN"
    options = ("--inject", fault, "--log-every", 5, "--on-alert", alert)
    done = hvdtrain(*command(small_set, run, *options))
    assert done.returncode == 0, done.stderr
    # `ps` shows commands to everyone: only the command that the user typed may contain it.
    shown = [line for line in seen.read_text().splitlines() if "-P -m" in line or "sh -c" in line]
    assert shown == []
    assert "T0KEN" in (run / "config.yaml").read_text()
    files = [path for path in run.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert [path for path in files if b"T0KEN" in path.read_bytes()] == []
    faults = events_of(run, "fault")
    assert [line["cause"] for line in faults].count("straggler") >= 1
    line = next(line for line in faults if "rank 1 is slow" in line["message"])
    assert "this costs" in line["message"]
    assert line["message"] in done.stdout
    assert line["message"] in alerts.read_text()
    steps = events_of(run, "step")
    # The last step of an epoch may be a separate line, with any values.
    ends = {line["step"] for line in events_of(run, "epoch")}
    within = [line for line in steps if line["step"] > 8 and line["step"] not in ends]
    assert {line["slowest_rank"] for line in within} == {1}
    last = events_of(run, "step")[-1]["ranks"]
    assert last["own_seconds"][1] > 0.2
    assert all(memory > 2**26 for memory in last["memory_bytes"])


def test_a_corrupt_checkpoint_is_passed_over(
    hvdtrain: Program, small_set: Path, tmp_path: Path, undisturbed: str
) -> None:
    run = tmp_path / "run"
    # The newest checkpoint is that after the second epoch. A busy machine has enough time to write
    # it before the job dies, but not the next one.
    fault = "slow step=24 steps=7 seconds=0.5; corrupt step=31; kill step=32"
    options = ("--inject", fault, "--restarts", 1, "--checkpoint-every", "1 epoch")
    done = hvdtrain(*command(small_set, run, *options))
    assert done.returncode == 0, done.stderr
    assert "skipped checkpoint step-00000022, renamed to damaged-step-00000022: " in done.stdout
    assert "resumed after step 11" in done.stdout
    assert "SHA-256 differs from the manifest" in done.stdout
    assert summary_of(run)["weights_sha256"] == undisturbed
    assert_each_sample_once(run.with_suffix(".csv"), EPOCHS)


def test_a_truncated_shard_ends_the_run_with_its_name_and_the_run_goes_on_without_it(
    hvdtrain: Program, small_set: Path, tmp_path: Path, undisturbed: str
) -> None:
    run = tmp_path / "run"
    before = {path.name: path.read_bytes() for path in small_set.iterdir()}
    done = hvdtrain(*command(small_set, run, "--inject", "truncate step=8 rank=1"))
    assert done.returncode == 3, done.stderr
    assert "train-00000.h5: shard cannot be opened" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in small_set.iterdir()} == before
    done = hvdtrain(*command(small_set, run, "--resume"))
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["weights_sha256"] == undisturbed


def test_a_full_disk_ends_the_run_in_one_line_and_the_run_goes_on_with_room(
    small_set: Path, tmp_path: Path, undisturbed: str
) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        run = disk.folder / "run"
        done = disk.run(*command(small_set, run, "--inject", "fill step=8 rank=1"))
        assert done.returncode == 3, done.stderr
        assert "No space left on device" in done.stderr
        assert store.load_newest(disk.seen / "run" / "checkpoints")[2] == []
        done = disk.run(*command(small_set, run, "--resume"))
        assert done.returncode == 0, done.stderr
        assert summary_of(disk.seen / "run")["weights_sha256"] == undisturbed


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fill step=3", "GiB are free where"),
        (
            "nan step=3 component=body",
            "the model has no component 'body': use conv1, conv2, dense",
        ),
        ("nan step=3 rank=1 component=body", "rank 1 holds no component 'body': use conv1"),
        ("kill step=3 rank=2", "rank 2 does not exist, use 0 to 1"),
        ("replan step=3", "use --plan adaptive on 2 ranks or more"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused_and_leaves_no_run(
    hvdtrain: Program, small_set: Path, tmp_path: Path, fault: str, message: str
) -> None:
    run = tmp_path / "run"
    done = hvdtrain(*command(small_set, run, "--inject", fault))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not run.exists()


def test_every_rank_gives_signs_of_life(undisturbed_run: Path) -> None:
    for rank in range(2):
        beat = json.loads((undisturbed_run / "heartbeats" / f"rank-{rank:04d}.json").read_text())
        assert beat["rank"] == rank
        assert beat["step"] == 33
        assert beat["memory_bytes"] > 2**26
        assert beat["host_memory_available_bytes"] > 0
        assert beat["load"] >= 0
        assert set(beat) >= {"time", "host", "pid", "doing"}


def test_an_alert_is_told_of_what_ends_a_run_of_one_process(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    alerts = tmp_path / "alerts"
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--run", tmp_path / "run"),
        *("--optimizer", "sgd", "--lr", "1e30", "--on-alert", f"{ALERT}{alerts}"),
    )
    assert done.returncode == 1
    (line,) = alerts.read_text().splitlines()
    assert line.startswith("job failed|the loss became nan at step 2")
    assert f"|{tmp_path / 'run'}|" in line
