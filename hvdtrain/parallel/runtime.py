"""The interpreter of schedules: a table from the kind of an action to the function that runs it.

It depends on no particular schedule or strategy: a rank runs its list of actions in order. Tensors
are kept in the `Step`, by (stage, micro-batch), until the last action that needs them is done.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from hvdtrain import device as devices
from hvdtrain.errors import UsageError
from hvdtrain.host.activity import Activity
from hvdtrain.models.losses import Loss, cross_entropy
from hvdtrain.parallel import halves
from hvdtrain.parallel.boundary import Boundaries
from hvdtrain.parallel.dropout import Draws
from hvdtrain.parallel.stage import Images, Part
from hvdtrain.parallel.step import Step, UpdateRule, copied_buffers, restore_buffers, update
from hvdtrain.plan.actions import COMMUNICATION
from hvdtrain.plan.marks import Act
from hvdtrain.plan.program import Task
from hvdtrain.plan.trace import Event


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
                # A replica that trains apart has no gradients without samples.
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
            torch.autograd.backward(output, gradient)
        if part.model.clock is not None:
            part.model.clock.end()
        self._take_input_gradient(step, task)
        self._forget(step, task)

    def _backward_input(self, step: Step, task: Task) -> None:
        if task.rows == 0:
            return
        gradient, part = self._output_gradient(step, task), self.parts[task.key[0]]
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
