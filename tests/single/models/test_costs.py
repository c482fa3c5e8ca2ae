import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hvdtrain.errors import UsageError
from hvdtrain.models import components
from hvdtrain.models.component import Component, build_component, parameter_count, tensor_shapes
from hvdtrain.models.costs import ComponentCost, boundaries, component_costs
from hvdtrain.plan.traffic import Gradient, Sizes


def flops(model: str, image_size: int, classes: int = 10) -> float:
    parts = components(model, classes, image_size)
    return sum(cost.forward_flops for cost in component_costs(parts, image_size, classes=classes))


@pytest.mark.parametrize(
    ("model", "image_size", "published"),
    [
        ("resnet18", 32, 2 * 0.56e9),  # kuangliu/pytorch-cifar's ResNet-18: 0.56 GMAC
        ("resnet18", 224, 2 * 1.814e9),  # torchvision's model card: 1.814 GMAC
        ("resnet50", 224, 2 * 4.089e9),  # torchvision's model card: 4.089 GMAC
        ("vit_b16", 224, 2 * 17.564e9),  # torchvision's model card: 17.564 GMAC
        ("vit_tiny", 224, 2 * 1.26e9),  # timm's vit_tiny_patch16_224: 1.26 GMAC
    ],
)
def test_operations_are_the_published_ones(model: str, image_size: int, published: float) -> None:
    classes = 10 if image_size == 32 else 1000
    assert flops(model, image_size, classes) == pytest.approx(published, rel=0.01)


def test_costs_of_a_small_model_are_those_counted_by_hand() -> None:
    parts = [
        Component("conv", partial(nn.Conv2d, 3, 4, 3, padding=1)),
        Component("norm", lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())),
        Component("flat", nn.Flatten),
        Component("head", partial(nn.Linear, 4 * 64, 5)),
    ]
    one = 4 * 64  # elements of an activation
    costs = component_costs(parts, 8, classes=5)
    assert costs[3].tensors == Sizes((Gradient(5, 256, is_matrix=True), Gradient(5)))
    assert [cost.sizes.statistics for cost in costs] == [0, 2 * 4 + 1, 0, 0]
    assert [replace(cost, tensors=None) for cost in costs] == [
        # no saved bytes: the input, which backward needs, is not counted
        ComponentCost(
            *("conv", 3 * 4 * 9 + 4, 4 * (3 * 4 * 9 + 4), 0),
            *(2.0 * 64 * 3 * 4 * 9 + one, (4, 8, 8), 4 * one, 0),
        ),
        # the ReLU saves its output; means, variances and a counter are buffers
        ComponentCost(
            *("norm", 8, 32, 4 * 4 * 2 + 8, 2.0 * one, (4, 8, 8), 4 * one, 4 * one),
            batch_norms=1,
            fixed_bytes=2 * 4 * 4,  # mean and deviation of each channel
        ),
        ComponentCost("flat", 0, 0, 0, 1.0 * one, (one,), 4 * one, 0),
        ComponentCost("head", 5 * one + 5, 20 * one + 20, 0, 2.0 * 5 * one + 5, (5,), 20, 0),
    ]


def saved_on_the_cpu(parts: list[Component], image_size: int, batch: int) -> list[int]:
    """Return the bytes that each component saves for backward in a real forward."""
    activations, saved_bytes = torch.randn(batch, 3, image_size, image_size), []
    for component in parts:
        module = build_component(component, 0)
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            emitted = module(activations)
        saved.pop(activations.untyped_storage().data_ptr(), None)
        saved_bytes.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
        activations = emitted.detach().requires_grad_()
    return saved_bytes


@pytest.mark.parametrize("model", ["cnn", "resnet18", "vit_tiny"])
def test_saved_bytes_are_those_that_autograd_keeps_on_the_cpu(model: str) -> None:
    parts = components(model, 10, 32)
    small, large = saved_on_the_cpu(parts, 32, 1), saved_on_the_cpu(parts, 32, 2)
    expected = [after - before for before, after in zip(small, large, strict=True)]
    assert [cost.saved_bytes for cost in component_costs(parts, 32, classes=10)] == expected


