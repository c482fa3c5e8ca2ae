"""Dropout masks depend on the step, the layer and the sample, and on nothing else."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.errors import UsageError
from hvdtrain.parallel.dropout import Draws, dropped_of_samples, follow_samples

CPU = torch.device("cpu")


def layer_of(kind: type[nn.Module], probability: float, draws: Draws, **more: bool) -> nn.Module:
    layer = kind(probability, **more)
    follow_samples("component", layer, draws)
    return layer


def kept(layer: nn.Module, draws: Draws, input: Tensor, first: int = 0, rows: int = 0) -> Tensor:
    draws.begin_forward((first, first + (rows or len(input))))
    emitted: Tensor = layer(input)
    return emitted


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_so_many_values_are_dropped_and_the_others_are_scaled(probability: float) -> None:
    draws = Draws(seed=3)
    emitted = kept(layer_of(nn.Dropout, probability, draws), draws, torch.ones(50, 4001))
    assert (emitted == 0).double().mean().item() == pytest.approx(probability, abs=0.005)
    assert emitted.double().mean().item() == pytest.approx(float(probability < 1), abs=0.02)
    assert set(emitted.unique().tolist()) <= {0.0, torch.tensor(1.0).div(1 - probability).item()}


def test_samples_places_and_keys_are_independent() -> None:
    """No two rows or columns correlate by more than six standard deviations."""
    rows = torch.cat([dropped_of_samples(key, 0, 40, 5000, 0.3, CPU) for key in (0, 1, -(2**63))])
    for table in (rows, rows.T[:120]):
        centred = (table.double() - 0.3) / 0.21**0.5
        correlation = centred @ centred.T / table.shape[1]
        assert correlation.fill_diagonal_(0).abs().max() < 6 / table.shape[1] ** 0.5


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_a_part_of_the_batch_is_masked_as_in_the_whole(kind: type[nn.Module]) -> None:
    shapes = {"Dropout1d": (9, 8, 5), "Dropout3d": (9, 8, 2, 3, 4)}
    shape = shapes.get(kind.__name__, (9, 8, 3, 5))
    draws = Draws(seed=1)
    layer, input = layer_of(kind, 0.4, draws), torch.rand(shape)
    whole = kept(layer, draws, input)
    assert torch.equal(kept(layer, draws, input[4:7], first=4), whole[4:7])
    assert kept(layer, draws, input[:0]).shape == input[:0].shape
    if kind is not nn.Dropout:
        assert all(values.any() == values.all() for values in (whole != 0).flatten(0, 1))
    draws.seed = 2
    assert not torch.equal(kept(layer, draws, input), whole)


def test_several_rows_of_a_sample_are_dropped_each_on_its_own() -> None:
    draws = Draws(seed=1)
    layer, input = layer_of(nn.Dropout, 0.4, draws), torch.ones(12, 6)
    whole = kept(layer, draws, input, rows=4)
    assert torch.equal(kept(layer, draws, input[3:9], first=1, rows=2), whole[3:9])
    assert len(whole.unique(dim=0)) > 6


def test_calls_layers_and_gradients_and_layouts() -> None:
    draws = Draws(seed=1)
    two = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    follow_samples("component", two, draws)
    input = torch.rand(4, 8, 6, 6, requires_grad=True)
    draws.begin_forward((0, 4))
    first, second, again = two[0](input), two[1](input), two[0](input)
    assert not torch.equal(first, second)
    assert not torch.equal(first, again)
    first.sum().backward()
    assert input.grad is not None
    assert torch.equal(input.grad, (first != 0) * 2.0)
    channels_last = input.detach().to(memory_format=torch.channels_last)
    draws.begin_forward((0, 4))
    same = two[0](channels_last)
    assert torch.equal(same, first)
    assert same.is_contiguous(memory_format=torch.channels_last)


def test_in_place_and_evaluation_are_as_pytorch_has_them() -> None:
    draws = Draws(seed=1)
    layer, input = layer_of(nn.Dropout, 0.5, draws, inplace=True), torch.ones(4, 8)
    assert kept(layer, draws, input) is input
    assert (input == 0).any()
    layer.eval()
    ones = torch.ones(4, 8)
    assert torch.equal(kept(layer, draws, ones), torch.ones(4, 8))


def test_a_checkpoint_of_a_users_own_drops_the_same_again() -> None:
    draws = Draws(seed=1)
    layer, input = layer_of(nn.Dropout, 0.5, draws), torch.rand(4, 50, requires_grad=True)

    def multiplied(x: Tensor, weight: Tensor) -> Tensor:
        emitted: Tensor = layer(x * weight)
        return emitted

    for reentrant in (False, True):
        weight = torch.rand(50, requires_grad=True)
        draws.begin_forward((0, 4))
        output = checkpoint(multiplied, input, weight, use_reentrant=reentrant)
        draws.begin_forward((4, 8))
        layer(input)  # the next micro-batch
        output.sum().backward()
        assert weight.grad is not None
        assert torch.allclose(weight.grad, ((output != 0) * 2 * input).sum(0))


def test_a_checkpoint_that_would_drop_other_values_is_refused() -> None:
    draws = Draws(seed=1)
    layer, input = layer_of(nn.Dropout, 0.5, draws), torch.rand(4, 50, requires_grad=True)
    draws.begin_forward((0, 4))
    output = checkpoint(
        lambda x: layer(x * 2), input, use_reentrant=False, preserve_rng_state=False
    )
    with pytest.raises(UsageError, match=r"component .* preserve_rng_state=True"):
        output.sum().backward()
