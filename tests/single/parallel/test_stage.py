"""The model of a stage: its clock, and recomputed components."""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvdtrain import device
from hvdtrain.parallel.batchnorm import synchronise
from hvdtrain.parallel.stage import (
    ComponentClock,
    StageModel,
    forward_recomputed,
)
from tests.late import CPU, late_device

Forward = Callable[[nn.Module, Tensor], Tensor]


class Clock:
    """A clock that only slow layers advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Takes(torch.autograd.Function):
    """Returns its input one second later, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, clock: Clock, is_backward: bool) -> Tensor:
        ctx.clock, ctx.is_backward = clock, is_backward
        clock.now += not is_backward
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.now += ctx.is_backward
        return gradient, None, None


class Slow(nn.Module):
    """A linear layer that takes one second, in forward or in backward."""

    def __init__(self, clock: Clock, is_backward: bool) -> None:
        super().__init__()
        self.layer, self.clock, self.is_backward = nn.Linear(4, 4), clock, is_backward

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = Takes.apply(self.layer(input), self.clock, self.is_backward)
        return output


NAMES = ("first", "second", "third")


def model_of(slow: str, clock: Clock, is_backward: bool = True) -> StageModel:
    return StageModel(
        {name: Slow(clock, is_backward) if name == slow else nn.Linear(4, 4) for name in NAMES}
    )


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("slow", NAMES)
def test_each_component_has_its_own_time(slow: str, is_backward: bool) -> None:
    clock = Clock()
    model = model_of(slow, clock, is_backward)
    model.clock = ComponentClock(clock)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        model.clock.end()
        clock.now += 10  # other stages, and the optimizer
    assert model.clock.read() == {name: 2.0 * (name == slow) for name in NAMES}
    assert model.clock.read() == {}


def test_gradients_are_those_of_a_model_without_a_clock() -> None:
    model = model_of("second", Clock())
    input = torch.randn(3, 4, requires_grad=True)
    model(input).square().sum().backward()
    assert input.grad is not None
    plain = [input.grad.clone(), *(p.grad.clone() for p in model.parameters().values())]  # type: ignore[union-attr]
    for tensor in (input, *model.parameters().values()):
        tensor.grad = None
    model.clock = ComponentClock(time.perf_counter)
    model(input).square().sum().backward()
    timed = [input.grad, *(p.grad for p in model.parameters().values())]
    assert all(torch.equal(a, b) for a, b in zip(plain, timed, strict=True))  # type: ignore[arg-type]


def test_evaluation_is_not_timed() -> None:
    model = model_of("first", Clock())
    model.clock = ComponentClock(time.perf_counter)
    with torch.inference_mode():
        model(torch.ones(2, 4))
    assert model.clock.read() == {}


def test_times_are_read_once_the_device_has_reached_them() -> None:
    with late_device():
        model = StageModel({name: nn.Linear(4, 4) for name in NAMES})
        model.clock = ComponentClock(partial(device.mark, CPU))
        model(torch.ones(2, 4)).sum().backward()
        model.clock.end()
        with pytest.raises(AssertionError, match="the device has not reached a mark"):
            model.clock.read()
        device.synchronize(CPU)
        seconds = model.clock.read()
    assert seconds.keys() == set(NAMES)
    assert all(value > 0 for value in seconds.values())


class Counted(nn.Module):
    """Counts its forwards in `calls` and in a buffer, as a user's batch norm could."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        return x


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = module(x)
    return output


def component() -> nn.Module:
    """Return a component with every kind of layer that a recomputation could get wrong."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.InstanceNorm2d(8, track_running_stats=True),
        Counted(),
        nn.Conv2d(8, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4).eval(),  # frozen
        nn.GELU(),
    )


def images(seed: int = 0) -> Tensor:
    drawn = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) + seed
    return drawn.contiguous(memory_format=torch.channels_last)