@pytest.mark.parametrize("model", ["cnn", "resnet18", "vit_tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_sizes_are_those_of_the_model(model: str, dtype: torch.dtype) -> None:
    parts = components(model, 7, 32)
    costs = component_costs(parts, 32, classes=7, dtype=dtype)
    emitted = [boundary.shape[1:] for boundary in boundaries(parts, 32)]
    assert [cost.output_shape for cost in costs] == emitted
    assert sum(cost.parameters for cost in costs) == parameter_count(parts)
    assert all(cost.parameter_bytes == dtype.itemsize * cost.parameters for cost in costs)
    assert all(cost.forward_flops > 0 for cost in costs)
    assert sum(cost.batch_norms for cost in costs) == {"resnet18": 20}.get(model, 0)
    for component, cost in zip(parts, costs, strict=True):
        module = build_component(component, 0, dtype=dtype)
        assert cost.buffer_bytes == sum(buffer.nbytes for buffer in module.buffers())


def test_twice_the_width_of_a_number_is_twice_the_memory() -> None:
    parts = components("cnn", 10, 32)
    single, double = (
        component_costs(parts, 32, classes=10, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    for one, two in zip(single, double, strict=True):
        assert (two.output_bytes, two.forward_flops) == (2 * one.output_bytes, one.forward_flops)


@pytest.mark.parametrize("model", ["cnn", "resnet18", "vit_tiny"])
def test_memory_under_autocast_is_that_of_a_run_under_autocast(model: str) -> None:
    """Outputs have half the bytes, except in the ViT, whose residual sums are in fp32."""
    parts = components(model, 10, 32)
    full, costs = (component_costs(parts, 32, classes=10, autocast=on) for on in (None, "cpu"))
    x = torch.rand(3, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for part, whole, cost in zip(parts, full, costs, strict=True):
            x = build_component(part, 0)(x)
            assert cost.output_bytes == x[0].numel() * x.element_size()
            assert cost.forward_flops == whole.forward_flops
            assert 0.4 * whole.saved_bytes <= cost.saved_bytes
    assert sum(cost.saved_bytes for cost in costs) < 0.75 * sum(cost.saved_bytes for cost in full)
    # Each micro-batch has its own bf16 copy of the weights.
    fixed = sum(cost.fixed_bytes for cost in costs)
    assert 0.45 < fixed / sum(cost.parameter_bytes for cost in costs) < 0.55


class OutOfTheBuffers(nn.Module):
    """Holds a tensor that `module.to` does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * self.scale


class Valued(nn.Sequential):
    """Looks at a value, which the meta device does not have."""

    def forward(self, input: Tensor) -> Tensor:
        assert input.sum().item() != 0
        output: Tensor = super().forward(input)
        return output


def test_costs_counted_on_the_cpu_are_those_counted_without_values() -> None:
    def parts(kind: type[nn.Sequential]) -> list[Component]:
        return [
            Component("first", partial(nn.Conv2d, 3, 4, 3)),
            Component("middle", lambda: kind(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))),
            Component("flat", lambda: kind(nn.Dropout(), nn.Flatten())),
            Component("last", partial(nn.Linear, 4 * 16, 5)),
        ]

    expected = component_costs(parts(nn.Sequential), 8, classes=5)
    assert component_costs(parts(Valued), 8, classes=5) == expected


def test_under_autocast_components_may_emit_whole_numbers() -> None:
    parts = [
        Component("index", lambda: OnlyIndices()),
        Component("embed", lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten())),
        Component("head", partial(nn.Linear, 4 * 3 * 64, 5)),
    ]
    costs = component_costs(parts, 8, classes=5, autocast="cpu")
    assert [cost.is_differentiable for cost in costs] == [False, True, True]
    assert costs[-1].output_bytes == 2 * 5


def test_what_cannot_be_counted_under_autocast_counts_as_without() -> None:
    parts = [
        Component("scale", OutOfTheBuffers),
        Component("head", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5))),
    ]
    costs = component_costs(parts, 8, classes=5, autocast="cpu")
    assert costs == component_costs(parts, 8, classes=5)


class OnlyIndices(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).long().clamp(0, 4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_modes_play_no_part(mode: type[torch.no_grad]) -> None:
    parts = components("cnn", 10, 32)
    expected = component_costs(parts, 32, classes=10)
    with mode():
        assert component_costs(parts, 32, classes=10) == expected


def test_a_component_that_cannot_work_is_named() -> None:
    in_place = [Component("first", nn.Identity), Component("second", partial(nn.ReLU, True))]
    with pytest.raises(UsageError, match=r"'second' with input .* changes its input in place"):
        component_costs(in_place, 8, classes=None)
    with pytest.raises(UsageError, match=r"'flat', emits shape \(2, 192\), not \(2, 10\)"):
        component_costs([Component("flat", nn.Flatten)], 8, classes=10)


def test_counting_resnet18_takes_less_than_half_a_second() -> None:
    parts = components("resnet18", 10, 32)
    component_costs(parts, 32, classes=10)  # torch imports its compiler at first use

    def seconds() -> float:
        start = time.process_time()
        component_costs(parts, 32, classes=10)
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize("model", ["cnn", "resnet18", "vit_tiny"])
def test_tensor_shapes_are_those_of_the_state(model: str) -> None:
    parts = components(model, 10, 32)
    expected = {
        f"{component.name}.{name}": tuple(value.shape)
        for component in parts
        for name, value in build_component(component, 0).state_dict().items()
    }
    assert tensor_shapes(parts) == expected
