"""The division of a model among parameter servers."""

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.sync.server import keep_only
from hvdtrain.sync.states import Slice, assign, slices_of


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_parameters_are_balanced_by_bytes(servers: int) -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        sizes = draw.integers(0, 10_000, 40).tolist()
        owners = assign(sizes, servers)
        loads = np.bincount(owners, sizes, servers)
        # Without its last and smallest parameter no server had more than any other one.
        assert loads.max() <= sum(sizes) / servers + max(sizes)
        assert owners == assign(sizes, servers)


def test_each_server_has_a_parameter() -> None:
    assert sorted(assign([1000, 1, 1, 0], 4)) == [0, 1, 2, 3]


def test_values_travel_in_logical_order() -> None:
    here = nn.Conv2d(3, 4, 3)
    here.weight.data = here.weight.data.contiguous(memory_format=torch.channels_last)
    there = nn.Conv2d(3, 4, 3)
    slices = [slices_of(dict(layer.named_parameters()), 1)[0] for layer in (here, there)]
    slices[1].put_weights(slices[0].copy_weights())
    assert torch.equal(here.weight, there.weight)
    here(torch.ones(1, 3, 5, 5)).sum().backward()
    flat = slices[0].empty()
    slices[0].copy_gradients(flat, 2.0)
    for value in there.parameters():
        value.grad = torch.ones_like(value)
    slices[1].add_gradients(flat)
    assert here.weight.grad is not None and there.weight.grad is not None
    assert torch.equal(there.weight.grad, 1 + 2 * here.weight.grad)


def test_a_missing_gradient_is_zero() -> None:
    held = Slice({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))})
    held.parameters[1].grad = torch.ones(2)
    flat = held.empty().fill_(7.0)
    held.copy_gradients(flat, 3.0)
    assert flat.tolist() == [0.0, 0.0, 3.0, 3.0]


def test_a_server_keeps_its_parameters_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    named = dict(model.named_parameters())
    keep_only({"model": model}, {name: named[name] for name in ("1.weight", "3.bias")})
    assert list(dict(model.named_parameters())) == ["1.weight", "3.bias"]
    assert not list(model.buffers())
    assert isinstance(model.get_submodule("1"), nn.BatchNorm2d)