def train(
    module: nn.Module, forward: Forward, backwards: Sequence[int] = (0,), bf16: bool = False
) -> dict[str, Tensor]:
    """Run forwards of several micro-batches, then their backwards in the given order.

    Return outputs, gradients, buffers and the random state.
    """
    torch.manual_seed(11)
    inputs = {seed: images(seed).requires_grad_(seed > 0) for seed in range(len(backwards))}
    with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        outputs = {seed: forward(module, x) for seed, x in inputs.items()}
    torch.manual_seed(12)  # other code draws random numbers in between
    for seed in backwards:
        outputs[seed].float().sin().sum().backward()
    tensors = {f"output {seed}": output.detach() for seed, output in outputs.items()}
    tensors |= {f"input {seed}": x.grad for seed, x in inputs.items() if x.grad is not None}
    for name, value in module.named_parameters():
        if value.grad is not None:
            tensors[name] = value.grad
    return tensors | dict(module.named_buffers()) | {"random": torch.get_rng_state()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def mirrored(calls: list[str]) -> Callable[[Tensor], Tensor]:
    """Return an all-gather of two replicas with the same rows that records its calls."""

    def all_gather(tensor: Tensor) -> Tensor:
        calls.append("moments" if len(tensor) % 2 else "gradients")
        return torch.stack([tensor, tensor])

    return all_gather


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("backwards", [(0,), (0, 1, 2), (2, 0, 1)])
def test_recomputation_changes_no_bit(backwards: Sequence[int], bf16: bool) -> None:
    module = component()
    expected = train(deepcopy(module), plainly, backwards, bf16)
    assert_same_bits(train(module, forward_recomputed, backwards, bf16), expected)


def test_torchs_checkpoint_alone_would_count_everything_twice() -> None:
    def alone(module: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(module, x, use_reentrant=False)
        return output

    module = component()
    expected, actual = train(deepcopy(module), plainly), train(module, alone)
    different = {name for name in actual if not torch.equal(actual[name], expected[name])}
    assert {"1.running_mean", "1.num_batches_tracked", "4.running_var", "5.seen"} <= different


@pytest.mark.parametrize("backwards", [(0,), (0, 1, 2), (1, 2, 0)])
def test_synchronised_batch_norms_gather_once(backwards: Sequence[int]) -> None:
    plain_calls: list[str] = []
    calls: list[str] = []
    plain, module = component(), component()
    assert synchronise(plain, mirrored(plain_calls)) == 3
    assert synchronise(module, mirrored(calls)) == 3
    expected = train(plain, plainly, backwards)
    assert_same_bits(train(module, forward_recomputed, backwards), expected)
    # Two of the three batch norms train.
    assert calls == plain_calls
    assert calls == ["moments", "moments"] * len(backwards) + ["gradients"] * 2 * len(backwards)


def test_a_retained_graph_is_recomputed_again() -> None:
    def gradients(forward: Forward) -> dict[str, Tensor]:
        module = component()
        synchronise(module, mirrored([]))
        loss = forward(module, images()).sin().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return {
            name: value.grad for name, value in module.named_parameters() if value.grad is not None
        }

    assert_same_bits(gradients(forward_recomputed), gradients(plainly))


@pytest.mark.proves(
    "`--recompute` keeps no activations and changes no bit; `--clip-norm` clips by the "
    "norm of all gradients together."
)
def test_activations_are_not_kept() -> None:
    def kept(forward: Forward) -> bool:
        module = component()
        activations: list[weakref.ref[Tensor]] = []
        module[0].register_forward_hook(lambda *args: activations.append(weakref.ref(args[2])))  # type: ignore[index]
        output = forward(module, images())
        assert output.requires_grad
        return activations[0]() is not None

    assert kept(plainly)
    assert not kept(forward_recomputed)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_a_plain_call(mode: type[torch.no_grad]) -> None:
    module = component().eval()
    with mode():
        assert torch.equal(forward_recomputed(module, images()), module(images()))
    assert module[5].calls == 2  # type: ignore[index]


def test_a_component_runs_twice_and_is_left_as_it_was() -> None:
    module = component()
    synchronise(module, mirrored([]))
    buffers = {name: id(value) for name, value in module.named_buffers()}
    train(module, forward_recomputed)
    assert module[5].calls == 2  # type: ignore[index]
    assert {name: id(value) for name, value in module.named_buffers()} == buffers
    assert module[1].record is None  # type: ignore[index]
    assert module[1].replay is None  # type: ignore[index]
