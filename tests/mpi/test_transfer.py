"""No message between ranks is longer than MPI can count, whatever it holds."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain import torch as distributed
from hvdtrain import transfer
from hvdtrain.backends.pytorch.session import under_plan
from hvdtrain.backends.pytorch.state import agree_on_weights, gather_tensors
from hvdtrain.torch.start import current
from hvdtrain.world import World
from tests.mpi.common import components_of, names, run_step, runtime_of
from tests.mpi.plans import PLANS
from tests.mpi.test_relayout import ADAM
from tests.mpi.test_training import IMAGE_SIZE

LIMIT = 2**14  # bytes, in place of 2**31 - 1
SENDING = ("bcast", "allgather", "gather", "send", "isend", "Isend", "Irecv", "Ibcast")

pytestmark = pytest.mark.several_ranks


class Limited:
    """A communicator that refuses what is longer than the limit."""

    def __init__(self, communicator: Any) -> None:
        self.real = communicator

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self.real, name)
        if name not in SENDING:
            return method

        def call(value: Any, *others: Any) -> Any:
            is_memory = isinstance(value, memoryview)
            assert (value.nbytes if is_memory else len(pickle.dumps(value))) <= LIMIT
            return method(value, *others)

        return call


@pytest.fixture
def limited(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(transfer, "PIECE", LIMIT)
    communicator: Any = Limited(world.communicator)
    yield replace(world, communicator=communicator)


def kinds(seed: int) -> list[Any]:
    values = torch.randn(4, 40, 8, 8, generator=torch.Generator().manual_seed(seed))
    return [
        *(
            values,
            values.to(memory_format=torch.channels_last),
            values[:, ::2],
            values[0, 0, 0, 0],
        ),
        *(
            values.bfloat16(),
            values.bool(),
            values[:0],
            torch.view_as_complex(values[:, :, :, :2]),
        ),
        *(values.numpy(), values.numpy().astype(ml_dtypes.bfloat16), np.zeros((0, 3)), "text"),
    ]


@pytest.mark.proves("Tensors of any size pass between ranks in pieces.")
def test_every_kind_of_tensor_arrives_as_it_was(limited: World) -> None:
    sent, last = kinds(limited.rank), limited.size - 1
    gathered = limited.gather_on_first(sent)
    assert len(gathered) == (limited.size if limited.rank == 0 else 0)
    for rank, received in [*enumerate(gathered), (last, limited.broadcast(sent, last))]:
        for one, other in zip(received, kinds(rank), strict=True):
            assert type(one) is type(other)
            if isinstance(one, torch.Tensor):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert np.array_equal(as_array(one), as_array(other))
        assert received[1].stride() == sent[1].stride(), "the order of memory is kept"


def as_array(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return np.asarray(value.float() if is_half else value)


def test_the_state_moves_between_plans(limited: World) -> None:
    components = components_of("resnet", IMAGE_SIZE)
    before, after = (PLANS[limited.size][name](names(components)) for name in ("mp", "dp"))
    runtime = runtime_of(ADAM, before, components, IMAGE_SIZE, limited)
    run_step(runtime, before, limited, IMAGE_SIZE, 26, 0)
    tensors = gather_tensors(before, runtime.parts, limited)
    runtime = under_plan(runtime, ADAM, before, after, components, IMAGE_SIZE, limited)
    model = runtime.parts[0].model
    assert all(torch.equal(model.tensors()[name], value) for name, value in tensors.items())
    if limited.rank > 0:
        next(iter(model.parameters().values())).data.zero_()
    agree_on_weights(after, runtime.parts, model.digests(), limited)
    assert len(set(limited.gather(model.fingerprint()))) == 1
    runtime.observer.close()


def test_a_loop_starts_from_one_rank_and_resumes(limited: World, tmp_path: Path) -> None:
    save_to: Path = limited.broadcast(tmp_path)
    weights = []
    for is_resumed in (False, True):
        distributed.start(device="cpu")
        started: Any = current()
        started.world = limited
        started.agreement.communicator = Limited(started.agreement.communicator)
        torch.manual_seed(limited.rank)  # the weights of rank 0 count
        model = nn.Sequential(nn.Linear(100, 60), nn.Linear(60, 100))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        if not is_resumed:  # the optimizer has a state that is sent, too
            model(torch.ones(2, 100)).sum().backward()
            with distributed.alone():
                optimizer.step()
        model, optimizer = distributed.prepare(model, optimizer, compress="powersgd:2,after=0")
        if is_resumed:
            assert distributed.load(save_to) is not None
        else:
            optimizer.zero_grad()
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()
            distributed.save(save_to)
        weights.append([value.detach().clone() for value in model.parameters()])
        distributed.stop()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
