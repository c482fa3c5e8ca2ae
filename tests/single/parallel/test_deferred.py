"""Verdicts on the gradients of a step on a device with a queue, where the host does not wait."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain import device
from hvdtrain.backends.pytorch.build import build_runtime
from hvdtrain.check.plan import MEAN, STD, random_batch
from hvdtrain.config import TrainConfig
from hvdtrain.models import components
from hvdtrain.parallel.runtime import Runtime, Step, read_later
from hvdtrain.parallel.stage import Images
from hvdtrain.plan import schedule
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import replicated
from hvdtrain.plan.schedule import program
from hvdtrain.world import World
from tests.late import LateEvent, LateStream, late_device

SIZE, CLASSES, BATCH = 16, 7, 6
aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero}
ALONE = World("none", 0, 1, 0, 1, 1)


class HostReads(TorchDispatchMode):
    """Counts the operations that need a value on the host, and so wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in WAITING
        return func(*args, **(kwargs or {}))


@pytest.fixture
def late() -> Iterator[LateStream]:
    with late_device() as stream:
        yield stream


def runtime_of(device_name: str = "cpu", /, **settings: object) -> Runtime:
    config = TrainConfig(model="cnn", data="", batch_size=BATCH, seed=3, lr=0.1, **settings)  # type: ignore[arg-type]
    parts = components("cnn", CLASSES, SIZE)
    plan = replicated([part.name for part in parts], 1, 2, None)
    images = Images(MEAN, STD, torch.device(device_name), config.precision)
    return build_runtime(config, plan, parts, images, SIZE, ALONE)


def step_of(runtime: Runtime, seed: int) -> Step:
    parts = components("cnn", CLASSES, SIZE)
    plan = replicated([part.name for part in parts], 1, 2, None)
    pieces = cut(plan, BATCH)
    todo = program(plan, pieces, schedule.training_step(plan, pieces)[0], 0)
    return Step(todo, *random_batch(BATCH, SIZE, CLASSES, seed))


def weights(runtime: Runtime) -> dict[str, torch.Tensor]:
    tensors = runtime.parts[0].model.tensors()
    return {name: value.detach().clone() for name, value in tensors.items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_steps_are_those_of_a_host_that_waits(
    optimizer: str, clip_norm: float | None, late: LateStream
) -> None:
    after = []
    for is_late in (True, False):
        if not is_late:
            del device.STREAMS["cpu"]
        runtime = runtime_of(optimizer=optimizer, clip_norm=clip_norm)
        assert runtime.settings.rule.defers is is_late
        reads = [
            read_later(runtime.train(step_of(runtime, seed)), runtime.device) for seed in range(3)
        ]
        assert not any(is_bad for _, is_bad in (read() for read in reads))
        after.append(weights(runtime))
        runtime.observer.close()
    device.STREAMS["cpu"] = late
    for name, value in after[0].items():
        torch.testing.assert_close(value, after[1][name], rtol=1e-5, atol=1e-6, msg=name)
    if clip_norm is None:
        assert all(torch.equal(value, after[1][name]) for name, value in after[0].items())


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("good_steps", [0, 1])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_a_bad_step_leaves_the_weights_and_is_told_later(
    optimizer: str, clip_norm: float | None, good_steps: int, late: LateStream
) -> None:
    runtime = runtime_of(optimizer=optimizer, clip_norm=clip_norm, weight_decay=0.1)
    for seed in range(good_steps):
        runtime.train(step_of(runtime, seed))
    before = weights(runtime)
    hook = runtime.parts[0].parameters[0].register_hook(lambda gradient: gradient * math.inf)
    step = runtime.train(step_of(runtime, 1))
    hook.remove()
    # Without momentum the host decides: a kernel would leave its memory unset.
    assert step.is_bad is (optimizer == "sgd" and not good_steps)
    loss, is_bad = read_later(step, runtime.device)()
    assert is_bad
    assert math.isfinite(loss)
    for name, value in weights(runtime).items():
        assert torch.equal(value, before[name]), name
    again = runtime.train(step_of(runtime, 1))
    assert not read_later(again, runtime.device)()[1]
    assert all(value.isfinite().all() for value in weights(runtime).values())
    runtime.observer.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"on_bad_step": "skip"},
        {"on_bad_step": "stop:1"},
        {"precision": "fp16"},
    ],
    ids=str,
)
def test_where_ranks_have_to_agree_the_host_waits(
    settings: dict[str, object], late: LateStream
) -> None:
    runtime = runtime_of(**settings)
    assert not runtime.settings.rule.defers
    runtime.observer.close()


@pytest.mark.proves(
    "The host does not wait for a GPU within a step: it reads the loss, and whether the "
    "gradients are finite, one step later. A bad step does not change the weights."
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_the_host_waits_once_for_the_loss_of_the_step_before(
    precision: str,
    clip_norm: float | None,
    late: LateStream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, synchronize = [], LateEvent.synchronize

    def counted(event: LateEvent) -> None:
        waits.append(event)
        synchronize(event)

    monkeypatch.setattr(LateEvent, "synchronize", counted)
    runtime = runtime_of(precision=precision, clip_norm=clip_norm, optimizer="adamw")
    runtime.train(step_of(runtime, 0))  # allocates
    step = step_of(runtime, 1)
    waits.clear()
    with HostReads() as reads:
        read = read_later(runtime.train(step), runtime.device)
    assert (reads.count, len(waits)) == (0, 0)
    read()
    assert len(waits) == 1
    runtime.observer.close()


def test_a_host_that_waits_is_counted(late: LateStream) -> None:
    runtime = runtime_of(on_bad_step="skip")
    with HostReads() as reads:
        runtime.train(step_of(runtime, 0))
    assert reads.count > 0
    runtime.observer.close()
