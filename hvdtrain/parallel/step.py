"""The state of one step, with its results, and the update of the weights at its end."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hvdtrain import device as devices
from hvdtrain.data.augment import Places
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.halves import Group
from hvdtrain.parallel.stage import Part
from hvdtrain.plan.marks import StepMarks
from hvdtrain.plan.program import Key, Program


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
