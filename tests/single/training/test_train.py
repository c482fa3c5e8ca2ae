"""Complete runs of one process, as a user starts them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from hvdtrain.checkpoint import store
from hvdtrain.training.loop import MEASURED
from tests import warm
from tests.conftest import Program, program_environment
from tests.single.training.jobs import SOON_SECONDS, begin, events_of, summary_of

TRAIN = ("train", "--model", "cnn", "--epochs", "2", "--batch-size", "50", "--seed", "3")


@pytest.fixture(scope="module")
def finished(hvdtrain: Program, small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two epochs with hold-out, augmentation and a ledger."""
    run = tmp_path_factory.mktemp("runs") / "run"
    done = hvdtrain(
        *TRAIN,
        *("--data", small_set, "--run", run, "--ledger", run.with_suffix(".csv")),
        *("--holdout", 0.2, "--augment", "crop-flip", "--log-every", 3, "--microbatches", 2),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 5
    return run


@pytest.mark.proves(
    "A run folder holds configuration, metrics, TensorBoard, checkpoints and a summary; "
    "its configuration starts a run again, and the command line wins over it."
)
def test_the_summary_holds_every_key_of_the_contract(finished: Path) -> None:
    summary = summary_of(finished)
    keys = """model parameters ranks plan epochs steps samples seconds startup_seconds
        train_seconds images_per_second communication bubble_fraction peak_memory_bytes final
        weights_sha256 versions"""
    assert set(keys.split()) <= summary.keys()
    assert summary["samples"] == 2 * 481
    assert summary["steps"] == 2 * 10
    assert summary["epochs"] == 2
    assert summary["ranks"] == 1
    assert 0 < summary["train_seconds"] < summary["seconds"]
    between = summary["seconds"] - summary["train_seconds"]
    assert 0 < summary["evaluation_seconds"] < between
    assert summary["startup_seconds"] > 0
    assert len(summary["peak_memory_bytes"]) == 1
    (shared,) = summary["disturbance"]
    assert 0 <= shared["other_cores"] <= shared["cores"] == len(os.sched_getaffinity(0))
    (energy,) = summary["energy"]
    assert energy["joules"] or energy["missing"]
    assert energy["seconds"] >= summary["seconds"]
    assert summary["communication"] == {"exposed_fraction": 0.0, "total_fraction": 0.0}
    final = summary["final"]
    assert set(final) == {
        *("train_loss", "test_loss", "test_accuracy", "val_loss", "val_accuracy")
    }
    assert final["test_accuracy"] > 0.3, "chance is 0.2"


def test_metrics_hold_steps_epochs_plan_and_checkpoints(finished: Path) -> None:
    assert [line["step"] for line in events_of(finished, "epoch")] == [10, 20]
    assert [line["step"] for line in events_of(finished, "step")] == [3, 6, 9, 10, 13, 16, 19, 20]
    assert events_of(finished, "plan")[0]["microbatches"] == 2
    assert [line["step"] for line in events_of(finished, "checkpoint")] == [10, 20]
    for line in events_of(finished, "step"):
        assert line["loss"] > 0
        assert line["images_per_second"] > 0


@pytest.mark.parametrize(
    ("every", "evaluated"), [(2, [False, True, True]), (0, [False, False, False])]
)
def test_epochs_that_are_not_evaluated_have_no_accuracy(
    hvdtrain: Program, small_set: Path, tmp_path: Path, every: int, evaluated: list[bool]
) -> None:
    """The last epoch is evaluated for any interval, unless evaluation is off."""
    run = tmp_path / "run"
    options = ("--epochs", 3, "--holdout", 0.2, "--eval-every", every)
    done = hvdtrain(*TRAIN, *options, "--data", small_set, "--run", run)
    assert (done.returncode, done.stderr) == (0, "")
    lines = events_of(run, "epoch")
    for kind in MEASURED:
        assert [line[kind] is not None for line in lines] == evaluated
    assert all(line["train_loss"] > 0 for line in lines)
    table = [line.split() for line in done.stdout.splitlines()[-4:-1]]
    assert [row[2:6] == ["-"] * 4 for row in table] == [not known for known in evaluated]
    summary, best = summary_of(run), run / "checkpoints" / "best.json"
    assert set(summary["final"]) == {"train_loss", *MEASURED}
    assert (summary["final"]["test_accuracy"] is not None) == evaluated[-1]
    if every:
        measured = [line for line in lines if line["val_accuracy"] is not None]
        assert summary["best"]["value"] == max(line["val_accuracy"] for line in measured)
        assert json.loads(best.read_text())["metric"] == "val_accuracy"
    else:
        assert summary["best"] is None
        assert not best.exists()


def test_without_evaluation_nor_hold_out_the_training_loss_chooses_the_best(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = hvdtrain(*TRAIN, "--data", small_set, "--run", run, "--eval-every", 0)
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["best"]["metric"] == "train_loss"
    # The interval does not affect training: it may change when the run resumes, or is over.
    done = hvdtrain(*TRAIN, "--data", small_set, "--run", run, "--resume", "--eval-every", 1)
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["final"]["test_accuracy"] > 0.2
    assert [line["test_loss"] is None for line in events_of(run, "epoch")] == [True, True, False]
    assert events_of(run, "epoch")[1]["train_loss"] == summary_of(run)["final"]["train_loss"]
    longer = ("--epochs", 3, "--resume", "--eval-every", 1)
    done = hvdtrain(*TRAIN, "--data", small_set, "--run", run, *longer)
    assert done.returncode == 0, done.stderr
    assert [line["test_loss"] is None for line in events_of(run, "epoch")] == [True, True, False]
    assert summary_of(run)["final"]["test_accuracy"] > 0.2


def test_the_run_folder_holds_configuration_curves_and_checkpoints(finished: Path) -> None:
    assert yaml.safe_load((finished / "config.yaml").read_text())["holdout"] == 0.2
    assert list((finished / "tensorboard").glob("events*"))
    newest, _, skipped = store.load_newest(finished / "checkpoints")
    assert newest is not None
    assert skipped == []
    assert newest.progress["position"] == 962
    best = json.loads((finished / "checkpoints" / "best.json").read_text())
    assert best["metric"] == "val_accuracy"
    assert best["value"] == max(line["val_accuracy"] for line in events_of(finished, "epoch"))
    assert (finished / "checkpoints" / best["checkpoint"]).is_dir()


@pytest.mark.proves("The ledger names every sample that was trained on.")
def test_the_ledger_names_every_training_sample_once_an_epoch(finished: Path) -> None:
    lines = finished.with_suffix(".csv").read_text().splitlines()
    assert lines[0] == "epoch,step,rank,sample"
    rows = [line.split(",") for line in lines[1:]]
    for epoch in ("1", "2"):
        samples = [row[3] for row in rows if row[0] == epoch]
        assert len(samples) == len(set(samples)) == 481


@pytest.mark.proves("A run on the same ranks repeats to the bit.")
def test_the_same_run_again_ends_in_the_same_bits(
    finished: Path, hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    config = finished / "config.yaml"
    done = hvdtrain(
        *("train", "--config", config, "--run", tmp_path / "again", "--ledger", tmp_path / "l.csv")
    )
    assert done.returncode == 0, done.stderr
    assert (
        summary_of(tmp_path / "again")["weights_sha256"]
        == (summary_of(finished)["weights_sha256"])
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_cut_in_two_ends_in_the_bits_of_the_whole(
    hvdtrain: Program, small_set: Path, tmp_path: Path, optimizer: str
) -> None:
    common = (
        *TRAIN,
        *("--data", small_set, "--augment", "crop-flip", "--optimizer", optimizer),
        *("--lr", "0.01", "--log-every", 1),
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert hvdtrain(*common, "--run", whole).returncode == 0
    ledger = ("--ledger", tmp_path / "ledger.csv")
    # Stopped in the middle of an epoch, and again at its end.
    assert hvdtrain(*common, "--run", parts, *ledger, "--max-steps", 5).returncode == 0
    again = (*common, "--run", parts, *ledger, "--resume")
    assert hvdtrain(*again, "--epochs", 1).returncode == 0
    done = hvdtrain(*again)
    assert done.returncode == 0, done.stderr
    assert "resumed after step 13" in done.stdout
    first, second = summary_of(whole), summary_of(parts)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["final"]["test_loss"] == second["final"]["test_loss"]
    assert [line["step"] for line in events_of(parts, "step")] == list(range(1, 27))
    samples = [line.split(",")[3] for line in (tmp_path / "ledger.csv").read_text().split()[1:]]
    assert sorted(samples) == sorted(2 * [str(i) for i in set(samples)])
    assert len(samples) == 2 * 601


def test_records_after_the_last_checkpoint_are_cut_back_on_resume(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    common = (*TRAIN, "--data", small_set, "--run", run, "--ledger", ledger)
    assert hvdtrain(*common, "--epochs", 1).returncode == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 999, "loss": 1}\n{"half a li')
    with ledger.open("a") as file:
        file.write("1,14,0,12345\n1,14,")
    assert hvdtrain(*common, "--resume").returncode == 0
    assert '"step": 999' not in (run / "metrics.jsonl").read_text()
    assert "12345" not in ledger.read_text()
    assert len(ledger.read_text().splitlines()) == 1 + 2 * 601


@pytest.mark.proves("A run trains in bf16 with fp32 weights, in fp64, and with `--compile`.")
@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_other_precisions_train(
    hvdtrain: Program, small_set: Path, tmp_path: Path, precision: str
) -> None:
    run = tmp_path / "run"
    done = hvdtrain(*TRAIN, "--data", small_set, "--run", run, "--precision", precision)
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["final"]["test_accuracy"] > 0.3
    newest, _, _ = store.load_newest(run / "checkpoints")
    assert newest is not None
    wanted = np.dtype("float64" if precision == "fp64" else "float32")
    assert {tensor.dtype for tensor in newest.tensors.values()} == {wanted}


@pytest.mark.proves(
    "A model of the user's own, in PyTorch or in Keras, trains, and one that cannot work "
    "is refused."
)
def test_a_users_own_model_trains_from_the_example(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = hvdtrain(
        *("train", "--model", "examples.small_vgg:build", "--data", small_set, "--run", run),
        *("--epochs", 2, "--batch-size", 50),
    )
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["model"] == "examples.small_vgg:build"


def test_tensorflow_is_never_loaded_beside_torch(small_set: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from hvdtrain import cli; "
        f"cli.run(['train', '--model', 'cnn', '--data', {str(small_set)!r}, '--max-steps', '2', "
        f"'--run', {str(tmp_path / 'run')!r}]); assert 'torch' in sys.modules; "
        "assert 'tensorflow' not in sys.modules and 'horovod' not in sys.modules; "
        "assert 'mpi4py.MPI' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=program_environment())


@pytest.mark.proves(
    "An error that the user can fix is one line, such as for a run folder of another "
    "configuration."
)
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--run", "{run}"), 2, "holds this run already: add --resume"),
        (("--run", "{run}", "--lr", "0.5"), 2, "lr was 0.001, is 0.5"),
        (("--run", "{new}", "--resume"), 2, "holds no run to resume"),
        (("--image-size", "33"), 2, "--image-size 33, but the images"),
        (("--model", "vit_tiny", "--patch-size", "5"), 2, "do not divide into patches"),
        (("--model", "resnet"), 2, "did you mean resnet50 or resnet18"),
        (("--model", "tests.single.training.models:ten"), 2, "one logit for each class"),
        (("--data", "{new}"), 3, "no such folder"),
        (("--plan", "mq"), 2, "unknown plan mq"),
        (("--ledger", "{ledger}"), 2, "exists already"),
        (("--lr", "1e30"), 1, "the loss became"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line(
    hvdtrain: Program,
    finished: Path,
    small_set: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    names = {"run": finished, "new": tmp_path / "new", "ledger": finished.with_suffix(".csv")}
    words = [text.format(**names) for text in arguments]
    base = {"--model": "cnn", "--data": str(small_set), "--run": str(tmp_path / "run")}
    if "--run" in words and "{run}" in arguments:
        config = yaml.safe_load((finished / "config.yaml").read_text())
        base |= {"--config": str(finished / "config.yaml"), "--ledger": config["ledger"]}
    base |= dict(zip(words[::2], words[1::2], strict=False)) if "--resume" not in words else {}
    options = [part for pair in base.items() for part in pair]
    if "--resume" in words:
        options += words
    done = hvdtrain("train", *options)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.proves(
    "A damaged shard ends the run before one of its samples is used, with shard and chunk."
)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("flip", "chunk 0 (rows 0..600) fails its checksum"),
        ("truncate", "shard is truncated"),
        ("remove", "shard is missing"),
    ],
)
def test_a_damaged_shard_is_refused_with_its_name_and_leaves_no_run(
    hvdtrain: Program, small_set: Path, tmp_path: Path, damage: str, message: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(small_set, data)
    shard = data / "train-00000.h5"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content if damage == "flip" else content[:-7])
    if damage == "remove":
        shard.unlink()
    done = hvdtrain("train", "--model", "cnn", "--data", data, "--run", tmp_path / "run")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert str(shard) in done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_ctrl_c_in_one_process_saves_and_goes_on_where_it_stopped(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    common = ["train", "--model", "cnn", "--data", str(small_set), "--run", str(run)]
    long = [*common, "--batch-size", "10", "--log-every", "1", "--epochs", "1000"]
    process = begin(long, lambda: (run / "metrics.jsonl").exists() and events_of(run, "step"))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1
    assert "state saved" in errors
    newest, _, _ = store.load_newest(run / "checkpoints")
    assert newest is not None
    stopped = newest.progress["step"]
    done = hvdtrain(*long, "--resume", "--max-steps", stopped + 3)
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["steps"] == stopped + 3
    assert [line["step"] for line in events_of(run, "step")] == list(range(1, stopped + 4))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    common = ["train", "--model", "cnn", "--data", small_set, "--run", run, "--max-steps"]
    assert hvdtrain(*common, 3).returncode == 0
    metrics = (run / "metrics.jsonl").read_bytes()
    for state in run.glob("checkpoints/*/part-*.safetensors"):
        state.write_bytes(state.read_bytes()[:-1])
    done = hvdtrain(*common, 4, "--resume")
    assert done.returncode == 3
    assert "no checkpoint that verifies" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_a_resumed_run_never_cuts_a_ledger_that_is_not_its_own(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run, other = tmp_path / "run", tmp_path / "other.csv"
    common = ["train", "--model", "cnn", "--data", small_set, "--run", run, "--max-steps"]
    assert hvdtrain(*common, 3, "--ledger", tmp_path / "own.csv").returncode == 0
    other.write_text("a table of somebody else\n" * 100)
    done = hvdtrain(*common, 5, "--resume", "--ledger", other)
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert other.read_text().count("somebody") == 100


def test_the_saved_configuration_starts_a_new_run_even_after_a_resume(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    common = ["train", "--model", "cnn", "--data", small_set, "--run", run, "--max-steps"]
    assert hvdtrain(*common, 2).returncode == 0
    assert hvdtrain(*common, 3, "--resume").returncode == 0
    done = hvdtrain("train", "--config", run / "config.yaml", "--run", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert summary_of(tmp_path / "new")["steps"] == 3


def test_signals_are_the_users_own_again_after_a_run_from_python(
    small_set: Path, tmp_path: Path
) -> None:
    code = (
        "import signal; before = list(map(signal.getsignal, (2, 15))); "
        "from hvdtrain.config import TrainConfig; from hvdtrain.training.loop import train; "
        f"train(TrainConfig(model='cnn', data={str(small_set)!r}, max_steps=2, "
        f"run={str(tmp_path / 'run')!r})); "
        "assert list(map(signal.getsignal, (2, 15))) == before"
    )
    subprocess.run([warm.python(), "-c", code], check=True, env=program_environment())
