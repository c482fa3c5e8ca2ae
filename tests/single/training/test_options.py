"""Options of a good recipe, in complete runs of one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from hvdtrain.backends.pytorch.parts import build_model, check_compiler
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.data.shards import Batch
from hvdtrain.engine.feed import Augmentation, augmentation
from hvdtrain.errors import UsageError
from hvdtrain.models import components
from tests.conftest import Program


def run_of(hvdtrain: Program, data: Path, run: Path, *options: Any, **settings: Any) -> Any:
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", data, "--run", run, "--batch-size", 50),
        *("--max-steps", 3, "--log-every", 1, *options),
        **settings,
    )
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    return losses, json.loads((run / "summary.json").read_text())["final"]


def test_label_smoothing_is_torchs_in_training_and_absent_in_the_test(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    still = ("--lr", 1e-30, "--optimizer", "sgd")
    plain, end = run_of(hvdtrain, small_set, tmp_path / "plain", *still)
    smooth, smooth_end = run_of(
        *(hvdtrain, small_set, tmp_path / "smooth", *still, "--loss", "cross-entropy:0.3")
    )
    # At the start the logits are near 0, and the smoothed loss is close to the plain one.
    assert all(a != b for a, b in zip(plain, smooth, strict=True))
    assert smooth == pytest.approx(plain, rel=0.05)
    assert end["test_loss"] == pytest.approx(smooth_end["test_loss"], rel=1e-6)


def test_a_component_that_changes_a_buffer_is_not_recomputed(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    model = ("--model", "tests.single.training.models:follows", "--data", small_set)
    common = ("train", *model, "--ranks", 2, "--max-steps", 2, "--run", tmp_path / "run")
    done = hvdtrain(*common, "--recompute", "all")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert (
        "each run changes its buffer follower.mean: remove follower from --recompute"
        in done.stderr
    )
    done = hvdtrain(*common, "--recompute", "hidden")
    assert done.returncode == 0, done.stderr


@pytest.mark.weekly
def test_a_compiled_model_learns_the_same(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    model = ("--model", "tests.single.training.models:small")  # compiled in less than a minute
    plain, _ = run_of(hvdtrain, small_set, tmp_path / "plain", *model)
    compiled, end = run_of(hvdtrain, small_set, tmp_path / "compiled", *model, "--compile")
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert end["test_loss"] > 0


@pytest.mark.weekly
def test_each_component_is_compiled() -> None:
    parts = components("cnn", 10, 16)
    config = TrainConfig(model="cnn", data="", compile=True)
    check_compiler(torch.device("cpu"))
    model = build_model(parts, config, torch.device("cpu"))
    counters.clear()
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 10)
    assert counters["stats"]["unique_graphs"] == len(parts) == 4


def test_an_epoch_is_augmented_as_its_options_say(small_set: Path) -> None:
    index = read_index(small_set)
    images = np.full((30, *index.image_shape), 255, np.uint8)
    ids = np.arange(30, dtype=np.int64)
    batch = Batch(images, ids, ids)
    assert augmentation(TrainConfig(model="cnn", data=""), 0) == Augmentation()
    moved = augmentation(TrainConfig(model="cnn", data="", augment="crop-flip"), 0).batch
    assert moved is not None
    assert set(np.unique(moved(batch).images)) == {0, 255}
    assert (images == 255).all(), "what it gets is as it was"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": "cross-entropy:1"},
            "--loss cross-entropy:1 is not valid: write cross-entropy:X",
        ),
        ({"loss": "cross-entropy:"}, "a label smoothing X of 0 or more and below 1"),
        ({"compile": True, "recompute": "all"}, "--compile is not supported with --recompute all"),
        (
            {"compile": True, "batch_norm": "sync"},
            "--compile is not supported with --batch-norm sync",
        ),
        ({"precision": "fp16", "sync": "local:4"}, "fp16 is not supported with --sync local:4"),
        ({"precision": "fp16", "compress": "bf16"}, "--compress bf16, which does not send"),
        (
            {"precision": "fp16", "framework": "tensorflow"},
            "with --framework tensorflow, which has fp32",
        ),
    ],
)
def test_values_out_of_range_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(model="cnn", data="", **settings).check()


@pytest.mark.parametrize("plan", [(), ("--ranks", 2, "--plan", "mp", "--microbatches", 2)])
def test_images_on_the_device_train_the_same_to_the_bit(
    hvdtrain: Program, small_set: Path, tmp_path: Path, plan: tuple[Any, ...]
) -> None:
    digests = {}
    images = ("--augment", "crop-flip")
    for name, options in {
        "always": (*images, "--resident", "always"),
        "never": (*images, "--resident", "never"),
        "plain": ("--resident", "always"),
    }.items():
        run = tmp_path / name
        run_of(hvdtrain, small_set, run, *options, *plan)
        digests[name] = json.loads((run / "summary.json").read_text())["weights_sha256"]
    assert digests["always"] == digests["never"] != digests["plain"]


def test_images_that_the_host_has_to_make_cannot_be_on_the_device(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    model = ("--model", "cnn", "--data", small_set, "--augment", "resized-crop-flip")
    done = hvdtrain("train", *model, "--run", tmp_path / "run", "--resident", "always")
    assert done.returncode == 2
    assert done.stderr == (
        "hvdtrain: --resident always: images that are scaled are made on the host: leave it out\n"
    )


def test_an_operation_without_a_deterministic_algorithm_is_named(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    model = ("--model", "tests.single.training.models:puts", "--data", small_set)
    done = hvdtrain("train", *model, "--run", tmp_path / "run", "--deterministic")
    assert done.returncode == 2
    assert "stage 0 uses put_, which has no algorithm that computes the same bits" in done.stderr
    assert "leave --deterministic out" in done.stderr.splitlines()[-1]


def test_zb_h1_refuses_compiled_components(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--run", tmp_path / "run"),
        *("--plan", "mp", "--ranks", 2, "--schedule", "zb-h1", "--compile"),
    )
    assert done.returncode == 2
    assert "zb-h1 splits the backward, which --compile does not allow: use 1f1b" in done.stderr


def test_cifar100_trains_from_its_official_files(hvdtrain: Program, tmp_path: Path) -> None:
    """Files of 300 and 100 records in CIFAR-100's format are packed, and used by a run."""
    folder, random = tmp_path / "cifar-100-binary", np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("train.bin", 300), ("test.bin", 100)):
        records = random.integers(0, 256, (count, 3074), dtype=np.uint8)
        records[:, 0], records[:, 1] = np.arange(count) % 20, np.arange(count) % 100
        records.tofile(folder / name)
    done = hvdtrain("data", "pack", folder, tmp_path / "packed")
    assert done.returncode == 0, done.stderr
    assert "100 classes" in done.stdout
    _, final = run_of(hvdtrain, tmp_path / "packed", tmp_path / "run")
    assert 3 < final["test_loss"] < 7, "log(100) is 4.6"
