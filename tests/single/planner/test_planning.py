"""`--plan auto` and `adaptive`: measurements on the ranks of a run, and the chosen plans."""

import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hvdtrain import models
from hvdtrain.backends.pytorch.measured import subject_of
from hvdtrain.config import TrainConfig
from hvdtrain.data import synth
from hvdtrain.data.index import TargetForm
from hvdtrain.device import held_bytes
from hvdtrain.host.activity import last_activity
from hvdtrain.models.costs import component_costs
from hvdtrain.parallel.stage import Images
from hvdtrain.planner import choose, measure, profilefile
from hvdtrain.planner.measure import Subject, measured_sizes
from hvdtrain.planner.network import MeasuredNetwork
from hvdtrain.planner.profile import Profile, RankTimes
from hvdtrain.world import World
from tests import warm
from tests.conftest import Program
from tests.single.training.jobs import (
    assert_each_sample_once,
    begin,
    clients_of,
    events_of,
    ranks_of,
    resume,
    samples_of,
    saves,
    summary_of,
    suspend,
)

ADAPTIVE: tuple[Any, ...] = (
    *("train", "--model", "cnn", "--batch-size", 20, "--threads", 1),
    *("--plan", "adaptive"),
)
LABELS = TargetForm((), "int64", 10)
# A change of plans at a known step, on a machine of any speed.
REPLAN = "replan step=200"
RUN = ("train", "--model", "cnn", "--batch-size", 32, "--max-steps", 4, "--threads", 1)


