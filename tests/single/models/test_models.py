"""Properties of every model, including the example of a user's model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.models import MODEL_NAMES, components

# A softmax is the same for any bias before it, so the gradient of this one is zero.
ONLY_ROUNDING = "head.weigh.bias"
LARGE = pytest.mark.weekly  # seconds each
EXAMPLE = "examples.small_vgg:build"
SIZES = [
    ("cnn", 28, 33, None),
    ("cnn", 64, 3, None),
    ("cnn", 5, 2, None),
    ("resnet18", 28, 33, None),
    ("resnet18", 64, 2, None),
    ("resnet18", 67, 3, None),
    pytest.param("resnet50", 28, 3, None, marks=LARGE),
    pytest.param("vit_b16", 8, 3, None, marks=LARGE),
    ("vit_tiny", 28, 33, None),
    ("vit_tiny", 64, 2, 16),
    ("vit_tiny", 21, 3, 7),
    ("cct_2", 28, 33, None),
    ("cct_2", 5, 2, None),
    ("cct_6", 21, 3, None),
    (EXAMPLE, 28, 33, None),
    (EXAMPLE, 3, 2, None),
]


@pytest.fixture(autouse=True)
def in_the_folder_that_holds_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


def test_every_model_is_tried_here() -> None:
    models = {getattr(size, "values", size)[0] for size in SIZES}
    assert models == {*MODEL_NAMES, EXAMPLE}


@pytest.mark.parametrize(("model", "image_size", "classes", "patch_size"), SIZES)
def test_logits_have_their_shape_and_every_parameter_a_gradient(
    assemble: Any,
    images_and_labels: Any,
    model: str,
    image_size: int,
    classes: int,
    patch_size: int | None,
) -> None:
    built = assemble(components(model, classes, image_size, patch_size))
    images, labels = images_and_labels(2, image_size, classes)
    assert built.forward(images).shape == (2, classes)
    gradients = built.gradients(images, labels)
    assert gradients.keys() == built.parameters.keys()
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        if name == ONLY_ROUNDING:
            assert gradient.abs().max() < 1e-6
        else:
            assert gradient.any(), name


@pytest.mark.parametrize(
    "model",
    [
        *("cnn", "resnet18", "vit_tiny", "cct_2", EXAMPLE),
        *(pytest.param(model, marks=LARGE) for model in ("resnet50", "vit_b16")),
    ],
)
def test_channels_last_gives_the_same_logits_and_gradients(
    assemble: Any, images_and_labels: Any, largest_difference: Any, model: str
) -> None:
    built = assemble(components(model, 5, 12), dtype=torch.float64)
    images, labels = images_and_labels(4, 12, 5, torch.float64)
    logits, gradients = built.forward(images), built.gradients(images, labels)
    expected = {name: gradient.clone() for name, gradient in gradients.items()}
    built.forward.to(memory_format=torch.channels_last)
    images = images.contiguous(memory_format=torch.channels_last)
    assert torch.allclose(built.forward(images), logits, rtol=0, atol=1e-12)
    reordered = built.gradients(images, labels)
    for both in (expected, reordered):
        both.pop(ONLY_ROUNDING, None)
    assert largest_difference(reordered, expected) <= 1e-12


def test_the_example_learns(assemble: Any, images_and_labels: Any) -> None:
    built = assemble(components(EXAMPLE, 4, 8))
    images, labels = images_and_labels(16, 8, 4)
    optimizer = torch.optim.SGD(built.forward.parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(built.forward(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
