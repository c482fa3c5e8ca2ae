"""The CNN in Keras equals the CNN in PyTorch: each framework runs in a separate process."""

import subprocess

import numpy as np
import pytest

from tests import warm
from tests.conftest import ROOT, program_environment

CLASSES, SIZE, BATCH = 10, 32, 64

IN_TORCH = """
import sys
from collections import OrderedDict
import numpy as np, torch
from hvdtrain import models
given = np.load(sys.argv[1])
parts = models.components("cnn", %(classes)d, %(size)d)
model = torch.nn.Sequential(OrderedDict((part.name, part.build()) for part in parts))
images = torch.from_numpy(given["images"]).permute(0, 3, 1, 2)
loss = torch.nn.functional.cross_entropy(model(images), torch.from_numpy(given["labels"]))
loss.backward()
found = {name: value.detach().numpy() for name, value in model.named_parameters()}
found |= {f"grad {name}": value.grad.numpy() for name, value in model.named_parameters()}
np.savez(sys.argv[2], loss=loss.detach().numpy(), **found)
"""

IN_KERAS = """
import sys
import keras, numpy as np, tensorflow as tf
from hvdtrain.backends.tensorflow.step import cnn
from tests.single.tf.models import weights_from_torch
given, theirs = np.load(sys.argv[1]), dict(np.load(sys.argv[2]))
model = cnn(%(classes)d, %(size)d)
model.set_weights(weights_from_torch(theirs, %(size)d))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
with tf.GradientTape() as tape:
    value = loss(given["labels"], model(given["images"], training=True))
gradients = tape.gradient(value, model.trainable_weights)
wanted = {name[5:]: value for name, value in theirs.items() if name.startswith("grad ")}
np.savez(
    sys.argv[3],
    loss=value.numpy(),
    parameters=model.count_params(),
    **{f"own {n}": each.numpy() for n, each in enumerate(gradients)},
    **{f"torch {n}": each for n, each in enumerate(weights_from_torch(wanted, %(size)d))},
)
assert "torch" not in sys.modules
"""


def run_program(framework: str, program: str, *arguments: object) -> None:
    """Run a program in a process of a framework."""
    done = subprocess.run(
        [warm.python(framework), "-c", program, *map(str, arguments)],
        cwd=ROOT,
        env=program_environment() | {"HVDTRAIN_TEST_FRAMEWORK": framework},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, np.ndarray], float]:
    """Return the results of Keras with PyTorch's weights, and PyTorch's loss."""
    folder = tmp_path_factory.mktemp("cnn")
    inputs, theirs, ours = (folder / f"{name}.npz" for name in ("given", "torch", "keras"))
    draw = np.random.default_rng(0)
    images = draw.standard_normal((BATCH, SIZE, SIZE, 3)).astype(np.float32)
    np.savez(inputs, images=images, labels=draw.integers(0, CLASSES, BATCH))
    sizes = {"classes": CLASSES, "size": SIZE}
    run_program("torch", IN_TORCH % sizes, inputs, theirs)
    run_program("tensorflow", IN_KERAS % sizes, inputs, theirs, ours)
    return dict(np.load(ours)), float(np.load(theirs)["loss"])


def test_it_has_the_parameters_of_the_paper(results: tuple[dict[str, np.ndarray], float]) -> None:
    assert results[0]["parameters"] == 282_250


def test_loss_and_gradients_are_those_of_pytorch(
    results: tuple[dict[str, np.ndarray], float],
) -> None:
    keras, loss = results
    assert float(keras["loss"]) == pytest.approx(loss, rel=1e-5)
    wanted = [keras[f"torch {number}"] for number in range(8)]
    largest = max(float(np.max(np.abs(value))) for value in wanted)
    for number, value in enumerate(wanted):
        gradient = keras[f"own {number}"]
        assert gradient.shape == value.shape
        scale = max(float(np.max(np.abs(value))), 1e-6 * largest)
        assert float(np.max(np.abs(gradient - value))) / scale < 1e-4, number
