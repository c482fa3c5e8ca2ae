"""Models of torchvision and timm by name compute what the library's own model does."""

import sys

import pytest
import torch
from torch import nn

from hvdtrain import models
from hvdtrain.errors import UsageError
from hvdtrain.models import libraries
from hvdtrain.models.component import build_component, freeze

# A model whose children run one after another, and one whose do not.
NAMES = {
    "torchvision:resnet18": 14,
    "torchvision:vit_b_16": 1,
    "timm:resnet10t": 16,
    "timm:vit_tiny_patch16_224": 1,
}


@pytest.mark.proves("A model of torchvision or timm is trained by its name.")
@pytest.mark.parametrize(("name", "components"), NAMES.items())
def test_the_components_compute_what_the_librarys_model_does(name: str, components: int) -> None:
    parts = models.components(name, 10, 32)
    assert len(parts) == components
    built = [build_component(part, 0) for part in parts]
    library, _, own_name = name.partition(":")
    whole = libraries._module(library, own_name, 10, 32)
    state = {
        f"{part.name}.{key}" if components > 1 else key: value
        for part, module in zip(parts, built, strict=True)
        for key, value in module.state_dict().items()
    }
    whole.load_state_dict(state)
    images = torch.randn(4, 3, 32, 32)
    outputs = nn.Sequential(*built).eval()(images)
    assert outputs.shape == (4, 10)
    assert torch.equal(outputs, whole.eval()(images))


@pytest.mark.parametrize("name", ["torchvision:resnet19", "timm:"])
def test_an_unknown_model_is_one_line(name: str) -> None:
    with pytest.raises(UsageError, match=r"has no model '.*list_models"):
        models.components(name, 10, 32)


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"timm cannot be imported .*: hvdtrain setup --models"):
        models.components("timm:resnet10t", 10, 32)


def test_frozen_parameters_are_named_by_patterns() -> None:
    parts = freeze(models.components("cnn", 10, 32), "conv*,dense.*bias")
    frozen = [
        f"{part.name}.{name}"
        for part in parts
        for name, parameter in build_component(part, 0).named_parameters()
        if not parameter.requires_grad
    ]
    assert frozen
    assert all(name.startswith("conv") or name == "dense.linear.bias" for name in frozen), frozen
    with pytest.raises(UsageError, match=r"--freeze convv\* names no parameter: they are conv"):
        freeze(models.components("cnn", 10, 32), "convv*")
