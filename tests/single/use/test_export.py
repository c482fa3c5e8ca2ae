"""Export of a run's weights to a file, and runs that start from such a file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.checkpoint import store
from hvdtrain.models.weights import torchvision_name
from tests.conftest import Program


def final_of(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())["final"]
    return content


@pytest.fixture(scope="module")
def trained(hvdtrain: Program, small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three steps of a ResNet."""
    run = tmp_path_factory.mktemp("trained") / "run"
    done = hvdtrain(
        *("train", "--model", "resnet18", "--data", small_set, "--run", run),
        *("--batch-size", 20, "--max-steps", 3),
    )
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def exported(hvdtrain: Program, trained: Path) -> Path:
    path = trained.parent / "weights.pth"
    done = hvdtrain("export", trained, path)
    assert done.returncode == 0, done.stderr
    assert "step-00000003" in done.stdout
    return path


def test_the_file_holds_the_checkpoints_tensors_by_torchvisions_names(
    trained: Path, exported: Path
) -> None:
    stored = torch.load(exported, weights_only=True)
    saved, _, _ = store.load_newest(trained / "checkpoints")
    assert saved is not None
    assert stored.keys() == {torchvision_name("resnet18", name) for name in saved.tensors}
    for name, tensor in saved.tensors.items():
        assert np.array_equal(stored[torchvision_name("resnet18", name)].numpy(), tensor), name


def test_a_run_starts_from_the_file_under_any_plan(
    hvdtrain: Program, small_set: Path, tmp_path: Path, trained: Path, exported: Path
) -> None:
    """The learning rate is so small that the test loss is that of the loaded weights."""
    losses = []
    for name, plan in (("one", ()), ("two", ("--plan", "mp", "--ranks", 2))):
        done = hvdtrain(
            *("train", "--model", "resnet18", "--data", small_set, "--run", tmp_path / name),
            *("--weights", exported, "--lr", 1e-30, "--max-steps", 1, "--batch-size", 4),
            *("--optimizer", "sgd", *plan),
        )
        assert done.returncode == 0, done.stderr
        assert f"started from {exported}" in done.stdout
        assert "anew" not in done.stdout
        losses.append(final_of(tmp_path / name)["test_loss"])
    before = final_of(trained)["test_loss"]
    # One step moves the running statistics by a tenth; the weights stay as in the file.
    assert losses[0] == pytest.approx(before, rel=0.2)
    source, _, _ = store.load_newest(trained / "checkpoints")
    assert source is not None
    for run in ("one", "two"):
        fresh, _, _ = store.load_newest(tmp_path / run / "checkpoints")
        assert fresh is not None
        for name, tensor in source.tensors.items():
            if "running" not in name and "tracked" not in name:
                assert np.allclose(fresh.tensors[name], tensor, rtol=0, atol=1e-12), name


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("export", "absent", "x.pth"), 2, "absent is not the folder of a run"),
        (("export", "{run}", "absent/x.pth"), 2, "its folder does not exist: create it first"),
        (("export", "{run}", "."), 2, "the file '.' is not a file"),
        (
            ("train", "--model", "cnn", "--data", "{data}", "--weights", "{weights}"),
            3,
            "which cnn does not have: use weights of cnn",
        ),
        (
            ("train", "--model", "cnn", "--data", "{data}", "--weights", "absent.pth"),
            2,
            "--weights absent.pth: there is no such file",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    trained: Path,
    exported: Path,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    places = {"run": trained, "data": small_set, "weights": exported}
    words = [argument.format(**places) for argument in arguments]
    if words[0] == "train":
        words += ["--run", str(tmp_path / "run")]
    done = hvdtrain(*words, timeout=600)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_without_a_checkpoint_has_nothing_to_export(
    hvdtrain: Program, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("model: cnn\n")
    done = hvdtrain("export", tmp_path, tmp_path / "x.pth")
    assert done.returncode == 3
    assert "holds no checkpoint" in done.stderr
    assert not (tmp_path / "x.pth").exists()
