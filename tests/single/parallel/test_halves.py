"""A backward in two halves gives the gradients of a whole one, for unusual models too."""

# mypy: disable-error-code="no-any-return"

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hvdtrain.parallel import halves

WIDTH, MICROBATCHES = 5, 3


class Model(nn.Module):
    """Three layers and two biases; each kind of model uses some of them."""

    def __init__(self, compute: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.p, self.q = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(self, input)


def frozen_at_the_start(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = model.a(x)
    return model.b(x)


def stop_gradient_beside_a_path(model: Model, x: Tensor) -> Tensor:
    return model.b(model.a(x).detach()) + model.c(x)


def tied_weights_and_untied_biases(model: Model, x: Tensor) -> Tensor:
    model.c.weight = model.a.weight
    return model.c(torch.tanh(model.b(torch.tanh(model.a(x)))))


def biases_alone(model: Model, x: Tensor) -> Tensor:
    return model.a(x + model.p + model.q)


def a_bias_used_again_and_again(model: Model, x: Tensor) -> Tensor:
    return model.a((x + model.p).detach()) + (x * model.p).sum(1, keepdim=True) + model.a(x)


def hooks_that_change_gradients(model: Model, x: Tensor) -> Tensor:
    y = model.a(x)
    y.register_hook(lambda gradient: 2 * gradient)
    z = model.b(torch.tanh(y))
    z.register_hook(lambda gradient: 3 * gradient)
    return torch.tanh(z)


def reentrant_checkpoints(model: Model, x: Tensor) -> Tensor:
    x = checkpoint(model.a, x, use_reentrant=True)
    return model.b(checkpoint(model.a, x, use_reentrant=True))


def checkpoints(model: Model, x: Tensor) -> Tensor:
    x = checkpoint(model.a, x, use_reentrant=False)
    return model.b(checkpoint(model.a, x, use_reentrant=False))


def a_view_of_the_input(model: Model, x: Tensor) -> Tensor:
    return x.view_as(x)


def the_input_itself(model: Model, x: Tensor) -> Tensor:
    return x


def nothing_of_the_input(model: Model, x: Tensor) -> Tensor:
    return model.a(torch.ones_like(x))


def no_gradient_at_all(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.a(x)


KINDS = [
    *(frozen_at_the_start, stop_gradient_beside_a_path, tied_weights_and_untied_biases),
    *(biases_alone, a_bias_used_again_and_again, hooks_that_change_gradients),
    *(reentrant_checkpoints, checkpoints, a_view_of_the_input, the_input_itself),
    *(nothing_of_the_input, no_gradient_at_all),
]


def with_other_weights() -> nn.Module:
    """Return layers whose weights are computed from parameters in each forward."""
    spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).eval()
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), spectral)


class Recurrent(nn.Module):
    """An LSTM that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        return torch.as_tensor(self.lstm(input)[0] + self.lstm(input.flip(0))[0])


class ChannelsLast(nn.Module):
    """Changes the order of its input in memory."""

    def forward(self, input: Tensor) -> Tensor:
        return input.contiguous(memory_format=torch.channels_last)


def gradients(model: nn.Module, rows: int, in_halves: bool) -> tuple[list[Tensor | None], int]:
    """Run some micro-batches; return the gradients of inputs and parameters.

    The second value is the number of groups that waited for the second half.
    """
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = None
    inputs = [
        torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True)
        for _ in range(MICROBATCHES)
    ]
    incoming = [torch.randn(rows, WIDTH, dtype=torch.float64) for _ in range(MICROBATCHES)]
    waiting = []
    for input, gradient in zip(inputs, incoming, strict=True):
        output = model(input)
        if in_halves:
            waiting.append(halves.backward_input(output, gradient, input, model.parameters()))
        elif output.requires_grad:
            torch.autograd.backward(output, gradient)
    count = sum(map(len, waiting))
    for groups in waiting:
        halves.backward_weight(groups)
    return [tensor.grad for tensor in (*inputs, *model.parameters())], count


def check(model: nn.Module, rows: int, is_split: bool) -> None:
    model.double()
    expected, _ = gradients(model, rows, in_halves=False)
    actual, groups = gradients(model, rows, in_halves=True)
    for one, other in zip(expected, actual, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=0, atol=1e-13)
    assert bool(groups) == is_split


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_unusual_models(kind: Callable[[Model, Tensor], Tensor], rows: int) -> None:
    torch.manual_seed(0)
    is_whole = kind in (frozen_at_the_start, reentrant_checkpoints, *KINDS[-4:])
    check(Model(kind), rows, not is_whole)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        *(with_other_weights, Recurrent),
        lambda: nn.TransformerEncoderLayer(WIDTH, 1, 7, 0.0, batch_first=True),
        lambda: nn.Sequential(
            *(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 3, 3), nn.GroupNorm(1, 3)),
            *(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(9, WIDTH)),
        ),
    ],
    ids=["computed weights", "recurrent", "attention", "convolution"],
)
def test_layers_of_all_kinds(make: Callable[[], nn.Module], rows: int) -> None:
    torch.manual_seed(0)
    check(make(), rows, is_split=True)


def test_a_group_norm_in_channels_last_format() -> None:
    """PyTorch 2.13 crashes where only gradients of its weights are wanted."""
    torch.manual_seed(0)
    before = nn.Sequential(nn.Linear(WIDTH, 36), nn.Unflatten(1, (4, 3, 3)), ChannelsLast())
    middle = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1))
    after = nn.Sequential(nn.GroupNorm(4, 4), nn.Flatten(), nn.Linear(36, WIDTH))
    check(nn.Sequential(before, middle, after), 3, is_split=True)


def test_weights_wait_for_the_second_half() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    input = torch.ones(2, WIDTH, requires_grad=True)
    groups = halves.backward_input(model(input).sum(), None, input, model.parameters())
    assert input.grad is not None
    assert model.weight.grad is None
    halves.backward_weight(groups)
    assert model.weight.grad is not None
