"""Times a rank's actions with the runtime itself, run on this rank alone.

Unlike a chain of components (`chain.py`) this includes what the runtime does around them: real
gradient buffers, whole stages in the order of the schedule, several micro-batches in flight. Only
transfers and all-reduces are left out, and received data is random. Everything that a step changes
is restored afterwards, so a run can be profiled between any two of its steps.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.device import generators, now
from hvdtrain.models.find import IMAGE_CHANNELS
from hvdtrain.parallel.exchange import Boundaries, Form
from hvdtrain.parallel.runtime import Observer, Runtime, Step
from hvdtrain.parallel.stage import Part
from hvdtrain.plan import schedule
from hvdtrain.plan.cut import COMMUNICATION, Action, Cut, Share, boundary, rows_sent
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.schedule import Program, program
from hvdtrain.plan.simulate import Costs
from hvdtrain.plan.trace import Reduction
from hvdtrain.planner.chain import LEAST, repeated, without_gathering
from hvdtrain.sync.gradients import Gradients, all_finite
from hvdtrain.world import World

Table = dict[tuple[int, str, int], float]  # (stage, kind of action, samples) -> seconds


def profile_parts(
    runtime: Runtime, plan: Plan, cut: Cut, image_size: int, world: World | None = None
) -> Table:
    """Return the seconds of each action of a training step on this rank.

    The kinds of actions are those of the plan's schedule on this rank: F and B, or I and W if it
    splits backwards, LOAD, and STEP (with 0 samples). A value is the median over the repeats of
    the mean over the micro-batches of one size.

    Args:
        runtime: the runtime of this rank, between two steps.
        image_size: height and width of the images.
        world: given if all ranks call this at once; the call is then collective, and no rank stops
            before the slowest one, so that caches and memory are shared as in a step.
    """
    alone = _runtime_alone(runtime)
    ready = _without_communication(plan, cut, runtime.rank)
    batch = _random_input(plan, cut, runtime.rank, image_size)
    with (
        _unchanged(runtime.parts, runtime.device) as put_weights_back,
        without_gathering(plan, alone.parts),
    ):

        def once() -> Table:
            table = _run(alone, ready, batch)
            put_weights_back()
            return table

        once()  # the first step of an optimizer differs from all others
        _fill(alone.boundaries)
        started = now(alone.device)
        once()
        seconds, least_seconds = now(alone.device) - started, 0.0
        if world is not None:
            least_seconds = LEAST * max(world.gather(seconds))
            world.barrier()
        tables = repeated(once, least_seconds)
    return {key: statistics.median(table[key] for table in tables) for key in tables[0]}


def measured_costs(
    plan: Plan,
    cut: Cut,
    forms: Sequence[Form],
    tables: Mapping[int, Table],
    latency: float,
    seconds_per_byte: float,
) -> Costs:
    """Return the costs that a simulation of the plan needs; all-reduces are free.

    Args:
        forms: form of the tensors that cross each boundary.
        tables: results of `profile_parts` of all ranks, under the same schedule.
        latency, seconds_per_byte: alpha and beta of a transfer.
    """

    def compute(rank: int, action: Action) -> float:
        return tables[rank][action.stage, action.kind, _rows(cut, rank, action)]

    def hand_over(sender: int, receiver: int, action: Action) -> float:
        size = forms[boundary(action.stage, action.kind)].row_bytes
        return latency + rows_sent(cut, sender, receiver, action) * size * seconds_per_byte

    return Costs(compute, hand_over)


@dataclass
class _Unreduced(Gradients):
    """A stage's gradients, which are not reduced and not announced to other ranks."""

    gradients: Gradients

    def announce(self, share: Share) -> None:
        """Do nothing: there are no other ranks."""

    def start(self, share: Share) -> None:
        """Do nothing."""

    def finish(self) -> Reduction | None:
        """Return a time of zero: nothing is in flight."""
        return None

    def are_finite(self) -> bool:
        """Return whether all gradients are finite, by the test of the stage if it is local."""
        if self.gradients.is_divided:
            return all_finite(self.reduced())
        return self.gradients.are_finite()

    def verdict(self) -> Tensor | None:
        """Return whether a gradient is not finite."""
        return self.gradients.verdict()

    def accept(self) -> None:
        """Do nothing: a trial changes no state."""

    def zero(self) -> None:
        """Zero the gradients, as the stage does."""
        self.gradients.zero()

    def counted(self) -> Mapping[str, float]:
        """Return nothing: nothing is sent."""
        return {}

    def updated(self) -> Mapping[str, nn.Parameter]:
        """Return what the optimizer updates."""
        return self.gradients.updated()


def _runtime_alone(runtime: Runtime) -> Runtime:
    """Return a runtime with the same components that exchanges nothing."""
    parts = {
        stage: replace(part, gradients=_Unreduced(part.gradients))
        for stage, part in runtime.parts.items()
    }
    boundaries = Boundaries(runtime.rank, runtime.boundaries.forms, None, runtime.device)
    return Runtime(runtime.settings, parts, boundaries, Observer(events=[]))


def _without_communication(plan: Plan, cut: Cut, rank: int) -> Program:
    step = schedule.training_step(plan, cut)[rank]
    kept = [action for action in step if action.kind not in COMMUNICATION]
    return program(plan, cut, kept, rank)


def _random_input(plan: Plan, cut: Cut, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (cut.samples(0, rank), size, size, IMAGE_CHANNELS)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return images, np.zeros(cut.samples(plan.last, rank), np.int64)


def _run(alone: Runtime, ready: Program, batch: tuple[np.ndarray, np.ndarray]) -> Table:
    """Run one step; return the mean seconds by stage, kind and number of samples."""
    events = alone.observer.events = []
    alone.run(Step(ready, *batch))
    seconds: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for event in events:
        rows = _rows(ready.cut, alone.rank, event.action)
        seconds[event.action.stage, event.action.kind, rows].append(event.end - event.start)
    return {key: statistics.mean(values) for key, values in seconds.items()}


def _rows(cut: Cut, rank: int, action: Action) -> int:
    """Return the samples that an action of `rank` works on; 0 for an action of the whole stage."""
    return 0 if action.microbatch is None else cut.rows(action.stage, rank, action.microbatch)


@contextmanager
def _unchanged(parts: Mapping[int, Part], device: torch.device) -> Iterator[Callable[[], None]]:
    """Restore everything that steps change at the end; yield a function that restores the weights.

    The function restores buffers, too. That suffices between steps: the first step of an optimizer
    differs from all others.
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

    with torch.random.fork_rng(generators(device)):
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
    """Return a copy of an optimizer's state that a step does not change."""
    return {
        parameter: {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
    }


def _fill(boundaries: Boundaries) -> None:
    """Fill the buffers with random values: computing with new memory may be slow."""
    for buffers in boundaries._pool.values():
        for buffer in buffers:
            buffer.normal_()
