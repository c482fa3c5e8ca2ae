"""The gradients of a replicated stage, with a reduction that only notes that it was started."""

import gc
import weakref
from typing import Any

import torch
from torch import nn

from hvdtrain.parallel.cut import Share
from hvdtrain.parallel.reduce import ReplicatedGradients


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def gradients_of(model: nn.Module, started: list[str]) -> ReplicatedGradients:
    def all_reduce(tensor: torch.Tensor, name: str) -> str:
        started.append(name)
        return name

    def wait(handle: Any) -> None:
        assert handle in started

    return ReplicatedGradients(dict(model.named_parameters()), {}, all_reduce, wait, 1)


def test_a_bucket_starts_in_the_announced_backward_once_it_is_complete() -> None:
    model, started = two_layers(), list[str]()
    gradients = gradients_of(model, started)
    assert len(gradients.buckets) == 4
    model(torch.ones(2, 4)).sum().backward()
    assert started == [], "another backward is to come"
    gradients.announce(Share(1.0, True))
    model(torch.ones(2, 4)).sum().backward()
    assert started == [bucket.name for bucket in gradients.buckets]
    gradients.start(Share(1.0, True))
    assert len(started) == 4, "nothing is started twice"
    gradients.finish()


def test_gradients_that_nobody_holds_free_their_parameters() -> None:
    model = two_layers()
    gradients = gradients_of(model, [])
    watched: list[weakref.ref[Any]] = [weakref.ref(gradients)]
    watched += [weakref.ref(parameter) for parameter in model.parameters()]
    del model, gradients
    gc.collect()
    assert [each() for each in watched] == [None] * len(watched)
