"""Sums over all ranks: of numbers, and of the results of an evaluation."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from hvdtrain.errors import UsageError
from hvdtrain.torch.start import State, current

Criterion: TypeAlias = Callable[[Any, Any], Tensor | tuple[Any, Any]]


def total(*values: Any) -> Any:
    """Return the sum of each number over all ranks, the same bits on all ranks. Collective.

    Args:
        values: numbers, or tensors of one value. Whole numbers stay whole.

    Returns:
        One sum for one value, a tuple of sums for several.
    """
    local = [value.item() if isinstance(value, Tensor) else value for value in values]
    everywhere = current().agreement.gather("adding up numbers", local)
    sums = tuple(
        sum(numbers) if all(isinstance(n, int) for n in numbers) else math.fsum(numbers)
        for numbers in zip(*everywhere, strict=True)
    )
    return sums[0] if len(sums) == 1 else sums


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    criterion: Criterion = functional.cross_entropy,
) -> dict[str, float]:
    """Return the mean loss and the accuracy over the samples of all ranks. Collective.

    The model runs in evaluation mode and without gradients, and gets its mode back.

    Args:
        batches: (inputs, labels) of this rank: of `distributed.loader(..., split="test")`, or a
            DataLoader with `distributed.sampler(..., shuffle=False)`. There may be none.
        criterion: returns the mean loss of (outputs, labels), the loss of each sample, or, if its
            mean is not over samples, (loss, weight), such as the sum of the weights of classes.
            It is also called on parts of the first batches, to see which one it is.

    Returns:
        `loss`, `samples`, and `accuracy` if outputs are logits [n, classes] and labels whole
        numbers [n].

    Raises:
        UsageError: if no rank has a sample, or a batch does not tell how many it has.
        CheckFailed: on all ranks, if they hold different weights.
    """
    state = current()
    for prepared in state.models:
        prepared.meet()
    weights = {} if state.exempt else dict(model.named_parameters())
    state.check_weights("evaluating", weights)
    sums = Sums()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                inputs, labels = tree_map_only(
                    Tensor, lambda value: value.to(state.place.device, non_blocking=True), batch
                )
                sums.batches += 1
                sums.add(model(inputs), labels, _samples(state, sums.batches, *batch), criterion)
    finally:
        model.train(was_training)
        state.evaluation = None
    sums.contents = state.contents
    everywhere = state.agreement.gather("evaluating", sums)
    state.compare_contents([one.contents for one in everywhere])
    samples, weight, answers = (
        math.fsum(getattr(one, name) for one in everywhere)
        for name in ("samples", "weight", "answers")
    )
    if not samples:
        raise UsageError("evaluate got no samples on any rank: give it the batches of a split")
    if not all(one.is_mean for one in everywhere):
        state.remark(
            "the criterion is not a mean over samples, so its mean depends on how they are divided"
            ": have it return (loss, weight), and train inside `with distributed.weight(weight):`"
        )
    loss = math.fsum(math.fsum(one.losses) for one in everywhere)
    result = {"loss": loss / weight if weight else math.nan, "samples": samples}
    is_classifier = all(one.is_classifier for one in everywhere)
    correct = sum(one.correct for one in everywhere)
    return result | ({"accuracy": correct / answers} if is_classifier else {})


@dataclass
class Sums:
    """The sums of an evaluation on a rank.

    Attributes:
        losses: times the weights of the batches.
        is_mean: whether the criterion is the mean over samples, as far as is seen.
        contents: checksum of the data set.
    """

    losses: list[float] = field(default_factory=list)
    batches: int = 0
    samples: int = 0
    weight: float = 0.0
    correct: int = 0
    answers: int = 0
    is_classifier: bool = True
    is_mean: bool = True
    contents: int = 0

    def add(self, outputs: Any, labels: Any, count: int, criterion: Criterion) -> None:
        """Add a batch of `count` samples."""
        loss: Any = criterion(outputs, labels)
        if isinstance(loss, tuple):
            loss, weight = (float(value) for value in loss)
            self.losses.append(loss * weight if weight else 0.0)
            self.weight += weight
        else:
            self.losses.append(float(loss.double().sum()) * (1 if loss.dim() else count))
            self.weight += count
            # Only PyTorch's own: a function of the user's may also count, or draw random numbers.
            is_torchs = getattr(criterion, "__module__", "").startswith("torch.nn.")
            is_known = criterion is functional.cross_entropy or loss.dim() or not is_torchs
            if self.batches <= 3 and not is_known:
                self.is_mean = self.is_mean and _is_mean(outputs, labels, criterion)
        self.samples += count
        self.is_classifier = self.is_classifier and _are_logits(outputs, labels)
        if self.is_classifier:
            self.correct += int((outputs.argmax(1) == labels).sum())
            self.answers += len(labels)


def _is_mean(outputs: Any, labels: Any, criterion: Criterion) -> bool:
    """Return whether the loss of a batch is the mean of those of two parts, if it can be cut."""
    are_tensors = isinstance(outputs, Tensor) and isinstance(labels, Tensor)
    if not (are_tensors and labels.dim() and outputs.shape[:1] == labels.shape[:1]):
        return True
    count, cut = len(labels), len(labels) // 2
    if not cut:
        return True
    parts = (slice(None), slice(cut), slice(cut, None))
    try:
        losses = [cast(Tensor, criterion(outputs[part], labels[part])) for part in parts]
    except Exception:  # it takes whole batches only, in any form
        return True
    whole, *means = map(float, losses)
    error = (means[0] * cut + means[1] * (count - cut)) / count - whole
    return not math.isfinite(whole) or abs(error) <= 1e3 * torch.finfo(losses[0].dtype).eps * abs(
        whole
    )


def _samples(state: State, number: int, inputs: Any, labels: Any) -> int:
    """Return the samples of a batch: those of a sampler, or of tensors and lists.

    Raises:
        UsageError: if nothing knows them.
    """
    reading = state.evaluation
    if reading is not None and reading.is_live and reading.number == number:
        return reading.batches[number - 1].samples
    for value in (labels, inputs):
        is_list = isinstance(value, (list, tuple)) and not any(map(torch.is_tensor, value))
        if is_list or len(getattr(value, "shape", ())):
            return len(value)
    raise UsageError(
        f"labels are a {type(labels).__name__}, which does not tell the number of samples: give "
        "evaluate a DataLoader with distributed.sampler(..., shuffle=False)"
    )


def _are_logits(outputs: Any, labels: Any) -> bool:
    return (
        isinstance(outputs, Tensor)
        and isinstance(labels, Tensor)
        and outputs.dim() == 2
        and labels.dim() == 1
        and not labels.is_floating_point()
    )
