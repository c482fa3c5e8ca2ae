"""The built-in models in Keras compute what they do in PyTorch: each framework in its process."""

from pathlib import Path

import numpy as np
import pytest

from tests.single.tf.test_cnn import run_program

IN_TORCH = """
import sys
from collections import OrderedDict
import numpy as np, torch
from hvdtrain import models
from hvdtrain.models.component import build_component
name, kind = sys.argv[1], getattr(torch, sys.argv[2])
given = np.load(sys.argv[3])
size = given["images"].shape[1]
parts = models.components(name, 10, size)
built = {part.name: build_component(part, 0, dtype=kind) for part in parts}
state = {f"{part}.{key}": v for part, m in built.items() for key, v in m.state_dict().items()}
np.savez(sys.argv[4], **{key: value.numpy() for key, value in state.items()})
images = torch.from_numpy(given["images"]).permute(0, 3, 1, 2).to(kind)
x = images
for module in built.values():
    x = module(x)
torch.nn.functional.cross_entropy(x, torch.from_numpy(given["labels"])).backward()
gradients = {
    f"{part}.{key}": value.grad.numpy()
    for part, module in built.items()
    for key, value in module.named_parameters()
}
exact = images.double()
for module in built.values():
    exact = module.double()(exact)
np.savez(sys.argv[5], outputs=x.detach().numpy(), exact=exact.detach().numpy(), **gradients)
"""
IN_KERAS = """
import sys
import keras, numpy as np, tensorflow as tf
from hvdtrain.backends.tensorflow import models, step
from hvdtrain.config import TrainConfig
name, kind, given = sys.argv[1], sys.argv[2], np.load(sys.argv[3])
precision = {"float32": "fp32", "float64": "fp64"}[kind]
config = TrainConfig(model=name, data="", framework="tensorflow", precision=precision)
model = step.build_model(config, 10, given["images"].shape[1])
models.from_torch(model, dict(np.load(sys.argv[4])))
with tf.GradientTape() as tape:
    outputs = model(given["images"].astype(kind), training=True)
    value = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(given["labels"], outputs)
gradients = tape.gradient(value, model.trainable_weights)
values = {id(w): np.asarray(g) for w, g in zip(model.trainable_weights, gradients)}
state = models.to_torch(model)
np.savez(sys.argv[5], outputs=outputs.numpy(), parameters=model.count_params(),
         **models.to_torch(model, values), **{f"state {k}": v for k, v in state.items()})
assert "torch" not in sys.modules
"""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.mark.proves(
    "ResNets and vision transformers in Keras have PyTorch's outputs and gradients with the same "
    "weights, which convert both ways."
)
@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        ("cnn", 16, 5),
        ("resnet18", 32, 5),
        pytest.param("resnet50", 32, 5, marks=pytest.mark.proof),
        ("vit_tiny", 16, 4),
        pytest.param("vit_b16", 16, 3, marks=pytest.mark.weekly),
        pytest.param("resnet18", 96, 3, marks=pytest.mark.proof),
    ],
)
@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_outputs_gradients_and_weights(
    tmp_path: Path, name: str, size: int, count: int, kind: str
) -> None:
    bound = 1e-5 if kind == "float32" else 1e-9
    if name.startswith("vit"):  # TensorFlow's GELU takes the root of 2 in fp32
        bound = max(bound, 1e-6)
    files = {key: tmp_path / f"{key}.npz" for key in ("given", "weights", "torch", "keras")}
    draw = np.random.default_rng(0)
    images = draw.standard_normal((count, size, size, 3)).astype(np.float32)
    np.savez(files["given"], images=images, labels=draw.integers(0, 10, count))
    common = (name, kind, files["given"], files["weights"])
    run_program("torch", IN_TORCH, *common, files["torch"])
    run_program("tensorflow", IN_KERAS, *common, files["keras"])
    weights, theirs, ours = (dict(np.load(files[key])) for key in ("weights", "torch", "keras"))
    exact = theirs.pop("exact")
    # Batch norms over five images amplify rounding, PyTorch's too: of resnet50 to 4e-5.
    rounding = float(np.abs(theirs["outputs"] - exact).max() / np.abs(exact).max())
    largest = max(float(np.abs(value).max()) for value in theirs.values())
    assert theirs.keys() <= ours.keys()
    for key, value in theirs.items():
        scale = max(float(np.abs(value).max()), 1e-6 * largest)
        assert ours[key].shape == value.shape, key
        error = float(np.abs(ours[key] - value).max()) / scale
        # Rounding in fp32 moves a few values across the kinks of ReLUs, behind which the gradients
        # of all layers before them differ: in fp64 none does.
        if kind == "float64" or key == "outputs" or not name.startswith("resnet"):
            assert error <= max(bound, 2 * rounding if key == "outputs" else 0.0), (key, error)
    assert ours["parameters"] == sum(
        value.size for key, value in weights.items() if not key.endswith("num_batches_tracked")
    )
    for key, value in weights.items():
        if not key.endswith(STATISTICS):
            assert np.array_equal(ours[f"state {key}"], value), key
