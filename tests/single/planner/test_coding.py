"""The seconds of compression are those of the code of training, without what travels."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.planner.agreement import FREE
from hvdtrain.planner.coding import Imagined, coding_of

METHODS = ("fp16", "bf16", "topk:0.01", "powersgd:2")
PAUSE = 0.1


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute as a rank does; more threads would wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameters(side: int) -> dict[str, nn.Parameter]:
    return {"weight": nn.Parameter(torch.zeros(side, side)), "bias": nn.Parameter(torch.zeros(7))}


@pytest.mark.parametrize("method", METHODS)
def test_each_method_takes_its_time(method: str) -> None:
    measured = coding_of(parameters(64), method, Imagined(3))
    assert measured.encode > 0
    assert measured.decode > 0


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_left_behind(method: str, replicas: int) -> None:
    named, state = parameters(20), torch.get_rng_state()
    coding_of(named, method, Imagined(replicas))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(value.grad is None and not value.any() for value in named.values())


class Slow(Imagined):
    """Gathers slowly, and counts that, unless it is dishonest."""

    def __init__(self, size: int, counts: bool) -> None:
        super().__init__(size)
        self.counts = counts

    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        rows = super().all_gather(tensor, name)
        time.sleep(PAUSE)
        self.seconds += PAUSE if self.counts else 0.0
        return rows


def test_what_an_operation_takes_does_not_count() -> None:
    """The control: seconds of an operation that were not subtracted would be seen."""
    counted, uncounted = (
        coding_of(parameters(64), "bf16", Slow(2, counts)) for counts in (True, False)
    )
    assert counted.decode < PAUSE / 2 < PAUSE <= uncounted.decode


def test_nothing_to_compress_is_free() -> None:
    assert coding_of({}, "bf16", Imagined(2)) == FREE
    assert coding_of(parameters(8), "bf16", Imagined(1)) == FREE
