"""Complete runs under plans of several stages, as users start them."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.checkpoint import store
from hvdtrain.launch import mpirun
from tests.conftest import Program
from tests.pure.plan.forms import from_csv
from tests.single.training.jobs import SOON_SECONDS, begin, events_of, ranks_of, summary_of

HERE = "tests.single.training.plan_models"


def train(hvdtrain: Program, data: Path, run: Path, *options: Any, **settings: Any) -> Any:
    base = ("train", "--model", "cnn", "--data", data, "--run", run, "--batch-size", 50)
    return hvdtrain(*base, "--precision", "fp64", *options, **settings)


@pytest.fixture(scope="module")
def serial(hvdtrain: Program, small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two epochs on one rank."""
    run = tmp_path_factory.mktemp("serial") / "run"
    done = train(hvdtrain, small_set, run, "--epochs", 2)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def hybrid(hvdtrain: Program, small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two epochs on four ranks, with two stages of two replicas."""
    run = tmp_path_factory.mktemp("hybrid") / "run"
    done = train(
        *(hvdtrain, small_set, run, "--epochs", 2, "--plan", "hp:2x2", "--ranks", 4),
        *("--ledger", run.with_suffix(".csv"), "--trace", run.with_suffix(".json")),
    )
    assert done.returncode == 0, done.stderr
    assert "stage 1 on rank 2, 3: " in done.stdout
    return run


def assert_same_end(run: Path, reference: Path, bound: float = 1e-9) -> None:
    ours, theirs = summary_of(run)["final"], summary_of(reference)["final"]
    for name in ("train_loss", "test_loss"):
        assert ours[name] == pytest.approx(theirs[name], rel=bound), name
    assert ours["test_accuracy"] == theirs["test_accuracy"]


def test_a_hybrid_run_ends_where_the_serial_run_ends(serial: Path, hybrid: Path) -> None:
    assert_same_end(hybrid, serial)


def test_replicas_that_part_end_the_run_after_the_epoch_and_the_tensor_is_named(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    options = ("--model", "tests.single.training.models:drifts", "--ranks", 2, "--epochs", 3)
    done = train(hvdtrain, small_set, tmp_path / "run", *options, FAULTY_RANKS="1")
    assert done.returncode == 1
    assert "rank 1 and rank 0 hold different values of all.linear.bias, although" in done.stderr
    (fault,) = events_of(tmp_path / "run", "fault")
    assert (fault["step"], fault["cause"]) == (13, "replicas differ")


@pytest.mark.proves(
    "Replicas are compared every 100 steps and after each epoch; the first tensor that "
    "differs is named with its ranks."
)
def test_replicas_that_part_end_the_run_at_step_100_of_a_long_epoch(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Replicas used to be compared after epochs only, which may take hours."""
    options = ("--model", "tests.single.training.models:drifts", "--ranks", 2, "--batch-size", 4)
    done = train(hvdtrain, small_set, tmp_path / "run", *options, FAULTY_RANKS="1")
    assert done.returncode == 1
    assert "rank 1 and rank 0 hold different values of all.linear.bias, although" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    faults = {fault["cause"]: fault["step"] for fault in events_of(tmp_path / "run", "fault")}
    assert faults["replicas differ"] == 100
    assert events_of(tmp_path / "run", "step")[-1]["step"] == 100


def test_its_summary_has_communication_bubble_and_memory(hybrid: Path) -> None:
    summary = summary_of(hybrid)
    assert 0 < summary["bubble_fraction"] < 1
    communication = summary["communication"]
    assert 0 < communication["exposed_fraction"] <= communication["total_fraction"] < 1
    assert communication["exposed_fraction"] + summary["bubble_fraction"] < 1
    assert len(summary["peak_memory_bytes"]) == 4
    phases = summary["startup"]
    assert {"launch", "python", "mpi", "framework", "data", "plan", "model"} < phases.keys()
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == pytest.approx(summary["startup_seconds"])
    assert len(summary["disturbance"]) == len(summary["energy"]) == 1, "one host"
    assert [stage["ranks"] for stage in summary["plan"]["stages"]] == [[0, 1], [2, 3]]


def test_each_sample_is_in_one_gradient_an_epoch(hybrid: Path, small_set: Path) -> None:
    lines = hybrid.with_suffix(".csv").read_text().splitlines()[1:]
    rows = [line.split(",") for line in lines]
    assert {row[2] for row in rows} == {"0", "1"}, "who read the images"
    for epoch in ("1", "2"):
        assert len({row[3] for row in rows if row[0] == epoch}) == 601
    assert len(rows) == 2 * 601


def test_its_checkpoint_is_that_of_the_serial_run_by_name(serial: Path, hybrid: Path) -> None:
    ours, _, _ = store.load_newest(hybrid / "checkpoints")
    theirs, _, _ = store.load_newest(serial / "checkpoints")
    assert ours is not None
    assert theirs is not None
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert ours.optimizer.keys() == theirs.optimizer.keys()


@pytest.mark.proves(
    "A run resumes on another number of ranks, under another plan and for more epochs."
)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("dp", 2, None), ("mp", 3, "zb-h1")),
        (("mp", 2, "interleaved"), ("single", 1, None)),
    ],
)
def test_a_run_goes_on_under_another_plan(
    hvdtrain: Program, small_set: Path, tmp_path: Path, serial: Path, first: Any, then: Any
) -> None:
    run = tmp_path / "run"
    for (plan, ranks, schedule), more in ((first, ("--epochs", 1)), (then, ("--epochs", 2))):
        options = ["--plan", plan, "--ranks", ranks, *more]
        options += ["--schedule", schedule] if schedule else []
        options += ["--resume"] if run.exists() else []
        done = train(hvdtrain, small_set, run, *options)
        assert done.returncode == 0, done.stderr
    assert_same_end(run, serial)


