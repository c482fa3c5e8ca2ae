"""Measures what a rank's actions take: the runtime itself, run on this rank alone.

Real modules do a step's actions in the order of the schedule, with their real gradient buffers;
only hand-overs and reductions are left out, and what would have arrived is random. All that a step
changes is put back afterwards, so that a run can be profiled between any two of its steps.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.models.component import IMAGE_CHANNELS
from hvdtrain.parallel import schedule
from hvdtrain.parallel.actions import COMMUNICATION, Action, boundary, rows_handed
from hvdtrain.parallel.batchnorm import SynchronisedBatchNorm
from hvdtrain.parallel.cut import Cut, Share
from hvdtrain.parallel.form import Form
from hvdtrain.parallel.handover import Handover
from hvdtrain.parallel.part import Part
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.program import Program, program
from hvdtrain.parallel.reduce import Gradients
from hvdtrain.parallel.runtime import Runtime, Step
from hvdtrain.parallel.simulate import Costs
from hvdtrain.parallel.waiting import ReductionTime
from hvdtrain.world import World

WARM_UP = 2

Table = dict[tuple[int, str, int], float]  # (stage, kind of action, samples) -> seconds


def profile_parts(
    runtime: Runtime,
    plan: Plan,
    cut: Cut,
    image_size: int,
    repeats: int = 5,
    here: World | None = None,
) -> Table:
    """Seconds of each action of a training step on what this rank holds.

    Kinds are those of the plan's schedule on this rank: F and B, or I and W where it splits,
    LOAD, and STEP (of no samples). A cost is the mean over the micro-batches of one size, and
    of these the median over the repeats: what a step, which does them all, takes of it.

    Args:
        runtime: of this rank, between two steps.
        image_size: height and width of the images.
        repeats: steps that are measured, at least.
        here: the world, if all ranks call this at once (it is collective then): none stops
            before the slowest, so that caches and memory are shared as in a step.
    """
    alone = _runtime_alone(runtime)
    ready = _without_communication(plan, cut, runtime.rank)
    step = _random_input(plan, cut, runtime.rank, image_size)
    found: list[Table] = []
    with (
        _unchanged(runtime.parts, runtime.device) as put_weights_back,
        _not_gathering(plan, alone),
    ):
        for _ in range(WARM_UP):
            began = time.perf_counter()
            _run(alone, ready, step)
            seconds = time.perf_counter() - began
            _fill(alone.handover)
            put_weights_back()
        if here is not None:
            seconds = max(here.gather(seconds))
            here.barrier()
        until = time.perf_counter() + (repeats * seconds if here else 0.0)
        while len(found) < repeats or time.perf_counter() < until:
            found.append(_run(alone, ready, step))
            put_weights_back()
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


def measured_costs(
    plan: Plan,
    cut: Cut,
    forms: Sequence[Form],
    tables: Mapping[int, Table],
    latency: float,
    seconds_a_byte: float,
) -> Costs:
    """What a simulation of the plan needs; reductions are free.

    Args:
        forms: what crosses each boundary.
        tables: of all ranks, from `profile_parts` under the same schedule.
        latency, seconds_a_byte: of a hand-over: alpha and beta.
    """

    def compute(rank: int, action: Action) -> float:
        return tables[rank][action.stage, action.kind, _rows(cut, rank, action)]

    def hand_over(sender: int, receiver: int, action: Action) -> float:
        size = forms[boundary(action.stage, action.kind)].row_bytes
        return latency + rows_handed(cut, sender, receiver, action) * size * seconds_a_byte

    return Costs(compute, hand_over, lambda stage: 0.0)


@dataclass
class _Unreduced:
    """A stage's gradients, which are neither reduced nor announced to anybody."""

    own: Gradients

    def announce(self, share: Share) -> None:
        """Nobody is told."""

    def start(self, share: Share) -> None:
        """Nothing is sent."""

    def finish(self) -> ReductionTime:
        """Nothing is in flight."""
        return ReductionTime()

    def are_finite(self) -> bool:
        """Whether all gradients are numbers, asked in the stage's own way."""
        return self.own.are_finite()

    def zero(self) -> None:
        """Forget the gradients, in the stage's own way."""
        self.own.zero()


