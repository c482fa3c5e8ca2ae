"""Compressed sums of a single replica."""

import torch
from torch import nn

from hvdtrain.options.requests import TopK
from hvdtrain.plan.cut import Share
from hvdtrain.sync.collectives import Alone
from hvdtrain.sync.compress import PowerSums, make_sums
from hvdtrain.sync.gradients import ReplicatedGradients
from hvdtrain.sync.states import States


def test_a_single_replica_adds_once_what_several_have_left_out() -> None:
    layer, after = nn.Linear(3, 2), 1  # later steps start during backward
    named, alone = dict(layer.named_parameters()), Alone()
    states = States(dict, lambda _: None)
    sums = make_sums(TopK(0.1, after), alone)
    gradients = ReplicatedGradients(named, {}, states, alone, sums)
    left_out = {f"residual/{place}/weight": torch.full((2, 3), 0.5 + place) for place in range(2)}
    shapes = {name: tuple(value.shape) for name, value in left_out.items()}
    assert gradients.wanted(shapes) == left_out.keys()
    gradients.load(left_out)
    received = []
    for _ in range(3):
        gradients.zero()
        gradients.announce(Share(1.0, True))
        layer(torch.ones(1, 3)).sum().backward()
        gradients.start(Share(1.0, True))
        gradients.finish()
        gradients.after_update()
        assert layer.weight.grad is not None
        received.append(float(layer.weight.grad[0, 0]))
    assert received == [1.0, 3.0, 1.0], "exact, then with the residuals, then nothing is left"


class Fixed(Alone):
    """A replica that receives the same sums, whatever it sends."""

    def all_reduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(name))
        return tensor.copy_(torch.randn(tensor.shape, generator=generator))


def low_rank_sum(threads: int) -> bytes:
    """Return the bits of a sum that a replica with a number of threads computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layer, fixed = nn.Linear(512, 10, bias=False), Fixed()
        states, sums = States(dict, lambda _: None), PowerSums(2, fixed)
        gradients = ReplicatedGradients(dict(layer.named_parameters()), {}, states, fixed, sums)
        gradients.start(Share(1.0, True))
        gradients.finish()
        return gradients.buckets[0].flat.numpy().tobytes()
    finally:
        torch.set_num_threads(before)


def test_the_bits_of_low_rank_sums_do_not_depend_on_threads() -> None:
    """Hosts with unequal numbers of ranks give them unequal numbers of threads."""
    assert low_rank_sum(1) == low_rank_sum(2) == low_rank_sum(3)
