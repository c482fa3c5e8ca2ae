"""The gradients of a replicated stage, with a reduction that only records its start."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.errors import UsageError
from hvdtrain.plan.cut import Share
from hvdtrain.sync.collectives import Alone
from hvdtrain.sync.gradients import ReplicatedGradients
from hvdtrain.sync.states import States

WHOLE = Share(1.0, True)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Recorded(Alone):
    """Collective operations that record what was started."""

    def __init__(self, started: list[str]) -> None:
        self.started = started

    def all_reduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self.started.append(name)
        return tensor


def gradients_of(model: nn.Module, started: list[str]) -> ReplicatedGradients:
    parameters, states = dict(model.named_parameters()), States(dict, lambda _: None)
    return ReplicatedGradients(parameters, {}, states, Recorded(started), bucket_bytes=1)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def test_a_bucket_starts_in_the_announced_backward_once_it_is_complete() -> None:
    model, started = two_layers(), list[str]()
    gradients = gradients_of(model, started)
    names = [bucket.name for bucket in gradients.buckets]
    assert len(names) == 4
    gradients.announce(WHOLE)
    backward(model)
    assert started == [], "the first backward shows how often each gradient grows"
    gradients.start(WHOLE)
    gradients.finish()
    started.clear()
    backward(model)
    assert started == [], "this backward is not announced as the last one"
    gradients.announce(WHOLE)
    backward(model)
    assert started == names
    gradients.start(WHOLE)
    assert len(started) == 4, "nothing is started twice"
    gradients.finish()


class Shared(nn.Module):
    """One layer, used by a number of reentrant checkpoints."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses, self.layer = uses, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        for _ in range(self.uses):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_no_bucket_starts_before_a_gradient_has_grown_for_the_last_time() -> None:
    model, started = Shared(2), list[str]()
    gradients = gradients_of(model, started)
    for _ in range(3):
        gradients.announce(WHOLE)
        backward(model)
        assert started == []
        gradients.start(WHOLE)
        assert len(started) == len(gradients.buckets)
        gradients.finish()
        started.clear()


def test_a_gradient_that_grows_in_reduction_ends_the_step() -> None:
    model = Shared(1)
    gradients = gradients_of(model, [])
    gradients.announce(WHOLE)
    backward(model)
    gradients.start(WHOLE)
    gradients.finish()
    model.uses = 2
    gradients.announce(WHOLE)
    with pytest.raises(UsageError, match=r"layer\.(weight|bias) changed after"):
        backward(model)


def test_gradients_that_nobody_holds_free_their_parameters() -> None:
    model = two_layers()
    gradients = gradients_of(model, [])
    watched: list[weakref.ref[Any]] = [weakref.ref(gradients)]
    watched += [weakref.ref(parameter) for parameter in model.parameters()]
    del model, gradients
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
