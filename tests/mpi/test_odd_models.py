"""Unusual parts of users' models train under every plan as on one rank, small batches included."""

# mypy: disable-error-code="no-any-return"

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hvdtrain.backends.pytorch.parts import check_compiler
from hvdtrain.check.parity import Parity
from hvdtrain.check.plan import check_plan
from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.world import World
from tests.mpi.common import CLASSES, names, run_step, runtime_of, whole_state
from tests.mpi.plans import PLANS
from tests.mpi.test_training import IMAGE_SIZE, STEP_SIZES, assert_close, train, train_alone

WIDTH = 6
CONFIG = TrainConfig(model="odd", data="", precision="fp64", optimizer="sgd", lr=0.1)


class Layers(nn.Module):
    """Two layers, and a function that uses them."""

    def __init__(self, compute: Callable[["Layers", Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.compute(self, x)) + 0.1


def frozen(layers: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = layers.a(x)
    return layers.b(x)


def partly_frozen(layers: Layers, x: Tensor) -> Tensor:
    return layers.a(x.detach()) + layers.b(x)


def one_after_the_other(layers: Layers, x: Tensor) -> Tensor:
    return layers.b(torch.tanh(layers.a(x)))


def tied_weights() -> nn.Module:
    """Return two layers with one weight and separate biases."""
    layers = Layers(one_after_the_other)
    layers.b.weight = layers.a.weight
    return layers


def unused(layers: Layers, x: Tensor) -> Tensor:
    return layers.a(x)


def scaled(layers: Layers, x: Tensor) -> Tensor:
    return (x * layers.scale + layers.a.bias) + layers.b.bias


def shared_by_reentrant_checkpoints(layers: Layers, x: Tensor) -> Tensor:
    x = checkpoint(layers.a, x, use_reentrant=True)
    return checkpoint(layers.a, torch.tanh(x), use_reentrant=True)


def checkpoints(layers: Layers, x: Tensor) -> Tensor:
    x = checkpoint(layers.a, x, use_reentrant=False)
    return checkpoint(layers.a, torch.tanh(x), use_reentrant=False)


class Dropping(Layers):
    """Drops values of samples and of their tokens, with and without checkpoints."""

    def __init__(self) -> None:
        super().__init__(dropping)
        self.drop, self.channels = nn.Dropout(0.3), nn.Dropout1d(0.4)


def dropping(layers: Layers, x: Tensor) -> Tensor:
    assert isinstance(layers, Dropping)
    x = layers.drop(checkpoint(lambda y: layers.drop(layers.a(y)), x, use_reentrant=False))
    tokens = layers.drop(x.unflatten(1, (2, 3)).flatten(0, 1)).reshape(len(x), WIDTH)
    return layers.channels(layers.b(tokens).unflatten(1, (3, 2))).flatten(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unflatten(1, (WIDTH // 2, 2)))[0][:, -1]


class Repeating(nn.Module):
    """Uses a weight several times, as a hand-written recurrence does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.tanh(self.layer(x))
        return x


class Twofold(nn.Module):
    """Computes different results in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if self.training else 1)


def in_evaluation_mode() -> nn.Module:
    """Return a module in evaluation mode; a run sets it to training mode in the first step."""
    return Twofold().eval()


def weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class Rare(nn.Module):
    """Has a weight of five dimensions, a sparse gradient, and no way through the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Conv3d(1, 1, (1, 1, 3), padding=(0, 0, 1))
        self.table = nn.Embedding(4, WIDTH, sparse=True)
        self.turn = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert x.abs().max().item() < 1e9
        turned = self.turn(x + self.table((4 * x).long().remainder(4)).mean(1))
        return torch.tanh(self.volume(turned.reshape(len(x), 1, 1, 2, 3)).flatten(1))


COMPUTED = [
    *(frozen, partly_frozen, unused, scaled),
    *(shared_by_reentrant_checkpoints, checkpoints),
]
KINDS: dict[str, Callable[[], nn.Module]] = {
    **{compute.__name__: lambda compute=compute: Layers(compute) for compute in COMPUTED},  # type: ignore[misc]
    **{
        make.__name__: make
        for make in (tied_weights, Recurrent, in_evaluation_mode, weight_norm, Dropping, Rare)
    },
}


def components_with(make: Callable[[], nn.Module]) -> list[Component]:
    """Return components such that the unusual one is first, last or alone in some stages."""
    stem = Component("stem", lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, WIDTH)))
    odd = [Component(f"odd{number}", make) for number in range(3)]
    return [stem, *odd, Component("head", lambda: nn.Linear(WIDTH, CLASSES))]


@pytest.mark.proves("Dropout drops the same values of each sample under every plan.")
@pytest.mark.parametrize("plans", ["few", pytest.param("all", marks=pytest.mark.proof)])
@pytest.mark.parametrize("kind", KINDS)
def test_they_end_in_the_weights_of_the_serial_run(world: World, kind: str, plans: str) -> None:
    components = components_with(KINDS[kind])
    expected = train_alone(CONFIG, components, world, len(STEP_SIZES))
    for name, plan in PLANS[world.size].items():
        if plans == "few" and "zb-h1" not in name and name != "dp":
            continue
        made = plan(names(components))
        actual = train(CONFIG, made, components, world, len(STEP_SIZES))
        assert_close(actual, expected, 1e-9)


def test_what_is_dropped_is_the_same_when_components_run_again(world: World) -> None:
    components = components_with(Dropping)
    expected = train_alone(CONFIG, components, world, 3)
    for name, plan in list(PLANS[world.size].items())[::4]:
        if "zb-h1" not in name:
            again = replace(CONFIG, recompute="odd*")
            assert_close(
                train(again, plan(names(components)), components, world, 3), expected, 1e-9
            )


@pytest.mark.several_ranks
def test_without_masks_by_sample_a_plan_changes_what_is_learnt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the dropout tests."""
    components = components_with(Dropping)
    expected = train_alone(CONFIG, components, world, 3)
    plan = replicated(names(components), world.size, 1, None)
    assert checked(components, plan, world).is_within
    monkeypatch.setattr("hvdtrain.backends.pytorch.build.follow_samples", lambda *_: None)
    assert checked(components, plan, world).largest > 1e-3
    with pytest.raises(AssertionError, match="weight"):
        assert_close(train(CONFIG, plan, components, world, 3), expected, 1e-3)


def checked(components: list[Component], plan: Plan, world: World) -> Parity:
    """Return the result of `plan check`."""
    config = replace(CONFIG, batch_size=13)
    return check_plan(config, components, plan, IMAGE_SIZE, CLASSES, world)


def test_plan_check_rounds_as_a_run_a_weight_that_is_used_several_times(world: World) -> None:
    """Under bf16 its gradients are summed in bf16, because it is cast once."""
    components, config = components_with(Repeating), replace(CONFIG, precision="bf16")
    for plan in list(PLANS[world.size].values())[::4]:
        parity = check_plan(
            replace(config, batch_size=13),
            components,
            plan(names(components)),
            IMAGE_SIZE,
            CLASSES,
            world,
        )
        assert parity.is_within, parity.fault


def test_plan_check_computes_what_is_rare(world: World) -> None:
    components = components_with(Rare)
    plan = next(iter(PLANS[world.size].values()))(names(components))
    parity = checked(components, plan, world)
    assert parity.is_within, parity.fault


def test_plan_check_drops_what_a_run_drops(world: World) -> None:
    components = components_with(Dropping)
    for plan in list(PLANS[world.size].values())[1::4]:
        parity = checked(components, plan(names(components)), world)
        assert parity.is_within, parity.fault


OPTIONS = ["none", "micro-batches", "recompute", "bf16", "fp32"]
if os.environ.get("OMPI_COMM_WORLD_SIZE", "1") == "1":
    OPTIONS.append("compile")  # each rank compiles for itself, which takes seconds


@pytest.mark.proof
@pytest.mark.parametrize("option", OPTIONS)
def test_a_recurrent_component_takes_every_option(world: World, option: str) -> None:
    """The smallest micro-batches have one sample, and their number does not divide the batch."""
    components, config = components_with(Recurrent), replace(CONFIG, batch_size=13)
    plans = {name: make(names(components)) for name, make in PLANS[world.size].items()}
    if option == "micro-batches":
        plans = {name: replace(plan, microbatches=8) for name, plan in plans.items()}
    elif option == "recompute":  # which is refused with zb-h1
        plans = {name: plan for name, plan in plans.items() if "zb-h1" not in name}
        config = replace(config, recompute="odd*")
    elif option == "compile":
        config = replace(config, compile=True)
        check_compiler(torch.device("cpu"))
    elif option != "none":
        plans = dict(list(plans.items())[::3])
        config = replace(config, precision=option)  # type: ignore[arg-type]
    for name, plan in plans.items():
        parity = check_plan(config, components, plan, IMAGE_SIZE, CLASSES, world)
        assert parity.is_within, f"{name}: {parity.fault}"


class Normalised(nn.Module):
    """Normalises its input, with and without a checkpoint around."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.layer, self.batch = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.cumulative = nn.BatchNorm1d(WIDTH, momentum=None)
        self.frozen = nn.BatchNorm1d(WIDTH)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)

    def train(self, mode: bool = True) -> "Normalised":
        super().train(mode)
        self.frozen.eval()
        return self

    def inner(self, x: Tensor) -> Tensor:
        x = self.frozen(self.cumulative(torch.tanh(self.batch(self.layer(x)))))
        return torch.tanh(x + self.instance(x.unflatten(1, (2, 3))).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self.inner, x, use_reentrant=False)
            if self.is_checkpointed
            else self.inner(x)
        )


def normalised_states(world: World, is_checkpointed: bool) -> dict[str, dict[str, np.ndarray]]:
    """Return what training ends in, by plan; every other one normalises over its replicas."""
    components = components_with(lambda: Normalised(is_checkpointed))
    return {
        name: train(
            replace(CONFIG, batch_norm="sync" if number % 2 else "local"),
            plan(names(components)),
            components,
            world,
            3,
            [64, 96, 64],
        )
        for number, (name, plan) in enumerate(PLANS[world.size].items())
    }


@pytest.mark.proves(
    "A checkpoint inside a model leaves running statistics alone under every plan."
)
def test_a_checkpoint_changes_no_running_statistics(world: World) -> None:
    expected, actual = normalised_states(world, False), normalised_states(world, True)
    for name, state in expected.items():
        assert_close(actual[name], state, 1e-12)
        assert state["odd1.batch.running_mean"].any(), name
        assert np.isfinite(state["odd1.instance.running_mean"]).all(), name
        assert not state["odd1.frozen.running_mean"].any(), name


def test_without_care_a_checkpoint_counts_statistics_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above: under some plans, and not under others."""
    expected = normalised_states(world, False)
    monkeypatch.setattr("hvdtrain.parallel.stage.keeping_statistics", lambda _: nullcontext())
    counters = {
        name: float(
            state["odd1.batch.num_batches_tracked"]
            / expected[name]["odd1.batch.num_batches_tracked"]
        )
        for name, state in normalised_states(world, True).items()
    }
    assert 2.0 in counters.values(), counters


def convolution_with_bias() -> nn.Module:
    return nn.Conv2d(3, 8, 3, padding=1)


def convolution_with_weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1, bias=False))


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("make", [convolution_with_bias, convolution_with_weight_norm])
def test_what_a_batch_norm_cancels_has_no_gradient_but_rounding_errors(
    world: World, make: Callable[[], nn.Module], precision: str
) -> None:
    components = [
        Component(
            "layers",
            lambda: nn.Sequential(make(), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
        ),
        Component("head", lambda: nn.Linear(8 * 32 * 32, CLASSES)),
    ]
    config = replace(CONFIG, batch_norm="sync", batch_size=32, precision=precision)  # type: ignore[arg-type]
    plan = replicated(names(components), world.size, 1, None)
    parity = check_plan(config, components, plan, 32, CLASSES, world)
    assert parity.is_within, parity.fault


class Follower(nn.Module):
    """Keeps running values of its input, one in place and one as a new tensor each time."""

    kept: Tensor
    made_anew: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(WIDTH))
        self.register_buffer("made_anew", torch.full((WIDTH,), -torch.inf))
        self.register_buffer("seen", torch.tensor(2**40 + 1))
        self.register_buffer("constant", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.kept.lerp_(x.mean(0), 0.1)
                self.made_anew = torch.maximum(self.made_anew, x.amax(0))
                self.seen += len(x)
        return self.layer(x - self.kept)


class Replacing(nn.Module):
    """Replaces its buffers by tensors that cannot be written to; one is so from the start."""

    repeated: Tensor
    inferred: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("repeated", torch.zeros(1).expand(WIDTH))
        self.register_buffer("inferred", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().mean()
            self.repeated = (0.9 * self.repeated[:1] + 0.1 * mean).expand(WIDTH)
            with torch.inference_mode():
                self.inferred = 0.9 * self.inferred + 0.1 * x.mean(0)
        return self.layer(x - self.repeated - self.inferred)


def spectral_norm() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("make", [Follower, spectral_norm, Replacing])
def test_replicas_hold_the_same_buffers(world: World, make: Callable[[], nn.Module]) -> None:
    components = components_with(make)
    for plan in list(PLANS[world.size].values())[::3]:
        # whole_state compares the replicas.
        state = train(CONFIG, plan(names(components)), components, world, 3)
        if make is Follower:
            assert state["odd0.seen"] > 2**40 + 1
            assert state["odd0.constant"].tolist() == [0.0, -float("inf")]
            assert state["odd0.kept"].any()
        if make is Replacing:
            assert state["odd0.repeated"].any()
            assert state["odd0.inferred"].any()


def test_buffers_that_cannot_be_written_to_are_checked_and_restored(world: World) -> None:
    components = components_with(Replacing)
    plan = next(iter(PLANS[world.size].values()))(names(components))
    parity = checked(components, plan, world)
    assert parity.is_within, parity.fault
    runtime = runtime_of(CONFIG, plan, components, IMAGE_SIZE, world)
    (model,) = (part.model for part in runtime.parts.values())
    run_step(runtime, plan, world, IMAGE_SIZE, 13, seed=1)
    model.put({name: torch.full_like(value, 3) for name, value in model.tensors().items()})
    assert all((value == 3).all() for value in model.tensors().values())
    model.tensors()["odd0.repeated"][0] = 4
    assert model.tensors()["odd0.repeated"].tolist() == [4.0] + [3.0] * (WIDTH - 1)
    runtime.observer.close()


@pytest.mark.several_ranks
def test_the_first_replica_is_followed(world: World) -> None:
    """Negative control of the tests above: without it the replicas differ."""
    components = components_with(Follower)
    plan = replicated(names(components), world.size, 1, None)
    runtime = runtime_of(CONFIG, plan, components, IMAGE_SIZE, world)
    (model,) = (part.model for part in runtime.parts.values())
    changing = {
        f"odd{number}.{name}"
        for number in range(3)
        for name in ("kept", "made_anew", "seen", "constant")
    }
    assert model.changing == changing
    model.changing = frozenset()
    run_step(runtime, plan, world, IMAGE_SIZE, 13, seed=1)
    with pytest.raises(AssertionError, match="odd0"):
        whole_state(plan, runtime, world)
    runtime.observer.close()


class Token(nn.Module):
    """Prepends a parameter to each sample: its gradient can be a view of the input gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return torch.cat([self.token.expand(len(flat), -1), flat], dim=1)


def test_gradients_of_one_sample_outlive_the_buffers_they_came_in(world: World) -> None:
    rest = Component("rest", lambda: nn.Linear(196, CLASSES))
    components = [
        Component("token", Token),
        *(Component(f"id{i}", nn.Identity) for i in range(6)),
        rest,
    ]
    sizes = [8, 8, 4]
    expected = train_alone(CONFIG, components, world, len(sizes), sizes)
    for plan in PLANS[world.size].values():
        made = plan(names(components))
        if len(made.stages) > 1:
            made = replace(made, microbatches=8)
            assert_close(train(CONFIG, made, components, world, len(sizes), sizes), expected, 1e-9)
