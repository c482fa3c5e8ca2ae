"""A chain of components is timed in the queue of its device, without waiting between them."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvdtrain.planner import chain as chains
from hvdtrain.planner.chain import Chain, Link
from tests.late import LateEvent, late_device

CPU = torch.device("cpu")
ROWS, WIDTH = 8, 16


def chain_of_two() -> Chain:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]

    def source(rows: int) -> Tensor:
        images = torch.ones(rows, WIDTH)
        return images.to(CPU)

    return Chain(
        links=[
            Link(layer, list(layer.parameters()), torch.optim.SGD(layer.parameters(), 0.1))
            for layer in layers
        ],
        source=source,
        device=CPU,
        is_first=True,
        is_last=True,
        loss=lambda outputs: functional.cross_entropy(
            outputs, torch.zeros(len(outputs), dtype=torch.int64), reduction="sum"
        ),
        dtype=None,
    )


def disturb(seconds: float) -> Callable[[], None]:
    return lambda: None


@pytest.fixture(params=["cpu", "late"])
def queue(request: pytest.FixtureRequest) -> Iterator[object]:
    with late_device() if request.param == "late" else nullcontext() as stream:
        yield stream


def test_the_parts_of_a_whole_step_are_within_its_wall_time(queue: object) -> None:
    start = time.perf_counter()
    seconds = chain_of_two().whole(ROWS)
    wall = time.perf_counter() - start
    assert seconds.forward.shape == seconds.backward.shape == seconds.update.shape
    assert seconds.forward.shape[1] == 2
    parts = np.concatenate(list(seconds), axis=1)
    assert (parts >= 0).all()
    assert 0 < parts.sum() <= wall


def test_halves_and_backwards_beside_sums_are_timed_too(queue: object) -> None:
    chain = chain_of_two()
    halves = chain.in_halves(ROWS)
    assert np.isnan(halves.inputs[:, 0]).all()  # images need no gradient
    assert (halves.inputs[:, 1] >= 0).all()
    assert (halves.weights[:, 1] >= 0).all()
    assert (chain.contended(ROWS, disturb, [0.0, 0.0]) >= 0).all()


@pytest.mark.parametrize("what", ["whole", "in_halves", "contended"])
def test_times_are_read_once_the_device_has_reached_them(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait at the end of a repeat, the late device complains."""
    arguments = (disturb, [0.0, 0.0]) if what == "contended" else ()
    with late_device():
        getattr(chain_of_two(), what)(ROWS, *arguments)
        monkeypatch.setattr(chains, "synchronize", lambda device: None)
        with pytest.raises(AssertionError, match="the device has not reached a mark"):
            getattr(chain_of_two(), what)(ROWS, *arguments)


def test_no_component_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between components would add the host's time of asking to each of them."""
    waits, synchronize = [], LateEvent.synchronize

    def counted(event: LateEvent) -> None:
        waits.append(event)
        synchronize(event)

    monkeypatch.setattr(chains, "repeated", lambda once, *_, **options: [once()])
    monkeypatch.setattr(LateEvent, "synchronize", counted)
    monkeypatch.setattr(Tensor, "__bool__", refuse)
    with late_device():
        chain_of_two().whole(ROWS)
        assert len(waits) == 1


def refuse(tensor: Tensor) -> bool:
    """Fail: to know a value, the host must wait for the device."""
    raise AssertionError("the host reads a value of the device")
