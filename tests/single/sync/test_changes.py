"""Changes of weights that a single replica adds, or that have several dtypes."""

import torch
from torch import Tensor, nn

from hvdtrain.options.syncrequest import TopK
from hvdtrain.sync.average import Averager
from hvdtrain.sync.changes import LeftOver, compressed
from hvdtrain.sync.collectives import Alone
from hvdtrain.sync.local import Trained


class Twin(Alone):
    """The operations of one of two replicas that send the same."""

    size = 2

    def all_reduce(self, tensor: Tensor, name: str) -> Tensor:
        return tensor.mul_(2)

    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        return torch.stack([tensor, tensor])


def test_a_single_replica_adds_once_what_several_have_not_sent() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    meetings = LeftOver({"layer.weight": weight}, -1.0)
    left = {f"changes/residual/{place}/layer.weight": torch.full((2, 3), 0.5) for place in (0, 1)}
    steps = {"changes/compressed-steps/other.weight": torch.tensor(7)}
    others = {"residual/0/layer.weight": torch.ones(2, 3), "changes/samples/layer.weight": steps}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((*left, *steps, *others), ())
    assert meetings.wanted(shapes) == left.keys() | steps.keys()
    meetings.load(left | steps)
    saved = meetings.saved()
    assert saved["changes/residual/0/layer.weight"].tolist() == [[1.0] * 3] * 2
    assert int(saved["changes/compressed-steps/layer.weight"]) == 7
    for step in (1, 2):
        meetings.before_step(0)
        meetings.after_step(step)
    assert weight.tolist() == [[0.0] * 3] * 2
    saved = meetings.saved()
    assert [int(value) for value in saved.values()] == [9]


def test_parameters_of_several_dtypes_keep_their_order() -> None:
    """Each replica has half of the samples, and sends half of the values of each dtype."""
    sizes = {"a": torch.float32, "b": torch.float64, "c": torch.float32}
    named = {name: nn.Parameter(torch.zeros(1, 2, dtype=d)) for name, d in sizes.items()}
    trained, replica = Trained(3, 6), Averager(Twin())
    changes = compressed(TopK(0.5), 0, trained)("x", named, replica)
    trained.samples, trained.total = 6, 12
    changes.count_step()
    moved = [
        torch.tensor([[v, 2 * v]], dtype=p.dtype)
        for v, p in zip((1, 4, 3), named.values(), strict=True)
    ]
    other = torch.tensor([5.0])
    agreed = changes.finish(changes.start(moved, [other], 3))
    assert [value.tolist() for value in agreed.averages] == [
        *([[0.0, 0.0]], [[0.0, 8.0]], [[3.0, 6.0]]),
        [5.0],
    ]
    assert [value.dtype for value in agreed.averages[:3]] == list(sizes.values())
