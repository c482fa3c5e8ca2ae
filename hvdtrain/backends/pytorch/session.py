"""A run's session in PyTorch: steps of a plan, the diagnosis of bad ones, and migration.

A bad step makes no update and its random draws are seeded, so that it can be repeated as long as
its images are in memory. The ranks learn of it after the next step (on a GPU after the one after
that), and by then the weights have the update of that step, if it was a good one.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hvdtrain import device as devices
from hvdtrain.backends.pytorch.build import build_runtime, check_batches, input_boundaries
from hvdtrain.backends.pytorch.parts import set_learning_rate, set_progress
from hvdtrain.backends.pytorch.state import TorchState, named_state, put_arrays, to_array
from hvdtrain.checkpoint.store import EXTRA
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import InputSize
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import Index
from hvdtrain.device import Mark
from hvdtrain.engine.feed import Feed, step_seed, take_rows, views
from hvdtrain.engine.machine import machine_of
from hvdtrain.engine.session import (
    Faults,
    Migration,
    PendingStep,
    Session,
    Spent,
    StepInput,
    StepOutcome,
    StepTimes,
    Timeline,
)
from hvdtrain.health.failure import Sighting, bad_step_words
from hvdtrain.host.activity import Activity
from hvdtrain.host.process import return_freed_memory
from hvdtrain.models import weights
from hvdtrain.models.component import Component
from hvdtrain.options.requests import NO_SYNC, Server
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.runtime import (
    Logits,
    Runtime,
    Step,
    copied_buffers,
    read_later,
    restore_buffers,
)
from hvdtrain.parallel.stage import Part, StageModel
from hvdtrain.plan import schedule, trace
from hvdtrain.plan.cut import COMPUTE, Cut, cut
from hvdtrain.plan.plan import Plan, is_same_layout, moves
from hvdtrain.plan.schedule import Program
from hvdtrain.plan.trace import StepMarks
from hvdtrain.sync.collectives import reduction_library
from hvdtrain.sync.gradients import all_finite
from hvdtrain.world import World


def _outcome(
    read: Callable[[], tuple[float, bool]],
    marks: StepMarks,
    met: tuple[Mark, Mark],
    device: torch.device,
) -> StepOutcome:
    """Return the outcome of a step, with a meeting of the replicas after it."""
    loss_sum, is_bad = read()
    seconds, meeting = marks.seconds(), met[1] - met[0]
    spent = Spent(
        exposed=seconds.exposed + seconds.transfer + meeting,
        communication=seconds.reduction + seconds.transfer + meeting,
        bubble=seconds.bubble,
        compute=sum(seconds.spent[kind] for kind in COMPUTE),
        work=sum(seconds.spent.values()) if devices.is_queued(device) else None,
    )
    return StepOutcome(loss_sum, is_bad, spent)


MOST_STEPS = 1000  # whose marks are kept


@dataclass
class Times:
    """Times of this rank's steps since they were last read."""

    state: TorchState
    steps: list[StepMarks] = field(default_factory=list)

    def add(self, step: StepMarks) -> None:
        """Count a step, whose marks are read later."""
        if len(self.steps) == MOST_STEPS:
            self.read()  # nothing else reads them in epochs of a step or two
        self.steps.append(step)

    def read(self) -> StepTimes:
        """Return the means once the device has done the steps, and start again from zero."""
        devices.synchronize(self.state.runtime.device)
        steps, parts = max(1, len(self.steps)), self.state.parts.values()
        clocks = [part.model.clock for part in parts]
        seconds = {
            name: total for clock in clocks if clock for name, total in clock.read().items()
        }
        if self.state.plan.splits_backward or any(part.synchronised for part in parts):
            # Weight gradients come later, all together; or the times include waits for others.
            seconds = {}
        transfer = sum(step.seconds().transfer for step in self.steps) / steps
        self.steps.clear()
        return StepTimes({name: total / steps for name, total in seconds.items()}, transfer)


@dataclass
class TorchFaults(Faults):
    """Faults in this rank's stages.

    Attributes:
        spoiled: by component, functions that return whether its output becomes NaN.
    """

    state: TorchState
    spoiled: dict[str, list[Callable[[], bool]]] = field(default_factory=dict)

    @override
    def spoil(self, component: str, is_due: Callable[[], bool]) -> None:
        self.spoiled.setdefault(component, []).append(is_due)
        if len(self.spoiled[component]) == 1:
            self._spoil(component)

    @override
    def allocate_memory(self, count: int) -> None:
        torch.empty(count, dtype=torch.uint8, device=self.state.runtime.device)

    def renew(self) -> None:
        """Inject the same faults into the stages of another plan."""
        for name in self.spoiled:
            self._spoil(name)

    def _spoil(self, name: str) -> None:
        """Make a component emit NaN when that is due, if this rank holds it."""
        held = (part.model for part in self.state.parts.values() if name in part.model.calls)
        model = next(held, None)
        if model is None:
            return
        compute, dues = model.calls[name], self.spoiled[name]

        def spoiled(inputs: Tensor) -> Tensor:
            output = compute(inputs)
            is_due = torch.is_grad_enabled() and any(due() for due in dues)
            return output * torch.nan if is_due else output

        model.calls[name] = spoiled


