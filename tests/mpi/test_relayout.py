"""A run that changes its plan keeps its state, to the bit."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdtrain.backends.pytorch.session import Times, TorchFaults, TorchMigration, under_plan
from hvdtrain.backends.pytorch.state import TorchState, local_share
from hvdtrain.config import TrainConfig
from hvdtrain.models.component import tensor_shapes
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.world import World
from tests.mpi.common import components_of, names, on_first, run_step, runtime_of, whole_state
from tests.mpi.plans import PLANS
from tests.mpi.test_training import ALONE, IMAGE_SIZE, STEP_SIZES, assert_close

ADAM = TrainConfig(model="own", data="", precision="fp64", optimizer="adam", lr=0.01)


def whole_optimizer(plan: Plan, runtime: Runtime, world: World) -> dict[str, bytes]:
    """Return the optimizers' state as checkpoints hold it, on all ranks."""
    share = local_share(plan, runtime.parts, world.rank)
    held = {name: tensor.detach().numpy().tobytes() for name, tensor in share.items()}
    return {name: value for theirs in world.gather(held) for name, value in theirs.items()}


def bits(state: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in state.items()}


@pytest.mark.proves(
    "All state moves with a change of the plan, and losses stay those of the serial run."
)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_weights_statistics_and_optimizer_are_those_of_before(
    world: World, optimizer: str
) -> None:
    """Change through all plans, with a step before each change; SGD through three, in bf16."""
    components = components_of("resnet", IMAGE_SIZE)
    config, plans = ADAM, [make(names(components)) for make in PLANS[world.size].values()]
    if optimizer == "sgd":
        config, plans = replace(ADAM, optimizer="sgd", precision="bf16"), plans[:3]
    runtime, before = runtime_of(config, plans[0], components, IMAGE_SIZE, world), plans[0]
    seen = set()
    for seed, after in enumerate([*plans[1:], plans[0]]):
        run_step(runtime, before, world, IMAGE_SIZE, 26, seed)
        state = bits(whole_state(before, runtime, world))
        held = whole_optimizer(before, runtime, world)
        seen.add(tuple(state.values()))
        runtime = under_plan(runtime, config, before, after, components, IMAGE_SIZE, world)
        assert bits(whole_state(after, runtime, world)) == state
        assert whole_optimizer(after, runtime, world) == held
        assert any(name.endswith(("exp_avg", "momentum_buffer")) for name in held)
        before = after
    assert len(seen) == len(plans)  # each step had changed it
    runtime.observer.close()


@pytest.mark.several_ranks
def test_bytes_sent_before_a_change_are_still_counted(world: World) -> None:
    components = components_of("cnn", IMAGE_SIZE)
    before, after = (PLANS[world.size][name](names(components)) for name in ("dp", "mp"))
    runtime = runtime_of(ADAM, before, components, IMAGE_SIZE, world)
    state = TorchState(
        plan=before, shapes=tensor_shapes(components), runtime=runtime, config=ADAM, world=world
    )
    image: Any = SimpleNamespace(input_size=IMAGE_SIZE)
    migration = TorchMigration(
        question=None,
        building_seconds=0.0,
        state=state,
        times=Times(state),
        faults=TorchFaults(state),
        components=components,
        index=image,
        epoch_length=26,
    )
    run_step(state.runtime, before, world, IMAGE_SIZE, 26, 0)
    sent = state.counted()["sent_bytes"]
    assert sent > 0
    migration.change(after)
    assert state.counted()["sent_bytes"] == sent
    migration.change(before)
    run_step(state.runtime, before, world, IMAGE_SIZE, 26, 1)
    assert state.counted()["sent_bytes"] == 2 * sent
    state.runtime.observer.close()


@pytest.mark.parametrize("steps", [12, pytest.param(30, marks=pytest.mark.proof)])
def test_many_steps_through_all_plans_end_where_the_serial_run_does(
    world: World, steps: int
) -> None:
    """Compare in fp64; a change that forgets the state must not pass."""
    components = components_of("vit", IMAGE_SIZE)
    plans = [make(names(components)) for make in PLANS[world.size].values()]
    serial = replicated(names(components), 1, 1, None)
    expected = on_first(world, lambda: walk(ALONE, components, [serial], steps))
    assert_close(walk(world, components, plans, steps), expected, 1e-10)
    with pytest.raises(AssertionError):
        assert_close(walk(world, components, plans[:2], 4, forgets=True), expected, 1e-10)


def walk(
    world: World, components: Any, plans: list[Plan], steps: int, forgets: bool = False
) -> dict[str, np.ndarray]:
    """Return the state after steps that use the plans in turn."""
    plan = plans[0]
    runtime = runtime_of(ADAM, plan, components, IMAGE_SIZE, world)
    for seed in range(steps):
        run_step(runtime, plan, world, IMAGE_SIZE, STEP_SIZES[seed % len(STEP_SIZES)], seed)
        after = plans[(seed + 1) % len(plans)]
        if forgets:
            runtime.observer.close()
            runtime = runtime_of(ADAM, after, components, IMAGE_SIZE, world)
        elif len(plans) > 1:
            runtime = under_plan(runtime, ADAM, plan, after, components, IMAGE_SIZE, world)
        plan = after
    runtime.observer.close()
    return whole_state(plan, runtime, world)