def test_a_plan_file_with_unequal_replicas_trains(
    hvdtrain: Program, small_set: Path, tmp_path: Path, serial: Path
) -> None:
    plan = tmp_path / "plan.json"
    stages = [
        {"components": ["conv1"], "ranks": [0, 1, 2], "shares": [3, 1, 1]},
        {"components": ["conv2", "dense"], "ranks": [2, 1], "shares": [2, 1]},
        {"components": ["head"], "ranks": [0]},
    ]
    plan.write_text(json.dumps({"stages": stages, "microbatches": 4}))
    done = train(
        *(hvdtrain, small_set, tmp_path / "run", "--epochs", 2, "--plan", plan, "--ranks", 3),
    )
    assert done.returncode == 0, done.stderr
    assert_same_end(tmp_path / "run", serial)


@pytest.mark.proves("Measured and simulated steps are Chrome traces of one form.")
def test_measured_and_simulated_traces_have_one_form(
    hvdtrain: Program, hybrid: Path, tmp_path: Path
) -> None:
    simulated = tmp_path / "simulated.json"
    done = hvdtrain(
        *("plan", "show", "--model", "cnn", "--plan", "hp:2x2", "--ranks", 4),
        *("--batch-size", 50, "--trace", simulated),
    )
    assert done.returncode == 0, done.stderr
    traces = [
        json.loads(path.read_text())["traceEvents"]
        for path in (hybrid.with_suffix(".json"), simulated)
    ]
    kinds = []
    for trace in traces:
        spans = [event for event in trace if event["ph"] == "X"]
        assert {event["tid"] for event in spans} == {0, 1, 2, 3}
        assert min(event["ts"] for event in spans) == 0
        assert all(event["dur"] >= 0 for event in spans)
        kinds.append({event["name"] for event in spans if event["cat"] == "compute"})
    assert kinds[0] == kinds[1]
    assert {"0F0", "1B0", "1STEP"} <= kinds[0]


def test_the_actions_of_a_plan_are_a_file_that_reads_back(
    hvdtrain: Program, tmp_path: Path
) -> None:
    path = tmp_path / "actions.csv"
    done = hvdtrain(
        *("plan", "show", "--model", "cnn", "--plan", "mp", "--ranks", 2),
        *("--microbatches", 2, "--batch-size", 8, "--actions", path),
    )
    assert done.returncode == 0, done.stderr
    actions = from_csv(path.read_text())
    assert sorted(actions) == [0, 1]
    assert [str(action) for action in actions[1] if action.kind in "FB"] == [
        *("1F0", "1B0", "1F1", "1B1")
    ]


