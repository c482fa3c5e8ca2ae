"""The losses: functions of outputs and targets that return one value per sample.

A step sums them over its samples and divides by the global batch size, so that any division of the
batch gives the same gradients. Only a loss that is a sum over samples has that property: `check`
refuses others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import TargetForm
from hvdtrain.errors import HvdtrainError, UsageError, one_line, users_line
from hvdtrain.models.costs import Boundary
from hvdtrain.models.find import find_function
from hvdtrain.options.sections import smoothing_of

Function = Callable[[Tensor, Tensor], Tensor]
ACCURACY = "accuracy"
CURE = "use reduction='none' and average over all dimensions but the first"


@dataclass(frozen=True)
class Loss:
    """The function that a run minimises, with what evaluations measure besides.

    Outputs are floating tensors [n, ...] of the model. Targets are int64, or have the dtype of the
    outputs: class labels [n], or arrays [n, ...].

    Attributes:
        per_sample: returns the loss of each sample [n].
        measures: by name, functions of outputs and targets that return a value per sample [n].
            The best checkpoint has the highest `accuracy` if there is one, else the lowest loss.
        total: returns the sum over samples, if there is a faster way.
    """

    per_sample: Function
    measures: Mapping[str, Function] = field(default_factory=dict)
    total: Function | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample [n]."""
        return self.per_sample(outputs, _typed(targets, outputs))

    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of all samples."""
        targets = _typed(targets, outputs)
        if self.total is not None:
            return self.total(outputs, targets)
        return self.per_sample(outputs, targets).sum()

    def measured(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the sums of the measures over samples, in fp64."""
        targets = _typed(targets, outputs)
        return {
            name: measure(outputs, targets).sum(dtype=torch.float64)
            for name, measure in self.measures.items()
        }

    def example_sum(self, form: TargetForm, outputs: Tensor) -> Tensor:
        """Return the sum of losses for targets of zeros, to measure its time."""
        zeros = np.zeros((len(outputs), *form.shape), form.dtype)
        return self.sum(outputs, torch.from_numpy(zeros).to(outputs.device))


def _typed(targets: Tensor, outputs: Tensor) -> Tensor:
    return targets.to(outputs.dtype if targets.is_floating_point() else torch.int64)


def _mean(values: Tensor) -> Tensor:
    """Return the mean of each sample's values."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def cross_entropy(label_smoothing: float = 0.0) -> Loss:
    """Return the loss of classifiers: outputs are logits [n, classes], targets are labels [n].

    Args:
        label_smoothing: in training; Szegedy et al., "Rethinking the Inception Architecture for
            Computer Vision", CVPR 2016, section 7.
    """

    def reduced(reduction: str, logits: Tensor, labels: Tensor) -> Tensor:
        smoothing = label_smoothing if torch.is_grad_enabled() else 0.0
        return functional.cross_entropy(
            logits, labels, reduction=reduction, label_smoothing=smoothing
        )

    accuracy = {ACCURACY: _is_right}
    return Loss(partial(reduced, "none"), accuracy, total=partial(reduced, "sum"))


def _is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether the largest output is that of the label; of pixels, their share [n]."""
    is_right = logits.argmax(1) == labels
    return _mean(is_right.to(logits.dtype)) if is_right.dim() > 1 else is_right


