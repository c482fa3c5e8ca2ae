"""The errors of gradients against serial ones: what is an error, and what is rounding."""

import pytest
import torch
from torch import Tensor

from hvdtrain.check.parity import gradient_errors

EPSILON = torch.finfo(torch.float64).eps


def gradients(bias: float) -> dict[str, Tensor]:
    """Return the gradients of a convolution whose bias is before a batch norm, and of a head."""
    return {
        "stem.conv.weight": torch.tensor([0.5, -0.25], dtype=torch.float64),
        "stem.conv.bias": torch.tensor([bias], dtype=torch.float64),
        "head.bias": torch.tensor([8.0], dtype=torch.float64),
    }


def test_a_gradient_that_cancels_may_be_any_rounding_error() -> None:
    errors = gradient_errors(gradients(2 * EPSILON), gradients(-EPSILON))
    assert set(errors.values()) == {0.0}


def test_more_than_rounding_errors_of_the_layer_is_an_error() -> None:
    # 1e-14 of the gradients of its layer: the head, whose gradients are larger, does not count.
    errors = gradient_errors(gradients(5e-15), gradients(0.0))
    assert errors["stem.conv.bias"] > 1e-12 > errors["stem.conv.weight"]


def test_long_sums_have_more_rounding_errors() -> None:
    assert gradient_errors(gradients(5e-15), gradients(0.0), 1000)["stem.conv.bias"] == 0
    assert gradient_errors(gradients(5e-12), gradients(0.0), 1000)["stem.conv.bias"] > 1e-12
    lost = gradients(0.0) | {"stem.conv.weight": torch.zeros(2)}
    assert gradient_errors(lost, gradients(0.0), 10**6)["stem.conv.weight"] > 0.99


@pytest.mark.parametrize("lost", [torch.tensor([torch.nan]), torch.zeros(2)])
def test_a_gradient_that_is_no_number_is_an_error_beside_larger_ones(lost: Tensor) -> None:
    errors = gradient_errors(gradients(0.0) | {"stem.conv.bias": lost}, gradients(0.0))
    assert errors["stem.conv.bias"] == float("inf")


def test_a_missing_or_infinite_gradient_is_an_error() -> None:
    wrong = gradients(0.0) | {
        "head.bias": torch.zeros(2),
        "stem.conv.bias": torch.tensor([torch.inf]),
    }
    errors = gradient_errors(wrong, gradients(0.0))
    assert errors["head.bias"] == errors["stem.conv.bias"] == float("inf")
    assert gradient_errors({"a.b": torch.tensor([torch.nan])}, {"a.b": torch.zeros(1)})[
        "a.b"
    ] == float("inf")
