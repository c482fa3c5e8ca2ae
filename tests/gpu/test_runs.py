"""Complete runs on a GPU, which several ranks share through MPI."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Program
from tests.single.training.jobs import assert_adaptive, summary_of


def train(hvdtrain: Program, device: str, data: Path, run: Path, *options: Any) -> Any:
    base = ("train", "--model", "resnet18", "--data", data, "--run", run, "--device", device)
    return hvdtrain(*base, "--batch-size", 64, "--epochs", 1, *options)


SMALL = ("--batch-size", 16, "--epochs", 3, "--schedule", "1f1b", "--batch-norm", "sync")
SHARED = ("--reduce-with", "mpi", "--verify")


@pytest.mark.parametrize(
    "options",
    [
        ("--ranks", 2, "--plan", "dp"),
        ("--ranks", 2, "--plan", "mp"),
        ("--ranks", 4, "--plan", "hp:2x2"),
        ("--ranks", 2, "--plan", "mp", "--schedule", "interleaved"),
        ("--ranks", 2, "--plan", "mp", "--schedule", "zb-h1"),
        ("--ranks", 2, "--plan", "dp", "--batch-norm", "sync"),
        ("--ranks", 2, "--plan", "dp", "--precision", "bf16"),
        ("--ranks", 2, "--plan", "dp", "--precision", "fp16"),
        ("--ranks", 2, "--plan", "mp", "--precision", "fp16"),
    ],
    ids=lambda options: "-".join(str(word).removeprefix("--") for word in options[2:]),
)
def test_ranks_that_share_the_gpu_train_as_one(
    hvdtrain: Program, device: str, small_set: Path, tmp_path: Path, options: tuple[Any, ...]
) -> None:
    done = train(hvdtrain, device, small_set, tmp_path / "run", *options, *SHARED)
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout


def test_an_adaptive_run_follows_its_components_and_changes_its_plan(
    hvdtrain: Program, device: str, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--ranks", 2, "--plan", "adaptive", "--inject", "replan step=80")
    done = train(hvdtrain, device, small_set, run, *options, *SMALL, *SHARED)
    assert done.returncode == 0, done.stderr
    assert_adaptive(run)


def test_a_run_that_was_killed_ends_with_the_same_weights(
    hvdtrain: Program, device: str, small_set: Path, tmp_path: Path
) -> None:
    whole, killed, same = tmp_path / "whole", tmp_path / "killed", ("--deterministic",)
    assert train(hvdtrain, device, small_set, whole, *same).returncode == 0
    fault = ("--inject", "kill step=6 rank=0", "--checkpoint-every", "4 steps")
    assert train(hvdtrain, device, small_set, killed, *same, *fault).returncode != 0
    done = train(hvdtrain, device, small_set, killed, *same, "--resume")
    assert done.returncode == 0, done.stderr
    assert summary_of(killed)["weights_sha256"] == summary_of(whole)["weights_sha256"]


def test_images_on_the_device_train_the_same(
    hvdtrain: Program, device: str, small_set: Path, tmp_path: Path
) -> None:
    digests = set()
    images = ("--augment", "crop-flip", "--deterministic")
    for resident in ("always", "never"):
        run = tmp_path / resident
        done = train(hvdtrain, device, small_set, run, *images, "--resident", resident)
        assert done.returncode == 0, done.stderr
        digests.add(summary_of(run)["weights_sha256"])
    assert len(digests) == 1


def test_energy_memory_and_the_name_of_the_gpu_are_in_the_summary(
    hvdtrain: Program, device: str, small_set: Path, tmp_path: Path
) -> None:
    done = train(hvdtrain, device, small_set, tmp_path / "run", "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    (host,) = summary["energy"]
    if device == "cuda":
        assert summary["machine"]["accelerator"] == torch.cuda.get_device_name()
        assert sum(host["joules"]["NVML"].values()) > 0
        assert max(summary["peak_memory_bytes"]) > 11e6 * 4
    parts = [summary["communication"]["exposed_fraction"], summary["bubble_fraction"]]
    assert 0.5 < sum(parts) + summary["compute_fraction"] < 1.05


def test_a_batch_that_does_not_fit_ends_in_one_line(
    hvdtrain: Program, device: str, tmp_path: Path
) -> None:
    if device != "cuda":
        pytest.skip("not run: the CPU's memory is the machine's")
    data = tmp_path / "data"
    assert hvdtrain("data", "synth", data, "--images", 200_000, "--classes", 4).returncode == 0
    size = ("--batch-size", 200_000, "--model", "resnet50")
    done = train(hvdtrain, device, data, tmp_path / "run", *size)
    assert done.returncode not in (0, -6, -11)
    assert "memory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif("HVDTRAIN_TEST_COMPILE" not in os.environ, reason="not run: takes minutes")
def test_compiled_components_train(
    hvdtrain: Program, device: str, small_set: Path, tmp_path: Path
) -> None:
    done = train(hvdtrain, device, small_set, tmp_path / "run", "--compile")
    assert done.returncode == 0, done.stderr
