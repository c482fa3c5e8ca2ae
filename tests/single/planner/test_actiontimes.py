"""Profiles of the ranks of small plans, each rank alone in this process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.backends.pytorch.parts import build_parts
from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component
from hvdtrain.parallel.batchnorm import SynchronisedBatchNorm, synchronise
from hvdtrain.parallel.boundary import Boundaries, Form
from hvdtrain.parallel.runtime import Observer, Runtime, Settings
from hvdtrain.parallel.stage import AUTOCAST, Images, Part
from hvdtrain.plan import schedule
from hvdtrain.plan.actions import COMPUTE
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.plan.simulate import simulate
from hvdtrain.planner.actiontimes import Table, measured_costs, profile_parts
from hvdtrain.world import World

SIZE, CLASSES, BATCH = 16, 5, 22  # 22 samples in 4 micro-batches: 5 and 6
HIDDEN = (32, SIZE, SIZE)


def components() -> list[Component]:
    """Return components with batch norm and dropout: everything that a step could change."""

    def block(channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1)
        )

    def head() -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))

    return [
        Component("first", lambda: block(3)),
        Component("second", lambda: block(32)),
        Component("third", lambda: block(32)),
        Component("head", head),
    ]


def two_stages(ranks: tuple[int, int], kind: str) -> Plan:
    held = [("first", "second"), ("third", "head")]
    stages = [Stage(names, (rank,), (1,)) for names, rank in zip(held, ranks, strict=True)]
    return Plan(tuple(stages), 4, kind)


def runtime_of(plan: Plan, rank: int, **options: Any) -> Runtime:
    """Return the runtime of one rank without the others; it cannot exchange anything."""
    config = TrainConfig(data="", model="", batch_size=BATCH, optimizer="sgd", **options)
    world = World("none", rank, len(plan.ranks), 0, 1, 1)
    device = torch.device("cpu")
    parts = build_parts(config, plan, components(), world, None, device)
    images = Images([0.5] * 3, [0.25] * 3, device, config.precision)
    settings = Settings(images, AUTOCAST.get(config.precision))
    boundaries = Boundaries(rank, [Form(HIDDEN, torch.float32, True)] * plan.last, None, device)
    return Runtime(settings, parts, boundaries, Observer())


def state_of(parts: Mapping[int, Part]) -> list[torch.Tensor]:
    """Return all tensors that a run would save, and the state of the random numbers."""
    held = [t for part in parts.values() for t in part.model.tensors().values()]
    for part in parts.values():
        assert part.optimizer is not None
        for entries in part.optimizer.state.values():
            held += [value for value in entries.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in held] + [torch.get_rng_state()]


def profiled(plan: Plan, rank: int, **options: Any) -> Table:
    runtime = runtime_of(plan, rank, **options)
    return profile_parts(runtime, plan, cut(plan, BATCH), SIZE)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_action_of_a_rank_has_a_cost(kind: str, rank: int) -> None:
    plan = two_stages((0, 1), kind)
    pieces = cut(plan, BATCH)
    table = profiled(plan, rank)
    wanted = {
        (a.stage, a.kind, 0 if a.microbatch is None else pieces.rows(a.stage, rank, a.microbatch))
        for a in schedule.training_step(plan, pieces)[rank]
        if a.kind in (*COMPUTE, "LOAD", "STEP")
    }
    assert table.keys() == wanted
    assert all(seconds > 0 for seconds in table.values())
    assert {rows for _, kind, rows in table if kind == "F"} == {5, 6}


def test_a_profile_leaves_no_trace_before_the_first_step_and_after_others() -> None:
    plan = two_stages((0, 0), "1f1b")
    runtime = runtime_of(plan, 0)
    for _ in range(2):
        before = state_of(runtime.parts)
        profile_parts(runtime, plan, cut(plan, BATCH), SIZE)
        after = state_of(runtime.parts)
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        for part in runtime.parts.values():
            assert all(parameter.grad is None for parameter in part.parameters)
            assert part.optimizer is not None
            for parameter in part.parameters:  # as a step does, so that there is a momentum
                parameter.grad = torch.ones_like(parameter)
            part.optimizer.step()
            part.gradients.zero()


def test_a_profile_that_fails_leaves_no_trace_either() -> None:
    plan = two_stages((0, 0), "1f1b")
    runtime = runtime_of(plan, 0)
    before = state_of(runtime.parts)
    hooked = runtime.parts[1].model.components["head"]
    calls = iter([None, None])
    hooked.register_forward_hook(lambda *_: next(calls))
    with pytest.raises(StopIteration):
        profile_parts(runtime, plan, cut(plan, BATCH), SIZE)
    after = state_of(runtime.parts)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(value.grad is None for part in runtime.parts.values() for value in part.parameters)


def test_synchronised_batch_norms_ask_nobody() -> None:
    plan = Plan((Stage(("first", "second", "third", "head"), (0,), (1,)),), 2)
    runtime = runtime_of(plan, 0)
    part = runtime.parts[0]

    def nobody_is_there(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a profile must not communicate")

    assert (
        sum(
            synchronise(component, nobody_is_there) for component in part.model.components.values()
        )
        == 3
    )
    part.synchronised = True
    table = profile_parts(runtime, plan, cut(plan, BATCH), SIZE)
    assert table[0, "F", 11] > 0
    layers = [m for c in part.model.components.values() for m in c.modules()]
    gathers = [m.all_gather for m in layers if isinstance(m, SynchronisedBatchNorm)]
    assert gathers == [nobody_is_there] * 3


def test_a_simulated_step_adds_up_what_was_measured() -> None:
    plan = two_stages((0, 1), "gpipe")
    pieces = cut(plan, BATCH)
    tables = {rank: profiled(plan, rank) for rank in (0, 1)}
    forms = [Form(HIDDEN, torch.float32, True)]
    costs = measured_costs(plan, pieces, forms, tables, latency=1.0, seconds_per_byte=1e-6)
    steps = schedule.training_step(plan, pieces)
    send = next(action for action in steps[0] if action.kind == "SEND_F")
    assert send.microbatch is not None
    sent = pieces.rows(0, 0, send.microbatch) * forms[0].row_bytes
    assert costs.hand_over(0, 1, send) == pytest.approx(1 + sent * 1e-6)
    back = next(action for action in steps[1] if action.kind == "SEND_B")
    assert costs.hand_over(1, 0, back) > 1
    busy = sum(costs.compute(0, a) for a in steps[0] if a.kind in (*COMPUTE, "LOAD", "STEP"))
    # Two transfers, one in each direction, of more than a second each.
    assert simulate(steps, plan, pieces, costs).seconds > busy + 2
    assert costs.reduce(0) == 0
