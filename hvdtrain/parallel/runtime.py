"""The interpreter of schedules: the state of a step, its actions, and the update at its end.

It is a table from the kind of an action to the function that runs it, and depends on no particular
schedule or strategy: a rank runs its list of actions in order. Tensors
are kept in the `Step`, by (stage, micro-batch), until the last action that needs them is done.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hvdtrain import device as devices
from hvdtrain.data.augment import Places
from hvdtrain.errors import UsageError
from hvdtrain.host.activity import Activity
from hvdtrain.models.losses import Loss, cross_entropy
from hvdtrain.parallel import halves
from hvdtrain.parallel.dropout import Draws
from hvdtrain.parallel.exchange import Boundaries, Exchange
from hvdtrain.parallel.halves import Group
from hvdtrain.parallel.stage import Images, Part
from hvdtrain.plan.cut import COMMUNICATION
from hvdtrain.plan.schedule import Key, Program, Task
from hvdtrain.plan.trace import Act, Event, StepMarks


class Held(dict[Key, tuple[Tensor, int]]):
    """Tensors by key, each kept for a fixed number of uses."""

    def put(self, key: Key, tensor: Tensor, uses: int) -> None:
        """Keep a tensor for `uses` calls of `use`."""
        if uses:
            self[key] = tensor, uses

    def use(self, key: Key) -> Tensor:
        """Return a tensor that is kept; the last use removes it."""
        tensor, uses = self.pop(key)
        self.put(key, tensor, uses - 1)
        return tensor


Logits = dict[Key, Tensor]  # of the last stage, by micro-batch


@dataclass
class Step:
    """One step of one rank.

    Attributes:
        program: the actions.
        images: uint8 [n, H, W, C], this rank's samples in the first stage, or their places.
        labels: of this rank's samples in the last stage [n], or their targets [n, ...].
        inputs: of this rank's stages, until their backward has run.
        targets: labels on the device, per micro-batch.
        outputs: of this rank's stages.
        input_gradients: gradients of `inputs`.
        pending_weights: the second halves of split backwards.
        loss_sum: over this rank's samples in the last stage.
        measured: sums of the loss's measures over the same samples, by name; evaluation only.
        loss_scale: factor of the loss; its gradients are divided by it before they are used.
        weight: of the logits of this view of the images; evaluation only.
        logits: weighted sums over the views of the images so far; evaluation only.
        marks: when its actions, waits and reductions start and end.
        is_finished: whether all gradients are reduced and clipped.
        norm: of all gradients together; NaN unless the update rule needs it.
        is_bad: whether an update was left out because of bad gradients, if the host knows it.
        verdicts: on the device, 1.0 for an update that it left out, else 0.0.
    """

    program: Program
    images: np.ndarray | Places
    labels: np.ndarray
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    targets: dict[Key, Tensor] = field(default_factory=dict)
    outputs: Held = field(default_factory=Held)
    input_gradients: Held = field(default_factory=Held)
    pending_weights: dict[Key, list[Group]] = field(default_factory=dict)
    loss_sum: Tensor | None = None
    measured: dict[str, Tensor] = field(default_factory=dict)
    loss_scale: float = 1.0
    weight: float = 1.0
    logits: Logits = field(default_factory=dict)
    marks: StepMarks = field(default_factory=StepMarks)
    is_finished: bool = False
    norm: float = math.nan
    is_bad: bool = False
    verdicts: list[Tensor] = field(default_factory=list)


def read_later(step: Step, device: torch.device) -> Callable[[], tuple[float, bool]]:
    """Return what waits for a step and reads its results, in one copy from its device."""
    losses = [] if step.loss_sum is None else [step.loss_sum]
    read = devices.read_later([*losses, *step.verdicts], device)

    def results() -> tuple[float, bool]:
        values = read()
        return sum(values[: len(losses)]), step.is_bad or any(values[len(losses) :])

    return results


@dataclass(frozen=True)
class UpdateRule:
    """The conditions under which gradients update the weights.

    A bad step has gradients that are not finite, or whose norm is above `largest_norm`.

    Attributes:
        clip_norm: scale gradients down to this norm; None disables clipping.
        largest_norm: of all gradients together, before clipping.
        skips: skip a bad step as a whole, on all ranks. Otherwise only the bad stages are not
            updated: enough if the run ends after the step. A scaled loss needs it.
        defers: leave the verdict to the device, for which the host does not wait. Then each rank
            that clips has all gradients, and the optimizer is one of PyTorch's fused ones.
    """

    clip_norm: float | None = None
    largest_norm: float = math.inf
    skips: bool = False
    defers: bool = False

    @property
    def needs_norm(self) -> bool:
        """Return whether an update needs the norm of the gradients of all stages."""
        return self.clip_norm is not None or self.largest_norm < math.inf or self.skips


def update(
    rule: UpdateRule,
    stage: int,
    parts: Mapping[int, Part],
    exchange: Exchange | None,
    step: Step,
) -> None:
    """Update the weights of a stage unless its reduced gradients are bad; reset the gradients.

    If the rule needs the norm, the first update of the step waits for the gradients of all stages.
    """
    part = parts[stage]
    is_bad = False
    if rule.defers and _may_defer(part):
        _defer(rule, part, step)
    elif not rule.needs_norm:
        _finish(part, step)
        is_bad = not part.gradients.are_finite()
        step.is_bad |= is_bad
    else:
        if not step.is_finished:
            _judge(rule, parts, exchange, step)
        is_bad = step.is_bad
    if not is_bad:
        if part.optimizer is not None:
            part.optimizer.step()
        part.gradients.after_update()
    part.gradients.zero()


def copied_buffers(parts: Mapping[int, Part]) -> dict[int, dict[str, Tensor]]:
    """Return copies of the buffers that forwards change, by stage and name."""
    return {
        number: {name: value.clone() for name, value in _changed_by_forwards(part).items()}
        for number, part in parts.items()
    }


def restore_buffers(parts: Mapping[int, Part], kept: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Restore the buffers that `copied_buffers` returned."""
    for number, part in parts.items():
        current = _changed_by_forwards(part)
        part.model.put({name: value for name, value in kept[number].items() if name in current})