@pytest.mark.proves(
    "`--plan auto` measures the model on the ranks, chooses a plan and keeps the profile "
    "on request."
)
def test_a_plan_is_measured_chosen_and_trained(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    profile = tmp_path / "profile.json"
    options = (*RUN, "--data", small_set, "--plan", "auto", "--ranks", 2, "--profile", profile)
    done = hvdtrain(*options, "--run", run)
    assert done.returncode == 0, done.stderr
    assert "plan: measured in " in done.stdout
    assert "chosen: " in done.stdout
    assert "computing alone, in equal parts, would take" in done.stdout
    (plan,) = events_of(run, "plan")
    assert plan["predicted_seconds"] > 0
    held = {rank for stage in plan["stages"] for rank in stage["ranks"]}
    assert held == {0, 1}
    assert summary_of(run)["steps"] == 4
    done = hvdtrain(*options, "--run", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert f"plan: read from {profile} in " in done.stdout
    (again,) = events_of(tmp_path / "again", "plan")
    assert {key: again[key] for key in ("stages", "microbatches", "schedule")} == {
        key: plan[key] for key in ("stages", "microbatches", "schedule")
    }
    kept = profile.read_bytes()
    done = hvdtrain(*options, "--batch-size", 16, "--run", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert f"plan: measured ({profile} has other settings: cnn, 5 classes, 16 px, 32 images" in (
        done.stdout
    )
    assert profile.read_bytes() == kept


@pytest.mark.proves(
    "`--plan adaptive` changes the plan when a rank or the network becomes slow, and "
    "loses no sample."
)
@pytest.mark.weekly
def test_a_plan_is_changed_while_training(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """A rank that becomes slow gets less work; no sample is lost or repeated.

    Each rank is slow in turn until one has lost work: a rank may have too little to lose any, and
    on a busy machine another change may come first.
    """
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    options = (*ADAPTIVE, "--ranks", 2, "--data", small_set, "--run", run, "--ledger", ledger)
    slow = "; ".join(
        f"slow step={100 * number} steps=50 rank={number % 2} seconds=0.2"
        for number in range(2, 40)
    )
    command = [*map(str, options), "--epochs", "128", "--inject", slow]
    process = begin(command, lambda: change_for_a_slow_rank(run))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, process.communicate()
    change = change_for_a_slow_rank(run)
    assert change is not None
    assert re.match(r"rank [01] is \d", change["cause"])
    assert change["predicted_seconds"] < change["before_seconds"]
    assert " saves " in change["reason"]
    assert change["candidates"][0]["seconds"] > 0
    assert "decision" not in events_of(run, "plan")[0]
    whole_epochs = events_of(run, "checkpoint")[-1]["step"] // 31
    for ids in samples_of(ledger, whole_epochs)[:whole_epochs]:
        assert len(ids) == len(set(ids)) == 601


def change_for_a_slow_rank(run: Path) -> dict[str, Any] | None:
    """Return the first change that gives the rank that was slow last less to compute."""
    if not (run / "metrics.jsonl").exists():
        return None
    changes = [line for line in events_of(run, "plan") if line.get("decision") == "change"]
    fitting = [
        line
        for line in changes
        if line["step"] > 200 and has_less(line["step"] // 100 % 2, line["stages"])
    ]
    return fitting[0] if fitting else None


def has_less(rank: int, stages: list[dict[str, Any]]) -> bool:
    """Return whether a plan for the CNN gives this rank less work than the other one."""
    costs = component_costs(models.components("cnn", 5, 16), 16, classes=5)
    flops = {cost.name: cost.forward_flops for cost in costs}
    work = dict.fromkeys((0, 1), 0.0)
    for stage in stages:
        for holder, share in zip(stage["ranks"], stage["shares"], strict=True):
            part = share / sum(stage["shares"])
            work[holder] += part * sum(flops[name] for name in stage["components"])
    return work[rank] < work[1 - rank]


@pytest.mark.proves(
    "`--schedule-every E` measures and chooses again between epochs, and loses no sample."
)
def test_a_plan_is_chosen_again_between_epochs(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    options = (*ADAPTIVE, "--ranks", 2, "--epochs", 5, "--data", small_set, "--run", run)
    options += ("--ledger", ledger, "--schedule-every", 2)
    done = hvdtrain(*options)
    assert done.returncode == 0, done.stderr
    scheduled = [
        line for line in events_of(run, "plan") if line.get("cause", "").startswith("epoch ")
    ]
    # 601 samples are 31 steps of 20.
    assert [(line["step"], line["cause"]) for line in scheduled] == [
        (62, "epoch 3"),
        (124, "epoch 5"),
    ]
    assert {line["decision"] for line in scheduled} <= {"stay", "change"}
    assert_each_sample_once(ledger, 5)


CONGESTED = "events: [{slows: links, factor: 10, ranks: [1], from_step: 40}]"


@pytest.mark.proves(
    "`--plan adaptive` finds a link that has become slow, and keeps its plan if nothing changes."
)
@pytest.mark.weekly
@pytest.mark.parametrize("events", [CONGESTED, ""])
def test_a_plan_that_spares_a_slow_link_is_changed_to(
    hvdtrain: Program, tmp_path: Path, events: str
) -> None:
    """Emulated: rank 1 sends and receives slowly from step 40 on, or nothing changes."""
    cluster, run = tmp_path / "cluster.yaml", tmp_path / "run"
    cluster.write_text(
        "{ranks: 4, ranks_per_node: 4, gflops: 100, memory_gbytes: 20, memory_gib: 32, "
        f"gbytes: 1, latency_microseconds: 30, fixed_microseconds: 60, {events}}}"
    )
    synth(tmp_path / "data", 4096, 10, 8)
    options: tuple[Any, ...] = ("train", "--model", "cnn", "--image-size", 32)
    options += ("--data", tmp_path / "data", "--run", run, "--plan", "adaptive", "--ranks", 4)
    done = hvdtrain(*options, "--emulate", f"{cluster}:20", "--max-steps", 120)
    assert done.returncode == 0, done.stderr
    _, *decisions = events_of(run, "plan")
    changes = [line for line in decisions if line["decision"] == "change"]
    if not events:
        assert not changes
        return
    (change,) = changes
    assert re.match(r"ranks wait \d+% of a step longer", change["cause"])
    assert change["step"] > 40
    # What rank 1 still has is behind the layers with many weights and large outputs.
    held = {
        name for stage in change["stages"] if 1 in stage["ranks"] for name in stage["components"]
    }
    assert held <= {"head"}
    steps = {line["step"]: line for line in events_of(run, "step")}
    assert steps[120]["images_per_second"] > 1.3 * steps[60]["images_per_second"]


@pytest.mark.weekly
def test_components_are_compared_with_their_predictions_while_training(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # 1f1b: under a schedule that splits backward, components cannot be timed separately.
    options = (*ADAPTIVE, "--ranks", 2, "--max-steps", 120, "--schedule", "1f1b")
    done = hvdtrain(*options, "--data", small_set, "--run", run)
    assert done.returncode == 0, done.stderr
    profiles = events_of(run, "profile")
    assert profiles
    assert all(len(line["ranks"]) == 2 for line in profiles)
    # The others take almost no time, and one wait of the process is a hundred times that.
    for component in ("conv1", "conv2"):
        compared = [
            rank["times_predicted"].get(component) for line in profiles for rank in line["ranks"]
        ]
        ratios = [ratio for ratio in compared if ratio is not None]
        assert 0.05 < statistics.median(ratios) < 20, compared


@pytest.mark.weekly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_killed_while_the_plan_changes(
    small_set: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """A killed or hung rank: the run resumes from its last checkpoint and trains to the end."""
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    options = (*ADAPTIVE, "--ranks", 2, "--epochs", 9, "--data", small_set)
    options += ("--run", run, "--ledger", ledger, "--checkpoint-every", "1 epoch")
    options += ("--restarts", 1, "--inject", REPLAN, "--stall-timeout", 10)
    process, ranks, doing = caught_in_change(options, run, ledger)
    ranks[1].send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert ("was ended by signal 9" if number == signal.SIGKILL else "stuck for longer") in errors
    assert "changing the plan" in errors
    assert summary_of(run)["steps"] == 279, doing
    (again,) = [line for line in events_of(run, "plan") if "decision" not in line][1:]
    assert again["step"] > 0
    assert again["step"] % 31 == 0
    assert_each_sample_once(ledger, 9)


@pytest.mark.weekly
def test_a_job_suspended_and_asked_to_leave_while_the_plan_changes(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The job completes the migration, saves and leaves; another start trains the rest."""
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    options = [*ADAPTIVE, "--ranks", 2, "--data", small_set, "--run", run, "--ledger", ledger]
    inject = ("--epochs", 9, "--inject", REPLAN)
    process, ranks, doing = caught_in_change([*options, *inject], run, ledger)
    job = [warm.fork_of(psutil.Process(process.pid)), *ranks]
    suspend(job)
    process.send_signal(signal.SIGTERM)
    resume(job)
    errors = process.communicate(timeout=600)[1]
    assert process.returncode == 75, errors
    assert "state saved" in errors, doing
    assert any(line.get("decision") == "change" for line in events_of(run, "plan"))
    left = events_of(run, "checkpoint")[-1]["step"]
    epochs = left // 31 + 1
    done = hvdtrain(*options, "--resume", "--epochs", epochs)
    assert done.returncode == 0, done.stderr
    for ids in samples_of(ledger, epochs):
        assert len(ids) == len(set(ids)) == 601


def caught_in_change(
    options: Sequence[object], run: Path, ledger: Path
) -> tuple["subprocess.Popen[str]", list[psutil.Process], str]:
    """Start a job, and return it, its ranks and the action of rank 1 while that migrates.

    On a busy machine a change may start and end between two looks: then the job starts again.
    """
    for _ in range(12):
        shutil.rmtree(run, ignore_errors=True)
        ledger.unlink(missing_ok=True)
        process = begin([str(word) for word in options], lambda: saves(run))
        ranks = ranks_of(process)
        activity = Path(clients_of(process)[1].environ()["HVDTRAIN_ACTIVITY"])
        while process.poll() is None:
            if "changing the plan" in (doing := last_activity(activity, 1)):
                return process, ranks, doing
            time.sleep(0.001)
        assert process.returncode == 0, process.communicate()
    raise AssertionError("each of twelve jobs changed its plan between two looks")


@pytest.mark.weekly
def test_a_bad_component_is_found_after_a_change_too(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = (*ADAPTIVE, "--ranks", 2, "--epochs", 2, "--data", small_set)
    fault = "replan step=20; nan step=50 component=dense steps=1"
    done = hvdtrain(*options, "--run", run, "--inject", fault, "--on-bad-step", "skip")
    assert done.returncode == 0, done.stderr
    first, change, *_ = events_of(run, "plan")
    assert 20 <= change["step"] < 50
    assert (change["decision"], change["cause"]) == ("change", "--inject replan")
    assert change["stages"] != first["stages"]
    assert f"step {change['step']:,}: --inject replan: change" in done.stdout
    assert summary_of(run)["skipped_steps"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--plan", "auto", "--schedule", "zb-h1", "--recompute", "all"),
            "zb-h1 splits the backward, which --recompute does not allow: use 1f1b",
        ),
        (
            ("--plan", "auto", "--schedule-every", "2"),
            "--schedule-every needs --plan adaptive: add it, or leave this out",
        ),
        (
            ("--plan", "auto:4"),
            "--plan auto:4 is not valid: write auto:XGiB for X GiB per rank",
        ),
        (
            ("--plan", "auto", "--profile", "/nowhere/profile.json"),
            "--profile /nowhere/profile.json: its folder does not exist: create it first",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    hvdtrain: Program, small_set: Path, tmp_path: Path, options: tuple[Any, ...], message: str
) -> None:
    common = (*RUN, "--data", small_set, "--ranks", 2, "--run", tmp_path / "run")
    done = hvdtrain(*common, *options)
    assert (done.returncode, done.stderr) == (2, f"hvdtrain: {message}\n")
    assert not (tmp_path / "run").exists()


def test_one_rank_may_have_a_limit(hvdtrain: Program, small_set: Path, tmp_path: Path) -> None:
    common = (*RUN, "--data", small_set, "--plan", "auto:8GiB", "--run", tmp_path / "run")
    done = hvdtrain(*common)
    assert done.returncode == 0, done.stderr
    assert "chosen: single" in done.stdout


def test_a_run_that_used_more_than_its_limit_reports_it(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The profile is outdated: it claims that a process needs almost no memory."""
    profile = tmp_path / "profile.json"
    common = (*RUN, "--data", small_set, "--profile", profile, "--plan")
    done = hvdtrain(*common, "auto:8GiB", "--run", tmp_path / "within")
    assert done.returncode == 0, done.stderr
    assert not events_of(tmp_path / "within", "fault")
    text = profile.read_text()
    changed = re.sub(r'"resident_bytes": ?\d+', '"resident_bytes": 1', text)
    assert changed != text
    profile.write_text(changed)
    done = hvdtrain(*common, "auto:0.1GiB", "--run", tmp_path / "beyond")
    assert done.returncode == 0, done.stderr
    (fault,) = events_of(tmp_path / "beyond", "fault")
    assert fault["cause"] == "memory limit"
    excess = r"rank 0 used 0\.\d+ GiB, \d+\.\d% more than --plan auto:0\.1GiB allows: raise .*"
    assert re.fullmatch(excess, fault["message"])
    assert fault["message"] in done.stdout
    # With a line for each step the excess shows in time.
    done = hvdtrain(*common, "auto:0.1GiB", "--run", tmp_path / "ended", "--log-every", 1)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(f"hvdtrain: {excess}; stopped after step [12], state saved: .*", line)
    assert events_of(tmp_path / "ended", "checkpoint")
    done = hvdtrain(*common, "auto:8GiB", "--run", tmp_path / "ended", "--resume")
    assert done.returncode == 0, done.stderr
    assert summary_of(tmp_path / "ended")["steps"] == 4


def test_a_run_that_used_a_little_more_than_its_limit_continues(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    common = (
        *(*RUN, "--data", small_set, "--profile", profile),
        *("--log-every", 1, "--plan"),
    )
    done = hvdtrain(*common, "auto:8GiB", "--run", tmp_path / "within")
    assert done.returncode == 0, done.stderr
    (peak,) = summary_of(tmp_path / "within")["peak_memory_bytes"]
    changed = re.sub(r'"resident_bytes": ?\d+', '"resident_bytes": 1', profile.read_text())
    profile.write_text(changed)
    done = hvdtrain(*common, f"auto:{peak / 1.07 / 2**30:.4f}GiB", "--run", tmp_path / "more")
    assert done.returncode == 0, done.stderr
    assert [line["cause"] for line in events_of(tmp_path / "more", "fault")] == ["memory limit"]
    assert summary_of(tmp_path / "more")["steps"] == 4


def test_nothing_fits_is_one_line(hvdtrain: Program, small_set: Path, tmp_path: Path) -> None:
    options = (*RUN, "--data", small_set, "--ranks", 2, "--run", tmp_path / "r")
    done = hvdtrain(*options, "--plan", "auto:0.1GiB")
    assert done.returncode == 2
    assert done.stderr.startswith("hvdtrain: no plan fits: ")
    assert "raise the limit of --plan" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.proves(
    "A rank stays below the limit of `--plan auto:XGiB`; where no plan fits, one line names the "
    "component and what it lacks."
)
@pytest.mark.weekly
def test_what_a_limit_allows_is_not_exceeded(hvdtrain: Program, tmp_path: Path) -> None:
    """Data parallelism needs more memory than the limit, the measurement and its plan less.

    Most of it are activations: how much the process itself holds differs between machines.
    """
    synth(tmp_path / "data", 4096, 5)
    common: tuple[Any, ...] = ("train", "--model", "cnn", "--data", tmp_path / "data")
    common += ("--ranks", 2, "--threads", 1, "--batch-size", 4096)
    common += ("--max-steps", 2, "--optimizer", "sgd")
    peaks: list[int] = []
    for name in ("dp", "auto"):
        plan = f"auto:{0.85 * peaks[0] / 2**30:.3f}GiB" if peaks else name
        done = hvdtrain(*common, "--plan", plan, "--run", tmp_path / name, cold=True)
        assert done.returncode == 0, done.stderr
        peaks.append(max(summary_of(tmp_path / name)["peak_memory_bytes"]))
    assert peaks[1] <= 0.85 * peaks[0]


@pytest.mark.parametrize("model", ["cnn", pytest.param("vit_tiny", marks=pytest.mark.weekly)])
def test_every_component_is_measured_in_every_way(model: str) -> None:
    """A process without MPI measures its own times only."""
    config = TrainConfig(model=model, data="", plan="auto", batch_size=16).check()
    components = models.components(model, 10, 32)
    images = Images([0.5] * 3, [0.25] * 3, torch.device("cpu"), "fp32")
    world = World("none", 0, 1, 0, 1, 1)
    subject = subject_of(config, components, 32, LABELS, images)
    measured, costs = measure.local_times(subject, world), subject.costs
    assert list(measured.components) == [cost.name for cost in costs]
    assert measured.resident_bytes > 2**20
    sizes = measured_sizes(16, 1)
    for number, times in enumerate(measured.components.values()):
        assert [size for size, _ in times.forward.points] == list(sizes)
        assert times.forward(8) > 0
        assert times.backward(8) > 0
        assert (times.input_half is None) == (number == 0 or not costs[number].parameters)
    assert sum(times.update for times in measured.components.values()) > 0


def limited(limit_gib: float | None) -> Subject:
    plan = "auto" if limit_gib is None else f"auto:{limit_gib}GiB"
    config = TrainConfig(model="cnn", data="", plan=plan, batch_size=512, threads=1).check()
    images = Images([0.5] * 3, [0.25] * 3, torch.device("cpu"), "fp32")
    return subject_of(config, models.components("cnn", 10, 32), 32, LABELS, images)


def sizes_of(times: RankTimes) -> list[float]:
    return [size for size, _ in times.components["conv1"].forward.points]


def test_sizes_that_do_not_fit_a_limit_are_left_out_and_measured_without_it(
    tmp_path: Path,
) -> None:
    world = World("none", 0, 1, 0, 1, 1)
    held = held_bytes(torch.device("cpu"))
    subject = limited(held / 2**30 + 1)
    whole = measure.local_times(subject, world)
    assert sizes_of(whole) == [32, 64, 128, 256, 512]
    subject = limited(held / 2**30)
    times = measure.local_times(subject, world)
    assert sizes_of(times) == [32, 64]
    path, words = tmp_path / "profile.json", subject.words(world)
    profilefile.save(path, words, Profile((times,)), MeasuredNetwork(("here",)))
    assert choose._read(subject, path, words, 1)[0] is not None
    read, why = choose._read(limited(None), path, words, 1)
    assert read is None
    profilefile.save(path, words, Profile((whole,)), MeasuredNetwork(("here",)))
    for microbatches in (None, 1, 16):
        other = limited(None)
        other = replace(other, config=replace(other.config, microbatches=microbatches))
        assert choose._read(other, path, words, 1)[1] == ""
    assert why.endswith("was measured under a memory limit, up to 64 samples)")


def test_what_is_measured_goes_down_by_halves() -> None:
    assert measured_sizes(64, 2) == (2, 4, 8, 16, 32)
    assert measured_sizes(64, 4, 16) == (2, 4, 8, 16)
    assert measured_sizes(64, 1) == (4, 8, 16, 32, 64)
    assert measured_sizes(3, 4) == (2,)