def test_what_needs_one_process_says_so_to_several(hvdtrain: Program) -> None:
    options = ("plan", "show", "--model", "cnn", "--ranks", 2)
    done = hvdtrain(*options, launcher=tuple(mpirun(2)), timeout=600)
    assert done.returncode == 2
    assert done.stderr.count("plan show runs in one process: start it without a launcher") == 1
    assert not done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--plan", "hp:3x1", "--ranks", 2), "hp:3x1 does not fit 2 ranks: start 1 or 3"),
        (("--plan", "mp", "--ranks", 2, "--schedule", "zb"), "--schedule zb is not known"),
        (
            ("--plan", "mp", "--ranks", 2, "--schedule", "zb-h1", "--recompute", "all"),
            "zb-h1 splits the backward, which --recompute does not allow: use 1f1b",
        ),
        (("--recompute", "conv3"), "names no component of the model; did you mean conv"),
        (("--trace", "absent/trace.json"), "its folder does not exist: create it first"),
        (("--trace", "."), "--trace '.' is not a file"),
        (("--trace", "/dev/null"), "--trace '/dev/null' is not a file"),
        (("--plan", "x" * 300), "unknown plan xxx"),
        (("--clip-norm", 0), "--clip-norm must be above 0"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    hvdtrain: Program, small_set: Path, tmp_path: Path, options: tuple[Any, ...], message: str
) -> None:
    done = train(hvdtrain, small_set, tmp_path / "run", *options, timeout=600)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("plan", "schedule", "message"),
    [
        ("hp:5x1", "1f1b", "has 5 stages, but the model has 4 component"),
        ("hp:2x1", "interleaved", "interleaved schedule needs several stages per rank"),
    ],
)
def test_a_plan_that_no_model_or_schedule_fits_is_refused(
    hvdtrain: Program, plan: str, schedule: str, message: str
) -> None:
    ranks = plan[3]
    done = hvdtrain(
        *("plan", "show", "--model", "cnn", "--ranks", ranks, "--plan", plan),
        *("--schedule", schedule),
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.proves(
    "A rank that hangs ends the job after `--stall-timeout`, with its action and the "
    "ranks that it waited for."
)
def test_a_rank_that_hangs_ends_the_job_with_what_it_was_doing(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    hung = tmp_path / "hung"
    done = hvdtrain(
        *("train", "--model", f"{HERE}:hangs", "--data", small_set, "--run", tmp_path / "run"),
        *("--plan", "mp", "--ranks", 2, "--microbatches", 4, "--stall-timeout", 3),
        HANG_AFTER=str(hung),
    )
    assert time.time() - float(hung.read_text()) < SOON_SECONDS
    assert done.returncode == 4, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    # Rank 1 hangs in the fifth forward of its stage; or rank 0 waits for its gradients.
    assert (
        "rank 1 on" in done.stderr
        and "step 2, 1F0: forward (stage 1, micro-batch 0" in done.stderr
    ) or ("rank 0 on" in done.stderr and "(stage 0, micro-batch " in done.stderr), done.stderr
    assert "with rank " in done.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named_with_its_action(
    small_set: Path, tmp_path: Path, how: signal.Signals
) -> None:
    run = tmp_path / "run"
    options = ["train", "--model", "cnn", "--epochs", "100000", "--stall-timeout", "3"]
    options += ["--data", str(small_set), "--run", str(run), "--plan", "mp", "--ranks", "2"]
    process = begin([*options, "--log-every", "1"], lambda: has_step(run, 3))
    ranks_of(process)[1].send_signal(how)
    _, errors = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 4
    assert len(errors.splitlines()) == 1, errors
    assert "in step " in errors
    actions = ["micro-batch", "reduction", "agreeing", "reading its samples", "starting"]
    actions += ["checkpoint", "evaluat"]  # of the end of an epoch
    assert any(action in errors for action in actions), errors
    if how == signal.SIGKILL:
        assert "rank 1 on" in errors
        assert "signal 9" in errors
    else:
        assert "stuck for longer" in errors


def has_step(run: Path, step: int) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and f'"step": {step}' in metrics.read_text()


def test_a_single_rank_that_hangs_ends_too(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    done = hvdtrain(
        *("train", "--model", f"{HERE}:hangs", "--data", small_set, "--run", tmp_path / "run"),
        *("--stall-timeout", 2),
        HANG_AFTER=str(tmp_path / "hung"),
        timeout=600,
    )
    assert done.returncode == 4, done.stderr
    assert "step 5, 0F0: forward (stage 0, micro-batch 0)" in done.stderr


def test_plan_check_tells_a_right_plan_from_a_wrong_result(hvdtrain: Program) -> None:
    common = ("plan", "check", "--plan", "mp", "--ranks", 2, "--batch-size", 9)
    done = hvdtrain(*common, "--model", "cnn", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["within_tolerance"]
    assert set(report["components"]) == {"conv1", "conv2", "dense", "head"}
    assert report["largest"] <= report["tolerance"] == 1e-12
    done = hvdtrain(*common, "--model", f"{HERE}:noisy")
    assert done.returncode == 1, done.stderr
    assert "NOT within the tolerance of 1e-12" in done.stdout


@pytest.mark.proves(
    "`plan show` prints stages, labels, memory and the step in counted operations; `plan "
    "check` tells a right plan from a wrong one."
)
def test_plan_show_prints_stages_labels_memory_and_the_timeline(
    hvdtrain: Program, tmp_path: Path
) -> None:
    saved = tmp_path / "plan.json"
    common = ("plan", "show", "--model", "resnet18", "--ranks", 3)
    done = hvdtrain(*common, "--plan", "mp", "--save", saved)
    assert done.returncode == 0, done.stderr
    assert "11,173,962" not in done.stdout, "of stages"
    assert "MP" in done.stdout
    assert "MiB in total" in done.stdout
    assert "0-9: forward" in done.stdout
    again = json.loads(hvdtrain(*common, "--plan", saved, "--json").stdout)
    assert sum(stage["parameters"] for stage in again["stages"]) == 11_173_962
    assert set(again["labels"].values()) == {"MP"}
    assert again["plan"]["microbatches"] == 12
    assert again["plan"] == json.loads(saved.read_text())