def _changed_by_forwards(part: Part) -> dict[str, Tensor]:
    return part.model.statistics() | part.model.states()


def _finish(part: Part, step: Step) -> None:
    """Wait for the reductions of a part."""
    reduction = part.gradients.finish()
    if reduction is not None:
        step.marks.reductions.append(reduction)


def _judge(
    rule: UpdateRule, parts: Mapping[int, Part], exchange: Exchange | None, step: Step
) -> None:
    """Finish and clip the gradients of all stages; set `step.is_bad` and `step.norm`."""
    for part in parts.values():
        _finish(part, step)
        if step.loss_scale != 1 and (gradients := part.gradients.reduced()):
            torch._foreach_mul_(gradients, 1 / step.loss_scale)
    step.norm = total_norm(parts, exchange)
    # Written so that a NaN norm is bad, too.
    step.is_bad = not (step.norm <= rule.largest_norm and step.norm < math.inf)
    if rule.clip_norm is not None and not step.is_bad:
        clip_gradients(step.norm, rule.clip_norm, parts)
    step.is_finished = True


def _may_defer(part: Part) -> bool:
    """Return whether the optimizer's kernels leave no memory unset when they leave out an update.

    Those of SGD allocate the momentum in the first step, and do not fill it if that is bad.
    """
    optimizer = part.optimizer
    return optimizer is None or not optimizer.defaults.get("momentum") or bool(optimizer.state)


def _defer(rule: UpdateRule, part: Part, step: Step) -> None:
    """Finish and clip the gradients of a part; its optimizer changes nothing if they are bad."""
    _finish(part, step)
    verdict, gradients = part.gradients.verdict(), part.gradients.reduced()
    if rule.clip_norm is not None and gradients:
        norm = torch.nn.utils.get_total_norm(gradients)
        verdict = (~norm.isfinite()).float()
        torch._foreach_mul_(gradients, (rule.clip_norm / (norm + 1e-6)).clamp(max=1.0))
    if verdict is not None:
        step.verdicts.append(verdict)
        if part.optimizer is not None:
            part.optimizer.found_inf = verdict  # type: ignore[attr-defined] # of its kernels