@dataclass
class TorchTimeline(Timeline):
    """The events of the runtime of each rank, and the Chrome trace of the first steps."""

    state: TorchState
    activity: Activity

    @override
    def align(self) -> None:
        if (exchange := self.state.runtime.exchange) is not None:
            with self.activity.doing("comparing the hosts' clocks"):
                exchange.align_clocks()

    @override
    def write(self) -> None:
        runtime, world, path = self.state.runtime, self.state.world, self.state.config.trace
        observer = runtime.observer
        if observer.events is None or path is None:
            return
        offset = runtime.exchange.offset_to_first_clock() if runtime.exchange else 0.0
        events = [
            event._replace(start=event.start + offset, end=event.end + offset)
            for event in observer.events
        ]
        observer.events = None
        everywhere = world.gather_on_first(events)
        if any(everywhere):
            trace.write_trace(Path(path), [event for rank in everywhere for event in rank])


@dataclass(kw_only=True)
class TorchSession(Session):
    """A `Session` under any plan.

    Attributes:
        last_form: the batch size of the last program, and whether it was one of training.
    """

    state: TorchState
    times: Times
    last_form: tuple[int, bool] | None = None
    libraries = ("torch",)

    @property
    def runtime(self) -> Runtime:
        """The interpreter of the plan on this rank."""
        return self.state.runtime

    @property
    @override
    def measures(self) -> tuple[str, ...]:
        return tuple(self.runtime.settings.loss.measures)

    @property
    @override
    def evaluation_images(self) -> int:
        # With a memory limit, the planner counted the memory of one training batch.
        is_limited = self.config.memory_gib is not None
        return schedule.evaluation_images(
            self.plan, self.config.batch_size if is_limited else None
        )

    def cut(self, batch_size: int, is_training: bool) -> Cut:
        """Return how a global batch of this size is split among ranks and micro-batches."""
        return cut(schedule.plan_for(self.plan, is_training), batch_size)

    def program(self, batch_size: int, is_training: bool) -> Program:
        """Return this rank's program for a global batch of this size."""
        return schedule.program_of(self.plan, batch_size, self.world.rank, is_training)

    def _next_program(self, batch_size: int, is_training: bool) -> Program:
        """Return the program to run next; under a memory limit, return freed memory before it.

        Blocks that steps of another size have freed do not fit: the process would keep them and
        allocate as many again.
        """
        form = batch_size, is_training
        if self.config.memory_gib is not None and form != self.last_form:
            return_freed_memory()
        self.last_form = form
        return self.program(batch_size, is_training)

    @property
    @override
    def replicas_agree(self) -> bool:
        return not any(part.meetings.differ for part in self.state.parts.values())

    @override
    def meet(self) -> None:
        for part in self.state.parts.values():
            part.meetings.meet()

    @override
    def counted(self) -> Mapping[str, float]:
        return self.state.counted()

    @override
    def summed_by(self) -> str | None:
        config = self.config
        if isinstance(config.sync_request, Server):
            return None
        replicated = any(len(stage.ranks) > 1 for stage in self.plan.stages)
        device = self.state.runtime.device
        return reduction_library(config.reduce_with, self.world, device) if replicated else None

    @override
    def local_rows(self, batch: Rows, is_training: bool) -> tuple[Rows, Rows]:
        parts, rank = self.cut(len(batch), is_training).parts, self.world.rank
        first, last = (parts[stage].get(rank, ()) for stage in (0, self.plan.last))
        return take_rows(batch, first), take_rows(batch, last)

    @override
    def train(self, step: StepInput) -> PendingStep:
        feed, position = step.feed, step.position
        total = self.config.total_samples(len(self.train_rows))
        done = position / total, min(1.0, (position + step.batch_size) / total)
        for part in self.state.parts.values():
            if part.optimizer is not None:
                set_learning_rate(part.optimizer, step.rate)
                set_progress(part.optimizer, *done)
        self._seed(position)
        todo = self._next_program(step.batch_size, is_training=True)
        epoch, offset = divmod(position, len(self.train_rows))
        for part in self.state.parts.values():
            part.meetings.before_step(epoch)
        trained = Step(todo, feed.images, feed.labels, loss_scale=step.loss_scale)
        self.runtime.train(trained)
        met = self._after_step(offset // self.config.batch_size + 1)
        if self.config.is_adaptive and self.world.size > 1:
            self.times.add(trained.marks)
        device = self.runtime.device
        outcome = partial(_outcome, read_later(trained, device), trained.marks, met, device)
        samples = todo.cut.samples(self.plan.last, self.world.rank)
        return PendingStep(samples, outcome, trained.norm, trained.is_bad)

    def _after_step(self, step: int) -> tuple[Mark, Mark]:
        """Let replicas meet if it is due after a step of the epoch; return start and end."""
        started = devices.mark(self.runtime.device)
        if self.config.sync_request == NO_SYNC:
            return started, started
        with self.activity.doing("meeting the other replicas"):
            for part in self.state.parts.values():
                part.meetings.after_step(step)
        return started, devices.mark(self.runtime.device)

    @override
    def evaluate(self, batches: Iterable[tuple[Feed, int]]) -> list[float]:
        shape = 1 + len(self.measures)
        totals = torch.zeros(shape, dtype=torch.float64, device=self.runtime.device)
        seen = views(self.config)
        for feed, batch_size in batches:
            todo = self._next_program(batch_size, is_training=False)
            logits: Logits = {}
            for weight, view in seen:
                step = Step(todo, view(feed.pixels), feed.labels, weight=weight, logits=logits)
                self.runtime.evaluate(step)
            if step.loss_sum is not None:
                totals += torch.stack([step.loss_sum.double(), *step.measured.values()])
        sums: list[float] = totals.tolist()
        return sums

    @override
    def diagnose(self, step: StepInput) -> str:
        self._seed(step.position)
        todo = self.program(step.batch_size, is_training=True)
        explanation = diagnose(self.runtime, self.plan, self.world, todo, step)
        self.times.read()  # drops the times of the diagnosis
        return explanation

    def _seed(self, position: int) -> None:
        """Seed the generators that a step can draw from."""
        seed = step_seed(self.config.seed, position, self.world.rank)
        self.runtime.settings.draws.seed = step_seed(self.config.seed, position, None)
        devices.seed(self.runtime.device, seed)


def diagnose(runtime: Runtime, plan: Plan, world: World, program: Program, step: StepInput) -> str:
    """Repeat a step without updating anything, and return what is wrong with it. Collective.

    The caller has reset the random generators to their state before the step.
    """
    sightings, places = list[Sighting](), _places(plan)
    kept = copied_buffers(runtime.parts)
    observer, activity = runtime.observer, runtime.observer.activity
    events, observer.events = observer.events, None
    assert activity is not None
    newest, _ = activity.now()
    activity.step(step.step)
    with _watched(runtime.parts, places, world.rank, sightings):
        gradients = runtime.gradients(Step(program, step.feed.images, step.feed.labels))
    observer.events = events
    activity.step(newest)
    restore_buffers(runtime.parts, kept)
    with activity.doing("gathering what all ranks saw in a bad step"):
        reports = world.gather((sightings, _norms(runtime.parts, gradients)))
    seen = [sighting for theirs, _ in reports for sighting in theirs]
    norms = _largest([theirs for _, theirs in reports])
    return bad_step_words(seen, norms, places)


def _largest(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest norm of each component over all ranks, or NaN if one of them is NaN.

    Ranks that do not share their gradients have different norms, and a server has none but zeros.
    """
    largest: dict[str, float] = {}
    for name, norm in (item for report in reports for item in report.items()):
        if name not in largest or norm > largest[name] or math.isnan(norm):
            largest[name] = norm
    return largest


def _norms(parts: Mapping[int, Part], gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of the gradients of each component that this rank holds."""
    norms = {}
    for part in parts.values():
        for component in part.model.components:
            values = [
                value for name, value in gradients.items() if name.startswith(f"{component}.")
            ]
            if values:
                norms[component] = float(torch.nn.utils.get_total_norm(values))
    return norms


def _places(plan: Plan) -> dict[str, int]:
    names = [name for stage in plan.stages for name in stage.components]
    return {name: place for place, name in enumerate(names)}


@contextmanager
def _watched(
    parts: Mapping[int, Part], places: Mapping[str, int], rank: int, sightings: list[Sighting]
) -> Iterator[None]:
    """Note the components whose output is not finite although their input is."""
    models = [part.model for part in parts.values()]
    before = [dict(model.calls) for model in models]
    for model in models:
        for name, call in model.calls.items():
            model.calls[name] = _looking(model, name, call, places[name], rank, sightings)
    try:
        yield
    finally:
        for model, calls in zip(models, before, strict=True):
            model.calls = calls


def _looking(
    model: StageModel,
    name: str,
    call: Callable[[Tensor], Tensor],
    place: int,
    rank: int,
    sightings: list[Sighting],
) -> Callable[[Tensor], Tensor]:
    def look(inputs: Tensor) -> Tensor:
        output = call(inputs)
        if not all_finite([output.detach()]) and all_finite([inputs.detach()]):
            weights = list(model.components[name].parameters())
            has_bad_weights = not all_finite([value.detach() for value in weights])
            sightings.append(Sighting(place, name, rank, has_bad_weights))
        return output

    return look


MOVE_TAG = 1000  # and above


@dataclass(kw_only=True)
class TorchMigration(Migration):
    """The migration of a run in PyTorch.

    Attributes:
        epoch_length: number of training samples.
    """

    state: TorchState
    times: Times
    faults: TorchFaults
    components: Sequence[Component]
    index: Index
    epoch_length: int

    @override
    def check(self, plan: Plan) -> None:
        config, size, form = self.state.config, self.index.input_size, self.index.target_form
        boundaries = input_boundaries(self.components, config, size, form)
        check_batches(config, plan, self.components, boundaries, self.epoch_length)

    @override
    def change(self, plan: Plan) -> None:
        state = self.state
        if not is_same_layout(state.plan, plan):
            state.counted_before = state.counted()
            state.runtime = under_plan(
                state.runtime,
                state.config,
                state.plan,
                plan,
                self.components,
                self.index.input_size,
                state.world,
            )
            self.faults.renew()
            machine_of(state.world).migrated(state.plan, plan)
        state.plan = plan

    @override
    def read_times(self) -> StepTimes:
        return self.times.read()

    @override
    def exchange(self) -> Exchange:
        world, device = self.state.world, self.state.runtime.settings.images.device
        return machine_of(world).whole_exchange(world, device)


def under_plan(
    runtime: Runtime,
    config: TrainConfig,
    before: Plan,
    after: Plan,
    components: Sequence[Component],
    image_size: InputSize,
    world: World,
) -> Runtime:
    """Return the interpreter of another plan with the same training state. Collective.

    The state is weights, running statistics and optimizer. Each rank receives what it needs as
    arrays, named as in a checkpoint, and loads them as it would load a checkpoint.
    """
    arrays = state_under(before, after, runtime.parts, world)
    migrated = build_runtime(
        config, after, components, runtime.settings.images, image_size, world, before=runtime
    )
    put_arrays(migrated.parts, arrays)
    # The table `do` refers to methods of the old runtime: this cycle would keep the runtime and
    # its weights in memory until the collector runs.
    runtime.do, runtime.parts = {}, {}
    gc.collect()
    return migrated


def state_under(
    before: Plan, after: Plan, parts: Mapping[int, Part], world: World
) -> dict[str, np.ndarray]:
    """Return the state that this rank needs under another plan, from all ranks. Collective.

    It has the form of a checkpoint. Arrays that the rank holds already share the memory of its
    tensors.
    """
    held = _by_component(parts)
    planned, sending = moves(before, after), []
    needed: dict[str, np.ndarray] = {}
    for number, move in enumerate(planned):
        if move.sender == world.rank:
            sending.append(world.send(held[move.component], move.receiver, MOVE_TAG + number))
    for number, move in enumerate(planned):
        if move.receiver == world.rank:
            needed |= world.receive(move.sender, MOVE_TAG + number)
    for wait in sending:
        wait()
    for stage in after.stages:
        if world.rank in stage.ranks:
            for component in stage.components:
                needed |= held.get(component, {})
    return needed


def _by_component(parts: Mapping[int, Part]) -> dict[str, dict[str, np.ndarray]]:
    """Return the state of each component that this rank holds, named as in a checkpoint."""
    held: dict[str, dict[str, np.ndarray]] = {}
    for part in parts.values():
        named = named_state(part, part.model.tensors().keys())
        for component, module in part.model.components.items():
            tensors = {
                key: tensor
                for name, _ in (*module.named_parameters(), *module.named_buffers())
                for key, tensor in named[f"{component}.{name}"].items()
            }
            extra = weights.saved(module, f"{component}.")
            tensors |= {f"{EXTRA}{name}": tensor for name, tensor in extra.items()}
            held[component] = {
                key: to_array(tensor.detach().cpu()) for key, tensor in tensors.items()
            }
    return held
