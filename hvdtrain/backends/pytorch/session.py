"""A run's session in PyTorch: the interpreter of a plan, and the state that it works on."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hvdtrain.backends.pytorch import layout
from hvdtrain.backends.pytorch.batches import check_batches, input_boundaries
from hvdtrain.backends.pytorch.diagnosis import diagnose
from hvdtrain.backends.pytorch.layout import under_plan
from hvdtrain.backends.pytorch.optimizer import set_learning_rate, state_shapes
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.store import MODEL, OPTIMIZER
from hvdtrain.data.order import Rows
from hvdtrain.models import weights
from hvdtrain.models.component import Component
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Part
from hvdtrain.parallel.step import Step
from hvdtrain.plan import program
from hvdtrain.plan.actions import COMPUTE
from hvdtrain.plan.cut import Cut, cut
from hvdtrain.plan.plan import Plan, is_same_layout
from hvdtrain.plan.program import Program
from hvdtrain.training.feed import Feed, step_seed, take_rows
from hvdtrain.training.session import Result, Session, Shape, StepRecord, StepTimes
from hvdtrain.training.tracing import write_trace


@dataclass(kw_only=True)
class TorchSession(Session):
    """A `Session` under any plan.

    Attributes:
        spoiled: by component, functions that return whether its output becomes NaN.
        timed_steps, transfer_seconds: steps and seconds of waiting since `read_times`.
    """

    runtime: Runtime
    components: Sequence[Component]
    copies: layout.Copies = field(default_factory=layout.Copies)
    spoiled: dict[str, list[Callable[[], bool]]] = field(default_factory=dict)
    timed_steps: int = 0
    transfer_seconds: float = 0.0
    libraries = ("torch",)

    @property
    @override
    def device(self) -> str:
        return self.runtime.device.type

    @property
    @override
    def accelerator(self) -> str | None:
        return torch.cuda.get_device_name(self.runtime.device) if self.device == "cuda" else None

    @property
    @override
    def loss_delay(self) -> int:
        return 1 if self.device == "cuda" else 0

    @property
    @override
    def evaluation_images(self) -> int:
        # With a memory limit, the planner counted the memory of one training batch.
        is_limited = self.config.memory_limit is not None
        return program.evaluation_images(self.plan, self.config.batch_size if is_limited else None)

    @property
    def parts(self) -> Mapping[int, Part]:
        """The parts of the model that this rank holds, by stage."""
        return self.runtime.parts

    def cut(self, batch_size: int, is_training: bool) -> Cut:
        """Return how a global batch of this size is split among ranks and micro-batches."""
        return cut(program.plan_for(self.plan, is_training), batch_size)

    def program(self, batch_size: int, is_training: bool) -> Program:
        """Return this rank's program for a global batch of this size."""
        return program.program_of(self.plan, batch_size, self.world.rank, is_training)

    @override
    def local_rows(self, batch: Rows, is_training: bool) -> tuple[Rows, Rows]:
        parts, rank = self.cut(len(batch), is_training).parts, self.world.rank
        first, last = (parts[stage].get(rank, ()) for stage in (0, self.plan.last))
        return take_rows(batch, first), take_rows(batch, last)

    @override
    def train(self, feed: Feed, position: int, batch_size: int, rate: float) -> Result:
        for part in self.parts.values():
            if part.optimizer is not None:
                set_learning_rate(part.optimizer, rate)
        self._seed(position)
        todo = self.program(batch_size, is_training=True)
        step = self.runtime.train(Step(todo, feed.images, feed.labels))
        self.timed_steps += 1
        self.transfer_seconds += step.waited.transfer
        return Result(
            read_loss=read_later(step.loss_sum),
            samples=todo.cut.samples(self.plan.last, self.world.rank),
            norm=step.norm,
            is_bad=step.is_bad,
            exposed_seconds=step.reduction.exposed + step.waited.transfer,
            communication_seconds=step.reduction.total + step.waited.transfer,
            bubble_seconds=step.waited.bubble,
            compute_seconds=sum(step.seconds[kind] for kind in COMPUTE),
        )

    @override
    def read_times(self) -> StepTimes:
        steps, self.timed_steps = max(1, self.timed_steps), 0
        clocks = [part.model.clock for part in self.parts.values()]
        seconds = {
            name: total for clock in clocks if clock for name, total in clock.read().items()
        }
        if self.plan.splits_backward or any(part.synchronised for part in self.parts.values()):
            # Weight gradients come later, all together; or the times include waits for others.
            seconds = {}
        transfer, self.transfer_seconds = self.transfer_seconds / steps, 0.0
        return StepTimes({name: total / steps for name, total in seconds.items()}, transfer)

    @override
    def check_plan(self, plan: Plan) -> None:
        config, size, classes = self.config, self.index.image_shape[0], self.index.classes
        boundaries = input_boundaries(self.components, config, size, classes)
        check_batches(config, plan, self.components, boundaries, len(self.train_rows))

    @override
    def change_plan(self, plan: Plan) -> None:
        if not is_same_layout(self.plan, plan):
            self.runtime = under_plan(
                *(self.runtime, self.config, self.plan, plan, self.components),
                self.index.image_shape[0],
                self.world,
            )
            for name in self.spoiled:
                self._spoil(name)
        self.plan = plan

    @override
    def evaluate(self, batches: Iterable[tuple[Feed, int]]) -> tuple[float, float]:
        totals = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)
        for feed, batch_size in batches:
            todo = self.program(batch_size, is_training=False)
            step = self.runtime.evaluate(Step(todo, feed.images, feed.labels))
            if step.loss_sum is not None and step.correct is not None:
                totals += torch.stack([step.loss_sum.double(), step.correct.double()])
        loss_sum, correct = totals.tolist()
        return loss_sum, correct

    @override
    def diagnose(self, record: StepRecord) -> str:
        self._seed(record.position)
        todo = self.program(record.batch_size, is_training=True)
        explanation = diagnose(self.runtime, self.plan, self.world, todo, record)
        self.read_times()  # drops the times of the diagnosis
        return explanation

    @override
    def align_clocks(self) -> None:
        if self.runtime.exchange is not None:
            with self.activity.doing("comparing the hosts' clocks"):
                self.runtime.exchange.align_clocks()

    @override
    def write_trace(self) -> None:
        if self.runtime.observer.events and self.config.trace is not None:
            write_trace(self.runtime, self.world, self.config.trace)

    @override
    def agree(self) -> None:
        layout.agree_on_weights(self.plan, self.parts, self.digests(), self.world)

    @override
    def start_from(self, path: Path) -> str:
        last = self.plan.stages[-1].components[-1]
        values, is_other = weights.read(path, self.config.model, self.shapes, last)
        layout.put_tensors(self.parts, values)
        return f"started from {path}" + (f"; {last} keeps its initial weights" if is_other else "")

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that this rank holds, by name."""
        return {
            name: tensor
            for part in self.parts.values()
            for name, tensor in part.model.tensors().items()
        }

    @override
    def digests(self) -> dict[str, str]:
        return {
            name: digest
            for part in self.parts.values()
            for name, digest in part.model.digests().items()
        }

    @override
    def fingerprints(self) -> dict[int, int]:
        return {number: part.model.fingerprint() for number, part in self.parts.items()}

    @override
    def share(self) -> dict[str, np.ndarray]:
        return self.copies.of(layout.local_share(self.plan, self.parts, self.world.rank))

    @override
    def expected(self, was_updated: bool) -> dict[str, Shape]:
        expected = {f"{MODEL}{name}": tuple(value.shape) for name, value in self.tensors().items()}
        for part in self.parts.values():
            if part.optimizer is None or not was_updated:
                continue  # an optimizer has no state before its first update
            for name, parameter in part.model.parameters().items():
                entries = state_shapes(self.config, parameter.shape)
                expected |= {f"{OPTIMIZER}{name}/{key}": shape for key, shape in entries.items()}
        return expected

    @override
    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        state, optimizer = store.by_kind(
            {name: layout.to_tensor(array) for name, array in arrays.items()}
        )
        layout.put_state(self.parts, state, optimizer)

    @override
    def holders(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(
                rank for rank, share in zip(stage.ranks, stage.shares, strict=True) if share
            )
            for stage in self.plan.stages
            for name in stage.components
        }

    @override
    def spoil(self, component: str, is_due: Callable[[], bool]) -> None:
        self.spoiled.setdefault(component, []).append(is_due)
        if len(self.spoiled[component]) == 1:
            self._spoil(component)

    def _spoil(self, name: str) -> None:
        """Make a component emit NaN when that is due, if this rank holds it."""
        held = (part.model for part in self.parts.values() if name in part.model.calls)
        model = next(held, None)
        if model is None:
            return
        compute, dues = model.calls[name], self.spoiled[name]

        def spoiled(inputs: Tensor) -> Tensor:
            output = compute(inputs)
            is_due = torch.is_grad_enabled() and any(due() for due in dues)
            return output * torch.nan if is_due else output

        model.calls[name] = spoiled

    @override
    def allocate_memory(self, count: int) -> None:
        torch.empty(count, dtype=torch.uint8, device=self.runtime.device)

    @override
    def memory_bytes(self) -> float:
        if self.device == "cuda":
            return float(torch.cuda.memory_allocated(self.runtime.device))
        return super().memory_bytes()

    @override
    def peak_memory_bytes(self) -> int:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated(self.runtime.device)
        return super().peak_memory_bytes()

    @override
    def celsius(self) -> float:
        if self.device == "cuda":
            with suppress(Exception):  # the driver's library may be missing or fail
                return float(torch.cuda.temperature(self.runtime.device))
            return math.nan
        return super().celsius()

    def _seed(self, position: int) -> None:
        """Seed the generators that a step can draw from.

        Not by torch.manual_seed: it takes 0.5 ms, because it seeds the generators of all devices.
        """
        seed = step_seed(self.config.seed, position, self.world.rank)
        self.runtime.settings.draws.seed = step_seed(self.config.seed, position, None)
        torch.default_generator.manual_seed(seed)
        if self.device == "cuda":
            torch.cuda.manual_seed(seed)


def read_later(value: Tensor | None) -> Callable[[], float]:
    """Return a function that returns the number in a tensor, 0.0 for None.

    The copy from a GPU starts at once.
    """
    if value is None:
        return lambda: 0.0
    if value.device.type == "cpu":
        return lambda: float(value)
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> float:
        copied.synchronize()
        return float(host)

    return read