def total_norm(parts: Mapping[int, Part], exchange: Exchange | None) -> float:
    """Return the norm of the reduced gradients of all stages together. Collective.

    Only the first replica of each stage contributes, or each one its slice. All ranks add in the
    same order, so that all of them compute the same bits.
    """
    square = torch.zeros(1, dtype=torch.float64)
    for part in parts.values():
        gradients = part.gradients.reduced()
        if gradients and (part.is_first_replica or part.gradients.is_divided):
            square += torch.nn.utils.get_total_norm(gradients).double().cpu() ** 2
    squares = exchange.gather_all(square) if exchange else square
    return float(squares.sum().sqrt())


def clip_gradients(norm: float, largest: float, parts: Mapping[int, Part]) -> None:
    """Scale all gradients, whose norm is `norm`, so that it is at most `largest`.

    Pascanu et al., arXiv 1211.5063, section 3.2.
    """
    scale = largest / (norm + 1e-6)
    if scale < 1:
        for part in parts.values():
            if gradients := part.gradients.reduced():
                torch._foreach_mul_(gradients, scale)


@dataclass(frozen=True)
class Settings:
    """The settings of a run that its steps depend on, the same under every plan.

    Attributes:
        images: prepares the images of the first stage.
        autocast: the dtype in which forwards run; None: that of the weights.
        rule: the conditions for an update; the default updates unless gradients are not finite.
        draws: the source of masks for the dropout layers.
    """

    images: Images
    autocast: torch.dtype | None = None
    rule: UpdateRule = field(default_factory=UpdateRule)
    loss: Loss = field(default_factory=cross_entropy)
    draws: Draws = field(default_factory=Draws)


@dataclass
class Observer:
    """The records of a rank's actions.

    Attributes:
        activity: records each action before it runs; None in measurements.
        events: every action's times, for a trace; None if they are not kept.
    """

    activity: Activity | None = None
    events: list[Event] | None = None

    def close(self) -> None:
        """Stop the watchdog of the activity."""
        if self.activity is not None:
            self.activity.close()


