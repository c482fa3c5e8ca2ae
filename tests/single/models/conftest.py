"""Fixtures for the tests of all models: a model assembled from its components."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.models.component import Component, build_component


@dataclass
class Model:
    """A whole model in one process and its parameters by name."""

    forward: nn.Sequential
    parameters: dict[str, nn.Parameter]

    def gradients(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.forward.zero_grad()
        nn.functional.cross_entropy(self.forward(images), labels).backward()
        return {
            name: value.grad for name, value in self.parameters.items() if value.grad is not None
        }


def assemble(
    components: Sequence[Component], seed: int = 0, dtype: torch.dtype = torch.float32
) -> Model:
    modules = [build_component(component, seed, dtype=dtype) for component in components]
    parameters = {
        f"{component.name}.{name}": parameter
        for component, module in zip(components, modules, strict=True)
        for name, parameter in module.named_parameters()
    }
    return Model(nn.Sequential(*modules), parameters)


def largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest error of all tensors, measured as `reference.largest_errors`."""
    assert actual.keys() == expected.keys()
    floor = 1e-6 * max(float(value.abs().max()) for value in expected.values())
    return max(
        float((actual[name] - value).abs().max()) / max(float(value.abs().max()), floor)
        for name, value in expected.items()
    )


def images_and_labels(
    count: int, image_size: int, classes: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count * image_size)
    images = torch.randn(count, 3, image_size, image_size, generator=generator, dtype=dtype)
    return images, torch.randint(classes, (count,), generator=generator)


@pytest.fixture(name="assemble")
def assemble_fixture() -> Callable[..., Model]:
    return assemble


@pytest.fixture(name="largest_difference")
def largest_difference_fixture() -> Callable[[dict[str, Tensor], dict[str, Tensor]], float]:
    return largest_difference


@pytest.fixture(name="images_and_labels")
def images_and_labels_fixture() -> Callable[..., tuple[Tensor, Tensor]]:
    return images_and_labels
