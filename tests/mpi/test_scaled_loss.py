"""The scaled loss of fp16, and steps that all ranks skip as a gradient overflows on one."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hvdtrain.check.plan import check_plan, local_batch, random_batch
from hvdtrain.config import TrainConfig
from hvdtrain.parallel import runtime as steps
from hvdtrain.parallel.runtime import Step
from hvdtrain.plan import schedule
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.schedule import program
from hvdtrain.world import World
from tests.mpi.common import CLASSES, components_of, names, runtime_of, whole_state
from tests.mpi.plans import PLANS

SIZE, BATCH = 8, 13
SCALE = 16.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `plan` by all plans of this world size."""
    from mpi4py import MPI

    if "plan" in metafunc.fixturenames:
        metafunc.parametrize("plan", list(PLANS[MPI.COMM_WORLD.size]))


def config_of(model: str) -> TrainConfig:
    return TrainConfig(model=model, data="", batch_size=BATCH, precision="fp16", seed=3, lr=0.1)


@pytest.mark.proves(
    "In fp16 the gradients equal those of the serial step with the same scale of the "
    "loss. If a gradient overflows on one rank, no rank updates its weights. The scale "
    "follows PyTorch's rule, and a resumed run has the same scale."
)
def test_gradients_are_those_of_the_serial_step_with_the_same_scale(
    world: World, plan: str
) -> None:
    components = components_of("cnn", SIZE)
    made = PLANS[world.size][plan](names(components))
    parity = check_plan(config_of("cnn"), components, made, SIZE, CLASSES, world, (BATCH, 9))
    assert parity.is_within, parity.fault


def test_the_check_notices_gradients_that_keep_their_scale(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    components = components_of("cnn", SIZE)
    made = next(iter(PLANS[world.size].values()))(names(components))
    monkeypatch.setattr(steps.torch, "_foreach_mul_", lambda *_: None)
    parity = check_plan(config_of("cnn"), components, made, SIZE, CLASSES, world, (BATCH,))
    assert max(parity.parameters.values()) > 10


def train(
    world: World, plan: Plan, scales: list[float], spoil: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[dict[str, np.ndarray], list[bool]]:
    """Train with these scales of the loss; `spoil` one gradient of the last rank in step 0."""
    components = components_of("resnet", SIZE)
    runtime = runtime_of(config_of("resnet"), plan, components, SIZE, world)
    pieces, is_bad = cut(plan, BATCH), []
    todo = program(plan, pieces, schedule.training_step(plan, pieces)[world.rank], world.rank)
    for number, scale in enumerate(scales):
        hooks = []
        if number == 0 and world.rank == world.size - 1:
            part = next(iter(runtime.parts.values()))
            hooks = [part.parameters[0].register_hook(spoil)]
        batch = random_batch(BATCH, SIZE, CLASSES, seed=0)
        step = Step(todo, *local_batch(plan, pieces, world.rank, *batch), loss_scale=scale)
        is_bad.append(runtime.train(step).is_bad)
        for hook in hooks:
            hook.remove()
    runtime.observer.close()
    return whole_state(plan, runtime, world), is_bad


def test_after_an_overflow_on_one_rank_no_rank_updates_its_weights(
    world: World, plan: str
) -> None:
    made = PLANS[world.size][plan](names(components_of("resnet", SIZE)))
    skipped, is_bad = train(world, made, [SCALE, SCALE], lambda gradient: gradient * math.inf)
    # The last rank may hold no samples; then nothing of it could overflow.
    overflowed = any(world.gather(is_bad[0]))
    expected, was_bad = train(world, made, [SCALE], torch.clone)
    assert not any(was_bad)
    assert is_bad == [overflowed, False]
    if overflowed:
        for name, value in expected.items():
            assert np.array_equal(value, skipped[name]), name