class Runtime:
    """Runs programs on the stage replicas that this rank holds.

    Args:
        settings: of the run.
        parts: this rank's stage replicas by stage.
        boundaries: transfers activations and gradients across this rank's boundaries.
        observer: records the actions.

    Attributes:
        rank: this rank.
        last: the number of the plan's last stage.
        exchange: None if this rank exchanges with no other.
        device: of the tensors.
        do: the function that runs an action, by its kind.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Mapping[int, Part],
        boundaries: Boundaries,
        observer: Observer,
    ) -> None:
        self.settings, self.parts, self.boundaries = settings, parts, boundaries
        self.observer = observer
        self.rank, self.last = boundaries.rank, len(boundaries.forms)
        self.exchange, self.device = boundaries.exchange, boundaries.device
        self.do: dict[str, Callable[[Step, Task], None]] = {
            "LOAD": self._load,
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_input,
            "W": self._backward_weight,
            "SEND_F": self._send_activations,
            "SEND_B": self._send_gradients,
            "RECV_F": self._post,
            "RECV_B": self._post,
            "REDUCE": self._reduce,
            "STEP": self._update,
        }

    def run(self, step: Step) -> Step:
        """Run the actions of the step's program in order; return `step` with the results."""
        activity, events, marks = self.observer.activity, self.observer.events, step.marks
        clock, note = partial(devices.mark, self.device), activity.note if activity else _ignore
        if self.exchange:
            self.exchange.waits = marks.waits
        task = None
        self.settings.draws.begin_step()
        try:
            for task in step.program.tasks:
                note(task.line)
                waits, reductions = len(marks.waits), len(marks.reductions)
                began, start = time.perf_counter(), clock()
                self.do[task.action.kind](step, task)
                pauses = marks.waits[waits:], marks.reductions[reductions:]
                marks.acts.append(Act(task.action.kind, start, clock(), *pauses))
                if events is not None:
                    devices.synchronize(self.device)
                    events += self._events(task, began, marks.acts[-1].waited)
        except Exception as error:
            if task is not None and (mistake := _mistake(task, str(error))) is not None:
                raise mistake from error
            error.add_note(f"rank {self.rank} was at {task.line if task else 'the first action'}")
            raise
        if activity:
            activity.rest()
        return step

    def train(self, step: Step) -> Step:
        """Run a training program; restore the buffers if the whole step is left out.

        `step.is_bad` is whether this rank left out an update.
        """
        skips = self.settings.rule.skips
        kept = copied_buffers(self.parts) if skips else {}
        self.run(step)
        if step.is_bad and skips:
            restore_buffers(self.parts, kept)
        return step

    def gradients(self, step: Step) -> dict[str, Tensor]:
        """Run a training program without its updates; return copies of the reduced gradients."""
        tasks = tuple(task for task in step.program.tasks if task.action.kind != "STEP")
        self.run(replace(step, program=replace(step.program, tasks=tasks)))
        if self.exchange:
            self.exchange.flush()
        gradients = {}
        for part in self.parts.values():
            part.gradients.finish()
            part.gradients.gather()
            for name, parameter in part.model.parameters().items():
                # A replica with local steps has no gradients without samples.
                value = parameter.grad
                missing = torch.zeros_like(parameter)
                gradients[name] = missing if value is None else value / step.loss_scale
            part.gradients.zero()
        return gradients

    def evaluate(self, step: Step) -> Step:
        """Run a forward-only program with the model in evaluation mode."""
        for part in self.parts.values():
            part.model.train(False)
        with torch.inference_mode():
            self.run(step)
        if self.exchange:
            self.exchange.flush()  # a STEP does so in training: outputs must live until sent
        for part in self.parts.values():
            part.model.train(True)
        return step

    def _takes_part(self, task: Task) -> bool:
        """Return whether the task has samples, or other replicas wait for this one's forward."""
        return task.rows > 0 or (self.parts[task.key[0]].synchronised and torch.is_grad_enabled())

    def _load(self, step: Step, task: Task) -> None:
        (stage, k), program = task.key, step.program
        if not self._takes_part(task):
            return
        if stage == 0:
            step.inputs[task.key] = self.settings.images(step.images[slice(*program.images[k])])
        if stage == self.last:
            labels = torch.from_numpy(step.labels[slice(*program.labels[k])])
            step.targets[task.key] = labels.to(self.device, non_blocking=True)

    def _forward(self, step: Step, task: Task) -> None:
        (stage, k), part = task.key, self.parts[task.key[0]]
        if not self._takes_part(task):
            return
        if stage > 0:
            has_local = any(lane.peer == self.rank for lane in task.lanes)
            local = step.outputs.use((stage - 1, k)) if has_local else None
            activations = self.boundaries.collect(task, is_gradient=False, local=local)
            step.inputs[task.key] = activations.requires_grad_(torch.is_grad_enabled())
        self.settings.draws.begin_forward(task.samples)
        with self.autocast():
            output = part.model(step.inputs[task.key])
        if stage == self.last:
            self._finish_forward(step, task, output)
        else:
            if not torch.is_grad_enabled() and self.boundaries.is_pooled(task.key, output):
                # The stage returns its input: the buffer would be reused before it is sent.
                output = output.clone(memory_format=torch.preserve_format)
            step.outputs.put(task.key, output, step.program.output_uses[task.key])
        if not torch.is_grad_enabled():
            self._forget(step, task)

    def _finish_forward(self, step: Step, task: Task, outputs: Tensor) -> None:
        targets = step.targets.pop(task.key)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        if not torch.is_grad_enabled():
            outputs = step.logits[task.key] = _add(
                step.logits.get(task.key), outputs if step.weight == 1 else step.weight * outputs
            )
        loss_sum = self.settings.loss.sum(outputs, targets)
        step.loss_sum = _add(step.loss_sum, loss_sum.detach())
        if torch.is_grad_enabled():
            loss = loss_sum / step.program.cut.batch_size
            if step.loss_scale != 1:
                loss = loss * step.loss_scale
            step.outputs.put(task.key, loss, step.program.output_uses[task.key])
        else:
            for name, value in self.settings.loss.measured(outputs, targets).items():
                step.measured[name] = _add(step.measured.get(name), value)

    def _backward(self, step: Step, task: Task) -> None:
        stage, part = task.key[0], self.parts[task.key[0]]
        if task.action in step.program.completing:
            part.gradients.announce(step.program.shares[stage])
        if not self._takes_part(task):
            return
        gradient = self._output_gradient(step, task)
        output = step.outputs.use(task.key)
        if output.requires_grad:
            with part.model.in_backward():
                torch.autograd.backward(output, gradient)
        if part.model.clock is not None:
            part.model.clock.end()
        self._take_input_gradient(step, task)
        self._forget(step, task)

    def _backward_input(self, step: Step, task: Task) -> None:
        if task.rows == 0:
            return
        gradient, part = self._output_gradient(step, task), self.parts[task.key[0]]
        with part.model.in_backward():
            step.pending_weights[task.key] = halves.backward_input(
                output=step.outputs.use(task.key),
                gradient=gradient,
                input=step.inputs[task.key],
                parameters=part.parameters,
                is_whole=part.is_whole,
            )
        self._take_input_gradient(step, task)

    def _backward_weight(self, step: Step, task: Task) -> None:
        if task.rows == 0:
            return
        halves.backward_weight(step.pending_weights.pop(task.key))
        self._forget(step, task)

    def _output_gradient(self, step: Step, task: Task) -> Tensor | None:
        """Return the gradient of a stage's output; None for the last stage, which has the loss."""
        stage, k = task.key
        if stage == self.last:
            return None
        has_local = any(lane.peer == self.rank for lane in task.lanes)
        local = step.input_gradients.use((stage + 1, k)) if has_local else None
        gradient = self.boundaries.collect(task, is_gradient=True, local=local)
        if task.rows == 1 and self.boundaries.is_pooled(task.key, gradient):
            # Autograd may store the gradient of a single sample as a parameter's gradient without
            # a copy, but the buffer is reused.
            gradient = gradient.clone(memory_format=torch.preserve_format)
        return gradient

    def _take_input_gradient(self, step: Step, task: Task) -> None:
        input = step.inputs[task.key]
        if task.key[0] == 0:
            return
        gradient = torch.zeros_like(input) if input.grad is None else input.grad
        input.grad = None
        if self.boundaries.is_pooled(task.key, gradient):
            gradient = gradient.clone(memory_format=torch.preserve_format)
        step.input_gradients.put(task.key, gradient, step.program.gradient_uses[task.key])

    def _forget(self, step: Step, task: Task) -> None:
        step.inputs.pop(task.key)
        self.boundaries.release(task.key)

    def _send_activations(self, step: Step, task: Task) -> None:
        self.boundaries.send(task, step.outputs.use(task.key).detach())

    def _send_gradients(self, step: Step, task: Task) -> None:
        self.boundaries.send(task, step.input_gradients.use(task.key))

    def _post(self, step: Step, task: Task) -> None:
        self.boundaries.post(task)

    def _reduce(self, step: Step, task: Task) -> None:
        stage = task.key[0]
        self.parts[stage].gradients.start(step.program.shares[stage])

    def _update(self, step: Step, task: Task) -> None:
        if self.exchange:
            self.exchange.flush()
        update(self.settings.rule, task.key[0], self.parts, self.exchange, step)

    def _events(self, task: Task, start: float, waiting: float) -> list[Event]:
        """Return the events of a task that has just run, its wait apart."""
        middle, end = start + waiting, time.perf_counter()
        kind = "communication" if task.action.kind in COMMUNICATION else "compute"
        wait = [Event(self.rank, task.action, start, middle, "wait")] if waiting > 0 else []
        return [*wait, Event(self.rank, task.action, middle, end, kind)]

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which forwards run."""
        return devices.autocast(self.device, self.settings.autocast)


def _mistake(task: Task, message: str) -> UsageError | None:
    """Return what the user can change, if an error of PyTorch says that."""
    stage, k = task.key
    if "Expected more than 1 value per channel" in message:
        return UsageError(
            f"batch norm in stage {stage} has one value per channel in the {task.rows} sample(s) "
            f"of micro-batch {k}: use fewer --microbatches, a larger --batch-size, or "
            "--batch-norm sync"
        )
    operation, has_none, _ = message.partition(" does not have a deterministic implementation")
    if has_none:
        return UsageError(
            f"stage {stage} uses {operation}, which has no algorithm that computes the same bits "
            "each time: leave --deterministic out, or use another operation"
        )
    return None


def _ignore(line: str) -> None:
    """Do nothing: there is no activity record."""


def _add(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else total + value
