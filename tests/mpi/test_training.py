"""Many steps under a plan end where the serial run ends."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component
from hvdtrain.parallel import schedule
from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan, replicated
from hvdtrain.parallel.program import program
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.training.plancheck import my_step, random_batch
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
STEP_SIZES = [13, 13, 13, 13, 13, 2, 13, 13, 13, 1]  # uneven tails in between
ALONE = World("none", 0, 1, 0, 1, 1)
FOUR_PLANS = ("mp", "hp:2x2, zb-h1", "1+3", "all, two, one")


def train(
    config: TrainConfig,
    plan: Plan,
    components: list[Component],
    here: World,
    steps: int,
    sizes: Sequence[int] | None = None,
) -> dict[str, np.ndarray]:
    runtime = runtime_of(config, plan, components, IMAGE_SIZE, here)
    sizes = sizes or STEP_SIZES
    for seed in range(steps):
        run_step(runtime, plan, here, IMAGE_SIZE, sizes[seed % len(sizes)], seed)
    assert runtime.activity is not None
    runtime.activity.close()
    return whole_state(plan, runtime, here)


def train_alone(
    config: TrainConfig,
    components: list[Component],
    here: World,
    steps: int,
    sizes: Sequence[int] | None = None,
    microbatches: int = 1,
) -> dict[str, np.ndarray]:
    """Where the serial run ends, which the first rank trains."""
    plan = replicated(names(components), 1, microbatches, None)
    return on_first(here, lambda: train(config, plan, components, ALONE, steps, sizes))


def assert_close(found: dict[str, Any], reference: dict[str, Any], bound: float) -> None:
    assert found.keys() == reference.keys()
    for name, value in reference.items():
        largest = max(float(np.abs(value).max()), 1e-6)
        assert np.abs(found[name] - value).max() / largest <= bound, name


@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.proof)])
def test_many_steps_of_a_transformer_end_in_the_weights_of_the_serial_run(
    here: World, steps: int
) -> None:
    components = components_of("vit", IMAGE_SIZE)
    config = TrainConfig(
        model="vit", data="", precision="fp64", optimizer="sgd", lr=0.05, clip_norm=1.0
    )
    expected = train_alone(config, components, here, steps, microbatches=4)
    chosen = FOUR_PLANS if here.size == 4 else list(PLANS[here.size])[:2]
    for plan in chosen:
        made = PLANS[here.size][plan](names(components))
        assert_close(train(config, made, components, here, steps), expected, 1e-10)


def test_clipping_scales_the_gradients_of_the_whole_model(here: World) -> None:
    # Without clipping these steps end elsewhere: the bound is felt.
    components = components_of("cnn", IMAGE_SIZE)
    config = TrainConfig(model="cnn", data="", precision="fp64", optimizer="sgd", clip_norm=0.1)
    plan = list(PLANS[here.size].values())[-1](names(components))
    expected = train_alone(config, components, here, 3)
    clipped = train(config, plan, components, here, 3)
    assert_close(clipped, expected, 1e-10)
    free = train(replace(config, clip_norm=None), plan, components, here, 3)
    with pytest.raises(AssertionError):
        assert_close(free, expected, 1e-6)


@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_replicas_with_batch_norm_stay_equal_to_the_bit(
    here: World, monkeypatch: pytest.MonkeyPatch, batch_norm: str
) -> None:
    # Weights of a serial run cannot be followed far here: batch norm over few values multiplies
    # rounding errors a hundredfold a step. whole_state compares the replicas.
    components = components_of("resnet", IMAGE_SIZE)
    config = TrainConfig(model="resnet", data="", batch_norm=batch_norm)  # type: ignore[arg-type]
    monkeypatch.setattr("tests.mpi.test_training.STEP_SIZES", [26, 26, 25])
    for plan in list(PLANS[here.size])[:1] + list(PLANS[here.size])[-1:]:
        made = PLANS[here.size][plan](names(components))
        made = replace(made, microbatches=2, schedule="1f1b")
        train(config, made, components, here, 3)


class Odd(nn.Module):
    """What users' models have: a frozen layer, one that is never used, buffers of any kind."""

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


def test_frozen_and_unused_layers_and_odd_buffers_train_as_on_one_rank(here: World) -> None:
    # Stages without a parameter stand before and behind.
    empty = [Component(f"empty{i}", nn.Identity) for i in range(7)]
    components = [*empty[:4], Component("odd", Odd), *empty[4:]]
    config = TrainConfig(
        model="odd", data="", precision="fp64", optimizer="adamw", weight_decay=0.1
    )
    expected = train_alone(config, components, here, len(STEP_SIZES))
    for plan in PLANS[here.size].values():
        made = plan(names(components))
        found = train(config, made, components, here, len(STEP_SIZES))
        assert found["odd.mask"].tobytes() == expected["odd.mask"].tobytes()
        assert found["odd.large"] == 2**40 + 1
        finite = expected.keys() - {"odd.mask"}
        assert_close({k: found[k] for k in finite}, {k: expected[k] for k in finite}, 1e-9)


def evaluated(plan: Plan, runtime: Runtime, here: World, batch_size: int) -> tuple[float, int]:
    """Loss and correct answers over three batches, all ranks together."""
    pieces = cut(plan, batch_size)
    actions = schedule.evaluation(plan, pieces)[here.rank]
    ready = program(plan, pieces, actions, here.rank)
    loss, correct = 0.0, 0
    for seed in range(3):
        step = my_step(
            plan, pieces, here.rank, *random_batch(batch_size, IMAGE_SIZE, CLASSES, seed)
        )
        runtime.evaluate(ready, step)
        if step.loss_sum is not None and step.correct is not None:
            loss, correct = loss + float(step.loss_sum), correct + int(step.correct)
    if runtime.exchange is not None:
        assert not runtime.exchange._sending, "evaluation keeps what it has sent"
    found = here.gather((loss, correct))
    return sum(loss for loss, _ in found), sum(correct for _, correct in found)


@pytest.mark.parametrize("model", ["cnn", "passes on"])
def test_evaluation_counts_the_same_under_every_plan(here: World, model: str) -> None:
    # A stage that only passes on what it gets hands out the buffer in which that arrived.
    empty = [Component(f"empty{i}", nn.Identity) for i in range(7)]
    components = [*empty[:1], Component("odd", Odd), *empty[1:]]
    if model == "cnn":
        components = components_of(model, IMAGE_SIZE)
    config = TrainConfig(model=model, data="", precision="fp64")
    single = replicated(names(components), 1, 4, None)

    def alone() -> tuple[float, int]:
        serial = runtime_of(config, single, components, IMAGE_SIZE, ALONE)
        return evaluated(single, serial, ALONE, 40)

    loss, correct = on_first(here, alone)
    for plan in PLANS[here.size].values():
        made = replace(plan(names(components)), microbatches=8, schedule="1f1b")
        runtime = runtime_of(config, made, components, IMAGE_SIZE, here)
        found = evaluated(made, runtime, here, 40)
        assert found[0] == pytest.approx(loss, rel=1e-12)
        assert found[1] == correct
