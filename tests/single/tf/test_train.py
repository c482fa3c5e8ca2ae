"""`train --framework tensorflow`: a Keras run has the guarantees of a PyTorch run."""

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.checkpoint import store
from hvdtrain.training.loop import MEASURED
from tests.conftest import Program
from tests.single.training.jobs import (
    assert_each_sample_once,
    events_of,
    is_stopped,
    ranks_of,
    samples_of,
    start,
    summary_of,
    wait_for,
)

EPOCHS, EPOCH = 2, 601
MODELS = '''
import os
import keras

def normed(classes, image_size):
    """Running statistics, and a layer that draws at random."""
    layers = keras.layers
    return keras.Sequential([
        layers.Input((image_size, image_size, 3)),
        layers.Conv2D(4, 3, strides=2, name="conv"),
        layers.BatchNormalization(name="norm"),
        layers.Conv2D(4, 3, name="frozen", trainable=False),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(classes, name="head"),
    ])

def subclass(classes, image_size):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.flat = keras.layers.Flatten()
            self.head = keras.layers.Dense(classes, name="head")

        def call(self, images):
            return self.head(self.flat(images))

    return Own()

def regularised(classes, image_size):
    layers = keras.layers
    inputs = layers.Input((image_size, image_size, 3))
    head = layers.Dense(classes, kernel_regularizer="l2")
    return keras.Sequential([inputs, layers.Flatten(), head])

class Adding(keras.layers.Layer):
    def call(self, images, training=False):
        if training:
            self.add_loss(keras.ops.mean(images))
        return images

def adding(classes, image_size):
    layers = keras.layers
    inputs = layers.Input((image_size, image_size, 3))
    return keras.Sequential([inputs, Adding(), layers.Flatten(), layers.Dense(classes)])

def larger(classes, image_size):
    layers = keras.layers
    inputs = layers.Input((2 * image_size, 2 * image_size, 3))
    return keras.Sequential([inputs, layers.Flatten(), layers.Dense(classes)])

def two(classes, image_size):
    layers = keras.layers
    inputs = layers.Input((image_size, image_size, 3))
    flat = layers.Flatten()(inputs)
    return keras.Model(inputs, [layers.Dense(classes)(flat), layers.Dense(classes)(flat)])

class Drifting(keras.layers.Layer):
    """On rank 1 each training step changes its weight."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", initializer="ones")

    def call(self, inputs, training=False):
        if training and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            self.scale.assign_add(1e-3)
        return inputs * self.scale

def drifts(classes, image_size):
    layers = keras.layers
    inputs = layers.Input((image_size, image_size, 3))
    return keras.Sequential([inputs, layers.Flatten(), Drifting(), layers.Dense(classes)])

def softmax(classes, image_size):
    layers = keras.layers
    inputs = layers.Input((image_size, image_size, 3))
    return keras.Sequential([inputs, layers.Flatten(), layers.Dense(classes, "softmax")])
'''


def command(data: Path, run: Path, *options: object, ranks: int = 2) -> list[object]:
    common = ["train", "--framework", "tensorflow", "--data", data, "--run", run]
    common += ["--model", "cnn", "--batch-size", 60, "--epochs", EPOCHS, "--ranks", ranks]
    return [*common, "--ledger", run.with_suffix(".csv"), *options]


