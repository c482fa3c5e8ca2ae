"""A TensorFlow run is evaluated, answers for images, and is written for Keras and for PyTorch."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvdtrain import data
from tests.conftest import Program
from tests.single.tf.test_cnn import run_program
from tests.single.training.jobs import summary_of

LOAD = """
import sys
import keras, numpy as np
import hvdtrain.backends.tensorflow.models
model = keras.models.load_model(sys.argv[1])
np.save(sys.argv[3], model.predict(np.load(sys.argv[2]).astype("float32"), verbose=0))
"""


@pytest.mark.proves("A TensorFlow run can be evaluated, used for predictions and exported.")
def test_a_run_in_use(hvdtrain: Program, small_set: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    common = ("--model", "cnn", "--data", small_set, "--batch-size", 20, "--lr", 0.02)
    done = hvdtrain("train", "--framework", "tensorflow", *common, "--epochs", 2, "--run", run)
    assert done.returncode == 0, done.stderr
    final = summary_of(run)["final"]
    done = hvdtrain("evaluate", run, "--json", "--which", "last")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["accuracy"] == pytest.approx(final["test_accuracy"], abs=1e-6)
    assert result["loss"] == pytest.approx(final["test_loss"], rel=1e-4)

    with data.open_split(data.read_index(small_set), "test") as samples:
        batch = samples.gather(np.arange(20))
    np.save(tmp_path / "images.npy", batch.images)
    for number, image in enumerate(batch.images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    images = [tmp_path / f"{number}.png" for number in range(20)]
    done = hvdtrain("predict", run, *images, "--which", "last", "--top", 1, "--format", "jsonl")
    assert done.returncode == 0, done.stderr
    predicted = [json.loads(line)["classes"][0]["class"] for line in done.stdout.splitlines()]

    done = hvdtrain("export", run, tmp_path / "model.keras", "--which", "last")
    assert done.returncode == 0, done.stderr
    run_program(
        "tensorflow", LOAD, tmp_path / "model.keras", tmp_path / "images.npy", tmp_path / "out.npy"
    )
    assert predicted == np.load(tmp_path / "out.npy").argmax(1).tolist()

    done = hvdtrain("export", run, tmp_path / "model.pth", "--which", "last")
    assert done.returncode == 0, done.stderr
    # A run in PyTorch from these weights, whose only step changes nothing.
    there = tmp_path / "there"
    still = (*common[:-1], 1e-12, "--max-steps", 1, "--weights", tmp_path / "model.pth")
    done = hvdtrain("train", *still, "--run", there)
    assert done.returncode == 0, done.stderr
    ours = summary_of(there)["final"]
    assert ours["test_accuracy"] == pytest.approx(final["test_accuracy"], abs=1e-6)
    assert ours["test_loss"] == pytest.approx(final["test_loss"], rel=1e-4)

    # A report compares the frameworks.
    done = hvdtrain("report", run, there, "--to", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report" / "report.md").read_text()
    assert "framework tensorflow, epochs 2 |" in report
    assert "framework torch, max_steps 1, " in report

    done = hvdtrain("export", run, tmp_path / "model.onnx")
    assert done.returncode == 2
    assert "a TensorFlow run is exported as .keras" in done.stderr
