"""Unusual parts of users' models train under every plan as on one rank, short tails included."""

# mypy: disable-error-code="no-any-return"

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component
from hvdtrain.parallel.plan import Plan, replicated
from hvdtrain.training.parity import Parity
from hvdtrain.training.parts import check_compiler
from hvdtrain.training.plancheck import check_plan
from hvdtrain.world import World
from tests.mpi.common import CLASSES, names, run_step, runtime_of, whole_state
from tests.mpi.plans import PLANS
from tests.mpi.test_training import IMAGE_SIZE, STEP_SIZES, assert_close, train, train_alone

WIDTH = 6
CONFIG = TrainConfig(model="odd", data="", precision="fp64", optimizer="sgd", lr=0.1)


class Layers(nn.Module):
    """Two layers, and a way to use them."""

    def __init__(self, compute: Callable[["Layers", Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, given: Tensor) -> Tensor:
        return torch.tanh(self.compute(self, given)) + 0.1


def frozen(layers: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = layers.a(x)
    return layers.b(x)


def partly_frozen(layers: Layers, x: Tensor) -> Tensor:
    return layers.a(x.detach()) + layers.b(x)


def one_after_the_other(layers: Layers, x: Tensor) -> Tensor:
    return layers.b(torch.tanh(layers.a(x)))


def tied_weights() -> nn.Module:
    """With biases of their own."""
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
    """Drops values, of the tokens of a sample too, with and without checkpoints."""

    def __init__(self) -> None:
        super().__init__(dropping)
        self.drop, self.channels = nn.Dropout(0.3), nn.Dropout1d(0.4)


def dropping(layers: Layers, x: Tensor) -> Tensor:
    assert isinstance(layers, Dropping)
    x = layers.drop(checkpoint(lambda given: layers.drop(layers.a(given)), x, use_reentrant=False))
    tokens = layers.drop(x.unflatten(1, (2, 3)).flatten(0, 1)).reshape(len(x), WIDTH)
    return layers.channels(layers.b(tokens).unflatten(1, (3, 2))).flatten(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, WIDTH, batch_first=True)

    def forward(self, given: Tensor) -> Tensor:
        return self.lstm(given.unflatten(1, (WIDTH // 2, 2)))[0][:, -1]


class Repeating(nn.Module):
    """Uses a weight several times, as a recurrence that is written by hand does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        for _ in range(6):
            given = torch.tanh(self.layer(given))
        return given


class Twofold(nn.Module):
    """Computes one thing in training and another in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        return self.layer(given) * (2 if self.training else 1)


def in_evaluation_mode() -> nn.Module:
    """What its constructor leaves so; it trains as any other from the first step on."""
    return Twofold().eval()


def weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


COMPUTED = [
    *(frozen, partly_frozen, unused, scaled),
    *(shared_by_reentrant_checkpoints, checkpoints),
]
KINDS: dict[str, Callable[[], nn.Module]] = {
    **{compute.__name__: lambda compute=compute: Layers(compute) for compute in COMPUTED},  # type: ignore[misc]
    **{
        make.__name__: make
        for make in (tied_weights, Recurrent, in_evaluation_mode, weight_norm, Dropping)
    },
}


def components_with(make: Callable[[], nn.Module]) -> list[Component]:
    """The unusual part stands first in some stages, last in others, and alone."""
    stem = Component("stem", lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, WIDTH)))
    odd = [Component(f"odd{number}", make) for number in range(3)]
    return [stem, *odd, Component("head", lambda: nn.Linear(WIDTH, CLASSES))]


@pytest.mark.parametrize("plans", ["few", pytest.param("all", marks=pytest.mark.proof)])
@pytest.mark.parametrize("kind", KINDS)
def test_they_end_in_the_weights_of_the_serial_run(here: World, kind: str, plans: str) -> None:
    components = components_with(KINDS[kind])
    expected = train_alone(CONFIG, components, here, len(STEP_SIZES))
    for name, plan in PLANS[here.size].items():
        if plans == "few" and "zb-h1" not in name and name != "dp":
            continue
        made = plan(names(components))
        found = train(CONFIG, made, components, here, len(STEP_SIZES))
        assert_close(found, expected, 1e-9)


def test_what_is_dropped_is_the_same_when_components_run_again(here: World) -> None:
    components = components_with(Dropping)
    expected = train_alone(CONFIG, components, here, 3)
    for name, plan in list(PLANS[here.size].items())[::4]:
        if "zb-h1" not in name:
            again = replace(CONFIG, recompute="odd*")
            assert_close(
                train(again, plan(names(components)), components, here, 3), expected, 1e-9
            )


@pytest.mark.several_ranks
def test_without_masks_by_sample_a_plan_changes_what_is_learnt(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests of dropout could not fail."""
    components = components_with(Dropping)
    expected = train_alone(CONFIG, components, here, 3)
    plan = replicated(names(components), here.size, 1, None)
    assert checked(components, plan, here).is_within
    monkeypatch.setattr("hvdtrain.training.build.follow_samples", lambda *_: None)
    assert checked(components, plan, here).largest > 1e-3
    with pytest.raises(AssertionError, match="weight"):
        assert_close(train(CONFIG, plan, components, here, 3), expected, 1e-3)


def checked(components: list[Component], plan: Plan, here: World) -> Parity:
    """What `plan check` finds."""
    config = replace(CONFIG, batch_size=13)
    return check_plan(config, components, plan, IMAGE_SIZE, CLASSES, here)


def test_plan_check_rounds_as_a_run_a_weight_that_is_used_several_times(here: World) -> None:
    """Under bf16 its gradients are summed as brain floats, since it is cast once."""
    components, config = components_with(Repeating), replace(CONFIG, precision="bf16")
    for plan in list(PLANS[here.size].values())[::4]:
        parity = check_plan(
            replace(config, batch_size=13),
            components,
            plan(names(components)),
            IMAGE_SIZE,
            CLASSES,
            here,
        )
        assert parity.is_within, parity.fault


def test_plan_check_drops_what_a_run_drops(here: World) -> None:
    components = components_with(Dropping)
    for plan in list(PLANS[here.size].values())[1::4]:
        parity = checked(components, plan(names(components)), here)
        assert parity.is_within, parity.fault


OPTIONS = ["none", "micro-batches", "recompute", "bf16", "fp32"]
if os.environ.get("OMPI_COMM_WORLD_SIZE", "1") == "1":
    OPTIONS.append("compile")  # for seconds on each rank, which compiles for itself


@pytest.mark.proof
@pytest.mark.parametrize("option", OPTIONS)
def test_a_recurrent_component_takes_every_option(here: World, option: str) -> None:
    """Its micro-batches are as short as one sample; the batch is no multiple of them."""
    components, config = components_with(Recurrent), replace(CONFIG, batch_size=13)
    plans = {name: make(names(components)) for name, make in PLANS[here.size].items()}
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
        parity = check_plan(config, components, plan, IMAGE_SIZE, CLASSES, here)
        assert parity.is_within, f"{name}: {parity.fault}"


class Follower(nn.Module):
    """Keeps averages of what it sees, one in place and one as a new tensor each time."""

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

    def forward(self, given: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.kept.lerp_(given.mean(0), 0.1)
                self.made_anew = torch.maximum(self.made_anew, given.amax(0))
                self.seen += len(given)
        return self.layer(given - self.kept)


class Replacing(nn.Module):
    """Puts tensors that cannot be written to in place of its buffers; one is so from the start."""

    repeated: Tensor
    inferred: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("repeated", torch.zeros(1).expand(WIDTH))
        self.register_buffer("inferred", torch.zeros(WIDTH))

    def forward(self, given: Tensor) -> Tensor:
        if self.training:
            mean = given.detach().mean()
            self.repeated = (0.9 * self.repeated[:1] + 0.1 * mean).expand(WIDTH)
            with torch.inference_mode():
                self.inferred = 0.9 * self.inferred + 0.1 * given.mean(0)
        return self.layer(given - self.repeated - self.inferred)


def spectral_norm() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("make", [Follower, spectral_norm, Replacing])
def test_replicas_hold_the_same_buffers(here: World, make: Callable[[], nn.Module]) -> None:
    components = components_with(make)
    for plan in list(PLANS[here.size].values())[::3]:
        # whole_state compares the replicas.
        found = train(CONFIG, plan(names(components)), components, here, 3)
        if make is Follower:
            assert found["odd0.seen"] > 2**40 + 1
            assert found["odd0.constant"].tolist() == [0.0, -float("inf")]
            assert found["odd0.kept"].any()
        if make is Replacing:
            assert found["odd0.repeated"].any()
            assert found["odd0.inferred"].any()


def test_buffers_that_cannot_be_written_to_are_checked_and_restored(here: World) -> None:
    components = components_with(Replacing)
    plan = next(iter(PLANS[here.size].values()))(names(components))
    parity = checked(components, plan, here)
    assert parity.is_within, parity.fault
    runtime = runtime_of(CONFIG, plan, components, IMAGE_SIZE, here)
    (model,) = (part.model for part in runtime.parts.values())
    run_step(runtime, plan, here, IMAGE_SIZE, 13, seed=1)
    model.put({name: torch.full_like(value, 3) for name, value in model.tensors().items()})
    assert all((value == 3).all() for value in model.tensors().values())
    model.tensors()["odd0.repeated"][0] = 4
    assert model.tensors()["odd0.repeated"].tolist() == [4.0] + [3.0] * (WIDTH - 1)
    assert runtime.activity is not None
    runtime.activity.close()


@pytest.mark.several_ranks
def test_the_first_replica_is_followed(here: World) -> None:
    """Without that, replicas differ: the test above can fail."""
    components = components_with(Follower)
    plan = replicated(names(components), here.size, 1, None)
    runtime = runtime_of(CONFIG, plan, components, IMAGE_SIZE, here)
    (model,) = (part.model for part in runtime.parts.values())
    changing = {
        f"odd{number}.{name}"
        for number in range(3)
        for name in ("kept", "made_anew", "seen", "constant")
    }
    assert model.changing == changing
    model.changing = frozenset()
    run_step(runtime, plan, here, IMAGE_SIZE, 13, seed=1)
    with pytest.raises(AssertionError, match="odd0"):
        whole_state(plan, runtime, here)
    assert runtime.activity is not None
    runtime.activity.close()


class Token(nn.Module):
    """Puts what is trained before each sample: of one sample its gradient is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))

    def forward(self, given: Tensor) -> Tensor:
        flat = given.flatten(1)
        return torch.cat([self.token.expand(len(flat), -1), flat], dim=1)


def test_gradients_of_one_sample_outlive_the_buffers_they_came_in(here: World) -> None:
    rest = Component("rest", lambda: nn.Linear(196, CLASSES))
    components = [
        Component("token", Token),
        *(Component(f"id{i}", nn.Identity) for i in range(6)),
        rest,
    ]
    sizes = [8, 8, 4]
    expected = train_alone(CONFIG, components, here, len(sizes), sizes)
    for plan in PLANS[here.size].values():
        made = plan(names(components))
        if len(made.stages) > 1:
            made = replace(made, microbatches=8)
            assert_close(train(CONFIG, made, components, here, len(sizes), sizes), expected, 1e-9)
