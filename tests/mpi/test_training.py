"""Many steps under a plan end where the serial run ends."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain import data
from hvdtrain.check.plan import local_batch, random_batch
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.index import read_index
from hvdtrain.engine.feed import normalisation
from hvdtrain.models.component import Component
from hvdtrain.parallel.runtime import Runtime, Step
from hvdtrain.plan import schedule
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.plan.schedule import program
from hvdtrain.world import World
from tests.mpi.common import (
    CLASSES,
    components_of,
    names,
    on_first,
    run_step,
    runtime_of,
    whole_state,
)
from tests.mpi.plans import PLANS

IMAGE_SIZE = 8
STEP_SIZES = [13, 13, 13, 13, 13, 2, 13, 13, 13, 1]  # with two small last batches of epochs
ALONE = World("none", 0, 1, 0, 1, 1)
FOUR_PLANS = ("mp", "hp:2x2, zb-h1", "1+3", "all, two, one")


def train(
    config: TrainConfig,
    plan: Plan,
    components: list[Component],
    world: World,
    steps: int,
    sizes: Sequence[int] | None = None,
) -> dict[str, np.ndarray]:
    runtime = runtime_of(config, plan, components, IMAGE_SIZE, world)
    sizes = sizes or STEP_SIZES
    for seed in range(steps):
        run_step(runtime, plan, world, IMAGE_SIZE, sizes[seed % len(sizes)], seed)
    runtime.observer.close()
    return whole_state(plan, runtime, world)


def train_alone(
    config: TrainConfig,
    components: list[Component],
    world: World,
    steps: int,
    sizes: Sequence[int] | None = None,
    microbatches: int = 1,
) -> dict[str, np.ndarray]:
    """Return the final state of the serial run, which rank 0 trains."""
    plan = replicated(names(components), 1, microbatches, None)
    return on_first(world, lambda: train(config, plan, components, ALONE, steps, sizes))


def test_the_ranks_measure_the_images_trained_on_together(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = world.broadcast(tmp_path_factory.mktemp("data") / "set")
    on_first(world, lambda: data.synth(folder, 50, 5, size=8, seed=1))
    index = read_index(folder)
    for rows in (order.holdout(50, 0.3, index.hash, 0)[0], np.array([7])):
        together = normalisation("meanstd", index, rows, world)
        assert together == normalisation("meanstd", index, rows, ALONE)
        assert together != normalisation("split", index, rows, world)


def assert_close(actual: dict[str, Any], reference: dict[str, Any], bound: float) -> None:
    assert actual.keys() == reference.keys()
    for name, value in reference.items():
        largest = max(float(np.abs(value).max()), 1e-6)
        assert np.abs(actual[name] - value).max() / largest <= bound, name


@pytest.mark.proves("A run under any plan ends where the serial run ends.")
@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.proof)])
def test_many_steps_of_a_transformer_end_in_the_weights_of_the_serial_run(
    world: World, steps: int
) -> None:
    components = components_of("vit", IMAGE_SIZE)
    config = TrainConfig(
        model="vit", data="", precision="fp64", optimizer="sgd", lr=0.05, clip_norm=1.0
    )
    expected = train_alone(config, components, world, steps, microbatches=4)
    chosen = FOUR_PLANS if world.size == 4 else list(PLANS[world.size])[:2]
    for plan in chosen:
        made = PLANS[world.size][plan](names(components))
        assert_close(train(config, made, components, world, steps), expected, 1e-10)


def test_clipping_scales_the_gradients_of_the_whole_model(world: World) -> None:
    # Without clipping these steps end in other weights: the bound has an effect.
    components = components_of("cnn", IMAGE_SIZE)
    config = TrainConfig(model="cnn", data="", precision="fp64", optimizer="sgd", clip_norm=0.1)
    plan = list(PLANS[world.size].values())[-1](names(components))
    expected = train_alone(config, components, world, 3)
    clipped = train(config, plan, components, world, 3)
    assert_close(clipped, expected, 1e-10)
    free = train(replace(config, clip_norm=None), plan, components, world, 3)
    with pytest.raises(AssertionError):
        assert_close(free, expected, 1e-6)


@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_replicas_with_batch_norm_stay_equal_to_the_bit(
    world: World, monkeypatch: pytest.MonkeyPatch, batch_norm: str
) -> None:
    # The weights are not compared to a serial run: batch norm over few values multiplies rounding
    # errors by 100 per step. whole_state compares the replicas.
    components = components_of("resnet", IMAGE_SIZE)
    config = TrainConfig(model="resnet", data="", batch_norm=batch_norm)  # type: ignore[arg-type]
    monkeypatch.setattr("tests.mpi.test_training.STEP_SIZES", [26, 26, 25])
    for plan in list(PLANS[world.size])[:1] + list(PLANS[world.size])[-1:]:
        made = PLANS[world.size][plan](names(components))
        made = replace(made, microbatches=2, schedule="1f1b")
        train(config, made, components, world, 3)


class Odd(nn.Module):
    """A module with a frozen layer, an unused layer and unusual buffers."""

    mask: torch.Tensor
    large: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 8 * 8, CLASSES)
        self.frozen = nn.Linear(3 * 8 * 8, CLASSES).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("large", torch.tensor(2**40 + 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flat = images.flatten(1)
        logits: torch.Tensor = self.linear(flat) + self.frozen(flat)
        return logits


def test_frozen_and_unused_layers_and_odd_buffers_train_as_on_one_rank(world: World) -> None:
    # The first and last stages have no parameters.
    empty = [Component(f"empty{i}", nn.Identity) for i in range(7)]
    components = [*empty[:4], Component("odd", Odd), *empty[4:]]
    config = TrainConfig(
        model="odd", data="", precision="fp64", optimizer="adamw", weight_decay=0.1
    )
    expected = train_alone(config, components, world, len(STEP_SIZES))
    for plan in PLANS[world.size].values():
        made = plan(names(components))
        actual = train(config, made, components, world, len(STEP_SIZES))
        assert actual["odd.mask"].tobytes() == expected["odd.mask"].tobytes()
        assert actual["odd.large"] == 2**40 + 1
        finite = expected.keys() - {"odd.mask"}
        assert_close({k: actual[k] for k in finite}, {k: expected[k] for k in finite}, 1e-9)


def evaluated(plan: Plan, runtime: Runtime, world: World, batch_size: int) -> tuple[float, int]:
    """Return loss and correct answers over three batches, summed over all ranks."""
    pieces = cut(plan, batch_size)
    actions = schedule.evaluation(plan, pieces)[world.rank]
    ready = program(plan, pieces, actions, world.rank)
    loss, correct = 0.0, 0
    for seed in range(3):
        batch = random_batch(batch_size, IMAGE_SIZE, CLASSES, seed)
        step = Step(ready, *local_batch(plan, pieces, world.rank, *batch))
        runtime.evaluate(step)
        if step.loss_sum is not None:
            loss += float(step.loss_sum)
            correct += int(step.measured["accuracy"])
    if runtime.exchange is not None:
        assert not runtime.exchange._sending, "evaluation keeps what it has sent"
    by_rank = world.gather((loss, correct))
    return sum(loss for loss, _ in by_rank), sum(correct for _, correct in by_rank)


@pytest.mark.parametrize("model", ["cnn", "passes on"])
def test_evaluation_counts_the_same_under_every_plan(world: World, model: str) -> None:
    # A stage that returns its input sends the buffer into which the input was received.
    empty = [Component(f"empty{i}", nn.Identity) for i in range(7)]
    components = [*empty[:1], Component("odd", Odd), *empty[1:]]
    if model == "cnn":
        components = components_of(model, IMAGE_SIZE)
    config = TrainConfig(model=model, data="", precision="fp64")
    single = replicated(names(components), 1, 4, None)

    def alone() -> tuple[float, int]:
        serial = runtime_of(config, single, components, IMAGE_SIZE, ALONE)
        return evaluated(single, serial, ALONE, 40)

    loss, correct = on_first(world, alone)
    for plan in PLANS[world.size].values():
        made = replace(plan(names(components)), microbatches=8, schedule="1f1b")
        runtime = runtime_of(config, made, components, IMAGE_SIZE, world)
        actual = evaluated(made, runtime, world, 40)
        assert actual[0] == pytest.approx(loss, rel=1e-12)
        assert actual[1] == correct
