"""The state of modules beside their tensors moves with them, and is in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import torch as distributed
from hvdtrain.backends.pytorch.session import under_plan
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.models import weights
from hvdtrain.models.component import Component
from hvdtrain.training.summary import weights_sha256
from hvdtrain.world import World
from tests.mpi.common import names, run_step, runtime_of
from tests.mpi.plans import PLANS
from tests.mpi.test_relayout import ADAM

SIZE = 4


class Counting(nn.Module):
    """Counts its forwards in training outside of buffers; each is weaker than the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count, self.mean = nn.Linear(12, 12), 0, torch.zeros(())

    def get_extra_state(self) -> Any:
        return {"count": self.count, "mean": self.mean}

    def set_extra_state(self, state: Any) -> None:
        self.count, self.mean = state["count"], state["mean"]

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + self.count
        return torch.tanh(self.layer(values)) / (1 + 0.1 * self.count)


def first() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 12, 4), nn.Flatten())


COMPONENTS = [
    Component("first", first),
    *(Component(name, Counting) for name in ("one", "two", "three")),
    Component("head", lambda: nn.Linear(12, 7)),
]


def counts(runtime: Any, world: World) -> dict[str, int]:
    """Return the counts of all components, on all ranks; replicas hold the same."""
    held = [
        {
            name: part.count
            for name, part in stage.model.components.items()
            if hasattr(part, "count")
        }
        for stage in runtime.parts.values()
    ]
    everywhere = [pair for theirs in world.gather(held) for one in theirs for pair in one.items()]
    assert len(set(everywhere)) == 3, everywhere
    return dict(everywhere)


@pytest.mark.proves(
    "What modules return by `get_extra_state` is saved, moves with plans and is restored."
)
@pytest.mark.parametrize("forgets", [False, True])
def test_it_moves_between_plans(
    world: World, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    if forgets:  # the control
        monkeypatch.setattr(weights, "load", lambda *_: None)
    plans = [make(names(COMPONENTS)) for make in PLANS[world.size].values()]
    # A replica without samples does not count: it then differs, and is refused as below.
    plans = [plan for plan in plans if all(min(stage.shares) for stage in plan.stages)]
    plans = plans[:2] if forgets else plans
    runtime, before = runtime_of(ADAM, plans[0], COMPONENTS, SIZE, world), plans[0]
    for seed, after in enumerate([*plans[1:], plans[0]]):
        run_step(runtime, before, world, SIZE, 26, seed)
        expected = counts(runtime, world)
        assert min(expected.values()) > (0 if forgets else seed)
        runtime = under_plan(runtime, ADAM, before, after, COMPONENTS, SIZE, world)
        assert (counts(runtime, world) == expected) is not forgets
        before = after
    runtime.observer.close()


@pytest.mark.several_ranks
def test_replicas_that_differ_in_it_are_refused(world: World) -> None:
    plan = PLANS[world.size]["dp"](names(COMPONENTS))
    runtime = runtime_of(ADAM, plan, COMPONENTS, SIZE, world)
    model: Any = runtime.parts[0].model
    weights_sha256(world.gather(model.digests()))
    assert len(set(world.gather(model.fingerprint()))) == 1
    model.components["two"].count += world.rank
    with pytest.raises(CheckFailed, match=r"hold different values of two\._extra_state"):
        weights_sha256(world.gather(model.digests()))
    assert len(set(world.gather(model.fingerprint()))) == world.size
    runtime.observer.close()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 12)).square().sum().backward()
    optimizer.step()


def test_a_loop_resumes_with_it(world: World, tmp_path: Path) -> None:
    """Six steps at once, or three, a checkpoint and three more; rank 0 has read a state first."""
    save_to: Path = world.broadcast(tmp_path)
    ends = []
    for lives in ([6], [3, 3]):
        for life, steps in enumerate(lives):
            distributed.start(device="cpu")
            torch.manual_seed(0)
            counting = Counting()
            counting.count = 5 if world.rank == 0 else 0
            model: Any = nn.Sequential(counting)
            model, optimizer = distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            assert counting.count == 5
            if life == 1:
                assert distributed.load(save_to) is not None
            for _ in range(steps):
                step(model, optimizer)
            if len(lives) == 2 and life == 0:
                distributed.save(save_to)
                counting.count += world.rank
                if world.size > 1:
                    with pytest.raises(UsageError, match=r"^0\._extra_state, which .* rank 1 and"):
                        distributed.save(save_to)
            distributed.stop()
        ends.append((counting.count, counting.layer.weight.detach().clone()))
    assert ends[0][0] == ends[1][0] == 11
    assert torch.equal(ends[0][1], ends[1][1])