def _runtime_alone(runtime: Runtime) -> Runtime:
    """The same parts under a runtime that exchanges nothing."""
    parts = {
        stage: replace(part, gradients=_Unreduced(part.gradients))
        for stage, part in runtime.parts.items()
    }
    handover = Handover(runtime.rank, runtime.handover.forms, None, runtime.device)
    return Runtime(
        *(runtime.rank, parts, runtime.last, runtime.images, handover),
        precision="bf16" if runtime.bf16 else "fp32",  # to a runtime all others are the same
        rule=runtime.rule,
        label_smoothing=runtime.label_smoothing,
        keep_events=True,
    )


def _without_communication(plan: Plan, cut: Cut, rank: int) -> Program:
    step = schedule.training_step(plan, cut)[rank]
    kept = [action for action in step if action.kind not in COMMUNICATION]
    return program(plan, cut, kept, rank)


def _random_input(plan: Plan, cut: Cut, rank: int, size: int) -> Step:
    shape = (cut.samples(0, rank), size, size, IMAGE_CHANNELS)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return Step(images, np.zeros(cut.samples(plan.last, rank), np.int64))


def _run(alone: Runtime, ready: Program, batch: Step) -> Table:
    """One step; the mean of the actions of each stage, kind and number of samples."""
    alone.events = []
    alone.run(ready, Step(batch.images, batch.labels))
    found: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for event in alone.events:
        rows = _rows(ready.cut, alone.rank, event.action)
        found[event.action.stage, event.action.kind, rows].append(event.end - event.start)
    return {key: statistics.mean(values) for key, values in found.items()}


def _rows(cut: Cut, rank: int, action: Action) -> int:
    """Samples that an action of `rank` works on; 0 for one of the whole stage."""
    return 0 if action.microbatch is None else cut.rows(action.stage, rank, action.microbatch)


@contextmanager
def _unchanged(parts: Mapping[int, Part], device: torch.device) -> Iterator[Callable[[], None]]:
    """Put back, in the end, all that steps change; what is given puts weights and buffers back.

    Between steps that is enough: the optimizer's first step is unlike all others.
    """
    saved = {
        number: {name: value.detach().clone() for name, value in part.model.tensors().items()}
        for number, part in parts.items()
    }
    optimizers = [part.optimizer for part in parts.values() if part.optimizer is not None]
    states = [_copied(optimizer) for optimizer in optimizers]

    def put_weights_back() -> None:
        for number, part in parts.items():
            part.model.put(saved[number])

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield put_weights_back
        finally:
            put_weights_back()
            for part in parts.values():
                part.gradients.zero()
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.state.clear()
                optimizer.state.update(state)


def _copied(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    """An optimizer's state, of which a step changes nothing."""
    return {
        parameter: {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
    }


@contextmanager
def _not_gathering(plan: Plan, runtime: Runtime) -> Iterator[None]:
    """Let synchronised batch norms find as many replicas as they have, without asking them."""
    layers = {
        layer: (stage, layer.all_gather)
        for stage, part in runtime.parts.items()
        for component in part.model.components.values()
        for layer in component.modules()
        if isinstance(layer, SynchronisedBatchNorm)
    }
    for layer, (stage, _) in layers.items():
        layer.all_gather = partial(_repeated, len(plan.stages[stage].ranks))
    try:
        yield
    finally:
        for layer, (_, all_gather) in layers.items():
            layer.all_gather = all_gather


def _repeated(times: int, tensor: Tensor) -> Tensor:
    return tensor.expand(times, *tensor.shape)


def _fill(handover: Handover) -> None:
    """Give the buffers values, which they keep: what new memory holds may be slow to compute."""
    for buffers in handover._pool.values():
        for buffer in buffers:
            buffer.normal_()
