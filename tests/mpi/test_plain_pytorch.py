"""Parameters and buffers of unusual memory and dtypes train under every plan as in plain PyTorch.

The reference shares no code with the runtime, nor with `plan check`: it builds, casts and updates
by PyTorch alone.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hvdtrain.check.plan import MEAN, STD, check_plan, random_batch
from hvdtrain.config import TrainConfig
from hvdtrain.models import component as components_module
from hvdtrain.models.component import Component
from hvdtrain.plan.plan import replicated
from hvdtrain.world import World
from tests.mpi.common import CLASSES, names, on_first
from tests.mpi.plans import PLANS
from tests.mpi.test_training import IMAGE_SIZE, assert_close, train

WIDTH = 6
BOUND = 0.2
SIZES = [13, 13, 9, 13, 13]  # a replica without samples would not bound its weights
CONFIG = TrainConfig(
    model="odd",
    data="",
    optimizer="sgd",
    lr=0.1,
    momentum=0.9,
    reduce_with="mpi",
    weight_decay=0.0,
)
State = dict[str, np.ndarray]


class Sliced(nn.Module):
    """Has parameters that are slices of other tensors: their memory has gaps."""

    def __init__(self) -> None:
        super().__init__()
        whole = nn.Linear(2 * WIDTH, WIDTH)
        self.left, self.right = (
            nn.Parameter(part.detach()) for part in whole.weight.chunk(2, dim=1)
        )
        self.bias = nn.Parameter(whole.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(x, self.left, self.bias)) @ self.right + x


class Rotary(nn.Module):
    """Turns pairs of values by the angles of a complex buffer."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        angles = torch.arange(WIDTH // 2) + 0.5
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.layer(x).unflatten(1, (-1, 2)))
        return torch.tanh(torch.view_as_real(pairs * self.turns).flatten(1) + x)


class Bounded(nn.Module):
    """Replaces the memory of its weight in each forward, as NormFace does.

    Bounds, unlike norms, do not change by rounding where a replica runs one forward more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data = self.layer.weight.data.clamp(-BOUND, BOUND)
        return torch.tanh(self.layer(x))


class Reordered(nn.Module):
    """Replaces its weight by one of another memory order than the run's, in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(WIDTH, WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        flat = weight.data.flatten(1).clamp(-BOUND, BOUND)
        weight.data = flat.contiguous().view(weight.shape)
        return torch.tanh(self.layer(x[..., None, None].expand(-1, -1, 2, 2)).flatten(1))


def model(make: Callable[[], nn.Module]) -> list[Component]:
    stem = Component("stem", lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, WIDTH)))
    odd = [Component(f"odd{number}", make) for number in range(2)]
    return [stem, *odd, Component("head", lambda: nn.Linear(WIDTH, CLASSES))]


def in_plain_pytorch(parts: list[Component], dtype: torch.dtype) -> State:
    modules = {}
    for part in parts:
        digest = hashlib.sha256(f"{CONFIG.seed}:{part.name}".encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
        module = modules[part.name] = part.build()
        for value in module.parameters():
            value.data = value.data.clone(memory_format=torch.contiguous_format).to(dtype)
        for name, buffer in list(module.named_buffers()):
            setattr(module, name, buffer.to(dtype.to_complex()))
    network = nn.Sequential(*modules.values())
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9, nesterov=True, foreach=False)
    for seed, size in enumerate(SIZES):
        pixels, labels = random_batch(size, IMAGE_SIZE, CLASSES, seed)
        values = (pixels.astype(np.float64) / 255 - MEAN) / STD
        images = torch.from_numpy(values).permute(0, 3, 1, 2).to(dtype)
        optimizer.zero_grad()
        functional.cross_entropy(network(images), torch.from_numpy(labels)).backward()
        optimizer.step()
    return {
        f"{name}.{key}": value.detach().numpy()
        for name, module in modules.items()
        for key, value in (*module.named_parameters(), *module.named_buffers())
    }


@pytest.mark.proves(
    "Parameters with gaps in memory, complex buffers and weights that a forward replaces "
    "train under every plan as in plain PyTorch; `plan check` sees what a cast loses, and "
    "a module that mixes samples in backward."
)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("make", [Sliced, Rotary, Bounded, Reordered])
def test_they_train_as_in_plain_pytorch(
    world: World, make: Callable[[], nn.Module], precision: str
) -> None:
    """A cast from fp32 to fp32 copies nothing: gaps stayed, and weights were off by 7 %."""
    parts, config = model(make), replace(CONFIG, precision=precision)  # type: ignore[arg-type]
    dtype, bound = (torch.float64, 1e-10) if precision == "fp64" else (torch.float32, 1e-4)
    expected = on_first(world, lambda: in_plain_pytorch(parts, dtype))
    for name, plan in list(PLANS[world.size].items())[::3]:
        made = plan(names(parts))
        for shards in {False, name == "dp" and world.size > 1}:
            chosen = replace(config, shard_optimizer=shards)
            actual = train(chosen, made, parts, world, len(SIZES), SIZES)
            assert_close(actual, expected, bound)


def lost(_: Component, module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast as `Module.to` does: imaginary parts are lost, and gaps stay in fp32."""
    return module.to(dtype=dtype)


@pytest.mark.parametrize("make", [Sliced, Rotary])
def test_plan_check_sees_what_a_cast_loses(
    world: World, monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]
) -> None:
    parts, config = model(make), replace(CONFIG, precision="fp32", batch_size=13)
    plan = replicated(names(parts), world.size, 1, None)
    assert check_plan(config, parts, plan, IMAGE_SIZE, CLASSES, world).is_within
    monkeypatch.setattr(components_module, "cast", lost)
    if make is Sliced:  # buckets refuse gaps; on one rank there is none
        monkeypatch.setattr("hvdtrain.sync.gradients.is_dense", lambda _: True)
    assert not check_plan(config, parts, plan, IMAGE_SIZE, CLASSES, world).is_within


class Following(nn.Module):
    """Counts within a checkpoint, which runs again in backward."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def inner(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return torch.tanh(self.other(torch.tanh(self.layer(x)) / (1 + self.calls / 10)))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return output


@pytest.mark.several_ranks
def test_a_backward_in_halves_runs_a_checkpoint_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, config = model(Following), replace(CONFIG, precision="fp64")
    plan = next(plan for name, plan in PLANS[world.size].items() if "zb-h1" in name)(names(parts))

    def calls(schedule: str) -> list[float]:
        state = train(config, replace(plan, schedule=schedule), parts, world, 1)
        return [float(state[f"odd{number}.calls"]) for number in range(2)]

    assert calls("zb-h1") == calls("1f1b")
    monkeypatch.setattr("hvdtrain.backends.pytorch.build.packs_saved_tensors", lambda *_: False)
    assert calls("zb-h1") > calls("1f1b")