def _of_pixels(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point() or labels.dim() != logits.dim() - 1:
        raise UsageError(
            f"outputs {list(logits.shape)} and targets {list(labels.shape)} do not fit: the loss "
            "needs outputs [n, classes, height, width] and whole numbers [n, height, width]"
        )
    return _mean(functional.cross_entropy(logits, labels, reduction="none"))


def _elementwise(function: Callable[..., Tensor]) -> Loss:
    """Return the mean of a function of each output and its target, per sample."""

    def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.numel() != outputs.numel():
            raise UsageError(
                f"outputs {list(outputs.shape)} and targets {list(targets.shape)} do not fit: "
                "the loss needs one output per value of the target"
            )
        values = targets.view_as(outputs).to(outputs.dtype)
        return _mean(function(outputs, values, reduction="none"))

    return Loss(per_sample)


BUILT_IN: dict[str, Loss] = {
    "pixel-cross-entropy": Loss(_of_pixels, {ACCURACY: _is_right}),
    "mse": _elementwise(functional.mse_loss),
    "l1": _elementwise(functional.l1_loss),
    "binary-cross-entropy": _elementwise(functional.binary_cross_entropy_with_logits),
}


def loss_of(config: TrainConfig) -> Loss:
    """Return the loss of a run.

    Raises:
        UsageError: if there is none of its name, or the run expects an accuracy that the loss does
            not measure.
    """
    smoothing = smoothing_of(config.loss)
    if smoothing is not None:
        return cross_entropy(smoothing)
    loss = BUILT_IN.get(config.loss)
    if loss is None:
        function = find_function(config.loss, "loss")
        loss = function if isinstance(function, Loss) else Loss(cast(Function, function))
    if config.expected is not None and ACCURACY not in loss.measures:
        raise UsageError(
            f"--expected is a test accuracy, which the loss {config.loss!r} does not measure: "
            "leave it out"
        )
    for name in loss.measures:
        if not name.isidentifier() or name == "loss":
            raise UsageError(
                f"loss {config.loss!r} has a measure {name!r}: name it in letters, digits and "
                "underscores, and not loss"
            )
    return loss


def check_loss(config: TrainConfig, emitted: Boundary, form: TargetForm) -> None:
    """Try the loss of a run on two samples, of the shape that the model emits.

    Raises:
        UsageError: if it does not return one finite value per sample that depends on this sample
            alone and has a gradient; so for its measures, without the gradient.
    """
    loss = loss_of(config)
    generator = torch.Generator().manual_seed(0)
    # Between 0 and 1, where most losses are finite: they may take logarithms of their arguments.
    outputs = torch.rand(emitted.shape, generator=generator, dtype=torch.float64) * 0.9 + 0.05
    outputs = outputs.to(emitted.dtype if emitted.dtype == torch.float64 else torch.float32)
    targets = torch.from_numpy(example_targets(form, len(outputs), np.random.default_rng(0)))
    what = f"loss {config.loss!r}"
    values = _tried(what, loss, outputs.requires_grad_(), targets)
    if not values.requires_grad:
        raise UsageError(f"{what} has no gradient: compute it from the outputs by torch functions")
    for name, measure in loss.measures.items():
        with torch.no_grad():
            _tried(f"measure {name!r} of {what}", Loss(measure), outputs.detach(), targets)


def example_targets(form: TargetForm, count: int, random: np.random.Generator) -> np.ndarray:
    """Return random targets [count, ...]: classes, or values from 0 to 1."""
    shape = (count, *form.shape)
    if np.dtype(form.dtype).kind == "f":
        return random.random(shape).astype(form.dtype)
    return random.integers(0, form.outputs, shape).astype(form.dtype)


def _tried(what: str, function: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the values of two samples, if each depends on its sample alone."""
    try:
        values = function(outputs, targets)
        parts = [function(outputs[row : row + 1], targets[row : row + 1]) for row in range(2)]
    except HvdtrainError as error:
        raise UsageError(f"{what}: {error}") from None
    except Exception as error:
        raise UsageError(
            f"{what} fails with outputs {list(outputs.shape)} and targets {list(targets.shape)} "
            f"({one_line(error)}{users_line(error)}): it must take what the model emits and the "
            "data set holds"
        ) from error
    if not isinstance(values, Tensor) or values.shape != outputs.shape[:1]:
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise UsageError(f"{what} returns {shape} for 2 samples, not one value for each: {CURE}")
    if not bool(values.isfinite().all()):
        raise UsageError(f"{what} is not finite for a trial with values between 0 and 1")
    if not torch.allclose(torch.cat(parts).double(), values.double(), rtol=1e-4, atol=1e-6):
        raise UsageError(f"{what} of a sample depends on the other samples of its batch: {CURE}")
    return values


def form_for(config: TrainConfig, emitted: Boundary, classes: int) -> TargetForm:
    """Return a form of targets that the loss of a run takes, where there is no data set.

    The first of these: class labels, a class for each pixel, a value for each output.

    Raises:
        UsageError: if it takes none of them.
    """
    if smoothing_of(config.loss) is not None:
        return TargetForm((), "int64", classes)
    _, *shape = emitted.shape
    forms = [TargetForm((), "int64", classes), TargetForm(tuple(shape), "float32", classes)]
    if len(shape) > 1:
        forms.insert(1, TargetForm(tuple(shape[1:]), "int64", shape[0]))
    for form in forms:
        try:
            check_loss(config, emitted, form)
        except UsageError as error:
            fault = error
        else:
            return form
    raise fault