def trained(program: Program, *options: Any, **more: Any) -> dict[str, Any]:
    """Train to the end, and return the summary."""
    words = command(*options, **more)
    done = program(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return summary_of(options[1])


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, hvdtrain: Program, small_set: Path
) -> dict[str, Any]:
    """Return the summary of an undisturbed run of two ranks."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    summary = trained(hvdtrain, small_set, run, "--checkpoint-every", "3 steps")
    assert events_of(run, "epoch")[-1]["test_accuracy"] == summary["final"]["test_accuracy"]
    return summary


@pytest.mark.proves(
    "`--framework tensorflow` trains in Keras what one device does, on ranks and on "
    "MirroredStrategy."
)
def test_ranks_and_mirrors_train_what_one_device_does(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Results agree in fp64; the last batch of an epoch is one sample, on one of three ranks."""
    losses, samples = [], []
    for name, ranks, plan in (("one", 1, "single"), ("three", 3, "dp"), ("two", 1, "mirrored:2")):
        run = tmp_path / name
        options: tuple[str, ...] = ("--precision", "fp64", "--plan", plan, "--holdout", "0.1")
        options += ("--loss", "cross-entropy:0.1", "--weight-decay", "0.1")
        summary = trained(hvdtrain, small_set, run, *options, ranks=ranks)
        assert summary["framework"] == "tensorflow"
        assert summary["devices_a_rank"] == (2 if name == "two" else 1)
        assert (summary["communication"]["exposed_fraction"] > 0) == (ranks > 1)
        kinds = ("train_loss", "val_loss", "test_loss")
        losses.append([line[kind] for line in events_of(run, "epoch") for kind in kinds])
        samples.append([set(ids) for ids in samples_of(run.with_suffix(".csv"), EPOCHS)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert losses[2] == pytest.approx(losses[0], rel=1e-10)
    assert samples[0] == samples[1] == samples[2]


@pytest.mark.weekly
def test_replicas_that_part_end_the_run_at_step_100(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(MODELS)
    options = ("--model", "own:drifts", "--batch-size", 4)
    done = hvdtrain(*command(small_set, tmp_path / "run", *options), cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"hold different values of (\w+/)?drifting/scale, although", done.stderr)
    faults = {fault["cause"]: fault["step"] for fault in events_of(tmp_path / "run", "fault")}
    assert faults["replicas differ"] == 100


@pytest.mark.weekly
def test_a_run_that_evaluates_nothing_trains_the_same(
    hvdtrain: Program, small_set: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    summary = trained(hvdtrain, small_set, run, "--eval-every", 0)
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert summary["final"] == dict.fromkeys(MEASURED) | {
        "train_loss": undisturbed["final"]["train_loss"]
    }
    assert [line["test_loss"] for line in events_of(run, "epoch")] == [None] * EPOCHS


@pytest.mark.proves(
    "A run in Keras stops, restarts, resumes and skips bad steps as one in PyTorch does."
)
def test_a_run_that_is_asked_to_stop_goes_on_to_the_same_bits(
    small_set: Path, tmp_path: Path, hvdtrain: Program, undisturbed: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    options = ("--checkpoint-every", "3 steps", "--inject", "stop step=4 rank=1")
    words = [str(word) for word in command(small_set, run, *options)]
    process = start(words)
    wait_for(process, lambda: any(map(is_stopped, ranks_of(process))))
    (suspended,) = filter(is_stopped, ranks_of(process))
    suspended.send_signal(signal.SIGUSR1)
    suspended.resume()
    errors = process.communicate()[1]
    assert process.returncode == 75, errors
    assert "state saved" in errors
    summary = trained(hvdtrain, small_set, run, "--checkpoint-every", "3 steps", "--resume")
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert_each_sample_once(run.with_suffix(".csv"), EPOCHS)
    done = hvdtrain("export", run, tmp_path / "model.onnx")
    assert done.returncode == 2
    assert "a TensorFlow run is exported as .keras" in done.stderr


def test_a_rank_that_is_killed_ends_the_job_and_another_start_finishes_it(
    hvdtrain: Program, small_set: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    options = ("--checkpoint-every", "3 steps", "--inject", "kill step=8 rank=1", "--restarts", 1)
    done = hvdtrain(*command(small_set, run, *options))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: ")]
    assert "was ended by signal 9 (Killed) in step " in lines[0]
    assert lines[1].startswith("hvdtrain: restarting on 2 rank(s) from the last checkpoint")
    assert summary_of(run)["weights_sha256"] == undisturbed["weights_sha256"]
    assert_each_sample_once(run.with_suffix(".csv"), EPOCHS)


@pytest.mark.parametrize(
    ("parts", "extra"),
    [
        ((("dp", 2, 4), ("dp", 3, 9)), ("--clip-norm", "0.05", "--optimizer", "adamw")),
        ((("mirrored:2", 1, 4), ("single", 1, 6), ("mirrored:2", 1, 9)), ()),
    ],
    ids=["ranks", "mirrors"],
)
@pytest.mark.weekly
def test_a_run_goes_on_elsewhere(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    parts: tuple[tuple[str, int, int], ...],
    extra: tuple[str, ...],
) -> None:
    """Losses of all steps are those of a run on one device, in fp64."""
    losses = []
    for name, stops in (("one", (("single", 1, 9),)), ("other", parts)):
        run = tmp_path / name
        for number, (plan, ranks, steps) in enumerate(stops):
            options = ("--precision", "fp64", "--log-every", 1, "--plan", plan, *extra)
            options += ("--max-steps", steps, *(("--resume",) if number else ()))
            done = hvdtrain(*command(small_set, run, *options, ranks=ranks))
            assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in events_of(run, "step")])
    assert len(losses[0]) == 9
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert len(set(losses[0])) == 9


@pytest.mark.weekly
def test_a_rank_that_hangs_ends_the_job(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    options = ("--inject", "stop step=4 rank=1", "--stall-timeout", 10)
    done = hvdtrain(*command(small_set, tmp_path / "run", *options))
    assert done.returncode == 4, done.stderr
    words = ("has been stuck for longer", "has sent no heartbeat")
    assert any(each in done.stderr for each in words), done.stderr


def test_a_gradient_above_the_limit_is_a_bad_step(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    done = hvdtrain(*command(small_set, tmp_path / "run", "--on-bad-step", "stop:1e-6", ranks=1))
    assert done.returncode == 1, done.stderr
    assert ", above 1e-06, at step 1 (epoch 1): " in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.weekly
def test_a_layer_that_emits_no_numbers_is_named(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    options = ("--inject", "nan step=4 rank=1 component=conv2")
    done = hvdtrain(*command(small_set, tmp_path / "stops", *options))
    assert done.returncode == 1
    assert done.stderr.startswith(
        "hvdtrain: the loss became nan at step 4 (epoch 1): conv2 is the first component whose "
        "output is not finite (its input and weights are finite)"
    )
    assert len(done.stderr.splitlines()) == 1
    skipped = ("--on-bad-step", "skip")
    both = ("--inject", f"{options[1]}; nan step=2 component=dense")
    summary = trained(hvdtrain, small_set, tmp_path / "skips", *both, *skipped)
    assert summary["skipped_steps"] == 2
    done = hvdtrain(*command(small_set, tmp_path / "all", "--inject", "nan step=4 component=x"))
    assert (done.returncode, done.stderr) == (
        2,
        "hvdtrain: --inject nan: the model has no component 'x': use conv1, conv2, dense, head\n",
    )


@pytest.mark.weekly
def test_a_step_that_is_skipped_changes_nothing(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Three steps and a skipped one equal three steps to the bit, including running statistics."""
    (tmp_path / "own.py").write_text(MODELS)
    digests = []
    for steps, more in ((3, ()), (4, ("--inject", "nan step=4 rank=1", "--on-bad-step", "skip"))):
        run = tmp_path / str(steps)
        options = ("--model", "own:normed", "--max-steps", steps, *more)
        done = hvdtrain(*command(small_set, run, *options), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        digests.append(summary_of(run)["weights_sha256"])
    assert digests[0] == digests[1]


@pytest.mark.weekly
def test_a_model_of_ones_own_goes_on_to_the_same_bits(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Running statistics are the same on all ranks, and draws depend on the position only."""
    (tmp_path / "own.py").write_text(MODELS)
    digests = []
    for name, stops in (("through", (6,)), ("in two parts", (2, 6))):
        run = tmp_path / name.replace(" ", "-")
        for number, steps in enumerate(stops):
            options = ("--model", "own:normed", "--max-steps", steps, "--precision", "bf16")
            again = ("--resume",) if number else ()
            done = hvdtrain(*command(small_set, run, *options, *again), cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        digests.append(summary_of(run)["weights_sha256"])
    assert digests[0] == digests[1]


def test_running_statistics_are_those_of_all_samples(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """After a step on two images one of three ranks had no image. Frozen weights stay."""
    (tmp_path / "own.py").write_text(MODELS)
    means, frozen = {}, []
    cases = (
        ("dp", 3, 7),
        ("single", 1, 2),
        ("dp", 3, 2),
        ("mirrored:1", 1, 2),
        ("mirrored:2", 1, 2),
    )
    for plan, ranks, size in cases:
        run = tmp_path / f"{plan.replace(':', '-')}-{size}"
        options = ("--model", "own:normed", "--max-steps", 1, "--batch-size", size, "--plan", plan)
        done = hvdtrain(*command(small_set, run, *options, ranks=ranks), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        held = store.load_newest(run / "checkpoints")[0]
        assert held is not None
        (mean,) = (value for name, value in held.tensors.items() if name.endswith("moving_mean"))
        means[plan] = mean
        (kernel,) = (value for name, value in held.tensors.items() if "frozen/kernel" in name)
        frozen.append(kernel.tobytes())
    assert len(set(frozen)) == 1
    assert np.abs(means["single"]).max() > 0
    for mean in means.values():
        assert mean == pytest.approx(means["single"], rel=1e-4)


@pytest.mark.weekly
def test_a_model_that_is_a_class_trains_and_its_bad_layer_is_named(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(MODELS)
    words = command(small_set, tmp_path / "run", "--model", "own:subclass", "--max-steps", 2)
    done = hvdtrain(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = command(small_set, tmp_path / "bad", "--model", "own:subclass")
    done = hvdtrain(*words, "--inject", "nan step=2 component=head", cwd=tmp_path)
    assert done.returncode == 1
    assert "head is the first component whose output is not finite" in done.stderr


def test_mirrors_end_at_a_bad_step_and_say_what_they_know(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    options = ("--plan", "mirrored:2", "--inject", "nan step=3 component=conv2")
    done = hvdtrain(*command(small_set, tmp_path / "run", *options, ranks=1))
    assert done.returncode == 1
    assert "at step 3 (epoch 1): the weights are already updated, so the layer" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.weekly
def test_out_of_memory_is_a_failed_rank(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    done = hvdtrain(*command(small_set, tmp_path / "run", "--inject", "memory step=2", ranks=1))
    assert done.returncode == 4, done.stderr
    assert " is out of memory: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_damaged_shard_ends_the_run(hvdtrain: Program, small_set: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # A rank with the data set in memory reads no file, so it never sees the damage.
    data = tmp_path / "data"
    data.mkdir()
    for path in small_set.iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    shard = next(data.glob("train-*.h5"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = hvdtrain(*command(data, run))
    assert done.returncode == 3, done.stderr
    assert shard.name in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "own:softmax"), "ends in a softmax, which belongs to the loss"),
        (("--model", "own:regularised"), "has losses of its own (regularisers, add_loss)"),
        (("--model", "own:adding"), "has losses of its own (regularisers, add_loss)"),
        (("--model", "own:larger"), "does not turn images of 16x16 into one tensor: "),
        (("--model", "own:two"), "does not turn images of 16x16 into one tensor: "),
        (("--model", "cct_2"), "--framework tensorflow has no model cct_2: use cnn, resnet18, "),
        (("--device", "cuda"), "--device cuda: TensorFlow sees no GPU on this host"),
        (("--image-size", "32"), "--image-size 32, but the images of "),
    ],
)
def test_what_cannot_be_is_one_line(
    hvdtrain: Program, small_set: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "own.py").write_text(MODELS)
    words = command(small_set, tmp_path / "run", *options, ranks=1)
    done = hvdtrain(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
