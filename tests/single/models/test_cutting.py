"""Modules cut into components compute what they compute whole."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvdtrain.errors import UsageError
from hvdtrain.models.component import build_component, build_for_shapes
from hvdtrain.models.ready import cut
from tests.single.models.conftest import images_and_labels, largest_difference

SIZE, CLASSES = 8, 5


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(images + self.norm(self.conv(images)))


class Residual(nn.Module):
    """A network in the style of torchvision's: operations between children, a child used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.layer1 = nn.Sequential(Block(6), nn.Sequential(Block(6), nn.Identity()))
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(24, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.relu(self.conv1(images * 2 - 1))
        x = self.layer1(self.relu(self.conv2(x)))
        x = self.avgpool(x)
        x = torch.relu(x.view(x.size(0), -1))
        return self.fc(x)  # type: ignore[no-any-return]


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, CLASSES)
    )


def gradients(forward: Callable[[Tensor], Tensor], parameters: Any) -> tuple[Tensor, Any]:
    images, labels = images_and_labels(6, SIZE, CLASSES, torch.float64)
    logits = forward(images)
    loss = functional.cross_entropy(logits, labels)
    names, values = zip(*parameters, strict=True)
    return logits, dict(zip(names, torch.autograd.grad(loss, values), strict=True))


def parts_of(module: nn.Module) -> tuple[nn.Sequential, list[tuple[str, nn.Parameter]]]:
    components = cut(module)
    modules = [build_component(part, 0, dtype=torch.float64) for part in components]
    named = [
        (f"{part.name}.{name}", value)
        for part, one in zip(components, modules, strict=True)
        for name, value in one.named_parameters()
    ]
    return nn.Sequential(*modules), named


@pytest.mark.proves(
    "A PyTorch module trains as it is, and cut into components it has the outputs and "
    "gradients of the whole."
)
@pytest.mark.parametrize("make", [sequential, Residual])
def test_outputs_and_gradients_of_a_cut_module_are_those_of_the_whole(make: Any) -> None:
    whole = make().double()
    parts, named = parts_of(whole)
    assert [name for name, _ in named] == [name for name, _ in whole.named_parameters()]
    logits, expected = gradients(whole, whole.named_parameters())
    cut_logits, actual = gradients(parts, named)
    assert torch.equal(logits, cut_logits)
    assert largest_difference(actual, expected) <= 1e-12
    with torch.no_grad():  # the negative control: one weight is another
        named[0][1].view(-1)[0] += 1e-6
    assert largest_difference(gradients(parts, named)[1], expected) > 1e-12


def test_a_cut_module_keeps_its_weights_and_its_buffers_and_is_not_changed() -> None:
    torch.manual_seed(1)
    module = Residual()
    before = copy.deepcopy(module.state_dict())
    components = cut(module)
    assert [part.name for part in components] == [
        *("conv1", "relu", "conv2", "relu-2", "layer1.0", "layer1.1.0", "layer1.1.1"),
        *("avgpool", "fc"),
    ]
    for part in components:
        built = build_component(part, 7)
        for name, value in built.state_dict().items():
            assert torch.equal(value, before[f"{part.name}.{name}"])
            if value.dim():
                value.zero_()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.relu.inplace
    assert all(not len(m._forward_hooks) for m in module.modules())


def test_shapes_are_known_without_memory() -> None:
    module = build_for_shapes(cut(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))[1])
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}


class Odd(nn.Module):
    """A module whose children do not form a chain, in the way that `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        if self.kind == "residual":
            return x + self.second(y)  # type: ignore[no-any-return]
        if self.kind == "parameter":
            y = y * self.scale
        if self.kind == "training":
            y = functional.dropout(y, 0.5, self.training)
        if self.kind == "branch" and y.sum() > 0:
            y = -y
        if self.kind == "twice":
            return self.second(self.first(y))  # type: ignore[no-any-return]
        if self.kind == "unused":
            y.exp()
            return self.second(y)  # type: ignore[no-any-return]
        return self.second(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("residual", "output of x is used again after another child"),
        ("parameter", "Odd uses scale outside of its children: put it into a child"),
        ("training", "its own forward depends on self.training: use modules"),
        ("branch", "its forward cannot be traced"),
        ("twice", "first runs twice: a cut model cannot share its weights"),
        ("unused", "its children do not run one after another"),
    ],
)
def test_what_is_no_chain_of_children_is_refused_in_one_line(kind: str, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        cut(Odd(kind))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


def viewing() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight: Any = module[0].weight
    module[1].weight = nn.Parameter(weight.detach().T)
    return module


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (tied(), "0 and 2 share weights"),
        (viewing(), "0 and 1 share weights"),
        (hooked(), "Sequential has forward hooks, which a cut would lose"),
        (nn.Identity(), "Identity has no children to cut at"),
        ("resnet50", "cut takes a torch.nn.Module, not a str"),
    ],
)
def test_shared_weights_hooks_and_other_objects_are_refused(module: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        cut(module)
