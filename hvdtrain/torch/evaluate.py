"""Sums over all ranks: of numbers, and of the results of an evaluation."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvdtrain.errors import UsageError
from hvdtrain.torch import state as states
from hvdtrain.torch.agreement import Action, Note


def total(*values: Any) -> Any:
    """Return the sum of each number over all ranks, the same bits on all ranks. Collective.

    Args:
        values: numbers, or tensors of one value. Whole numbers stay whole.

    Returns:
        One sum for one value, a tuple of sums for several.
    """
    local = [value.item() if isinstance(value, Tensor) else value for value in values]
    everywhere = states.current().agreement.gather(Note(Action.ADDING), local)
    sums = tuple(
        sum(numbers) if all(isinstance(n, int) for n in numbers) else math.fsum(numbers)
        for numbers in zip(*everywhere, strict=True)
    )
    return sums[0] if len(sums) == 1 else sums


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    criterion: Callable[[Any, Any], Tensor] = functional.cross_entropy,
) -> dict[str, float]:
    """Return the mean loss and the accuracy over the samples of all ranks. Collective.

    The model runs in evaluation mode and without gradients, and gets its mode back.

    Args:
        batches: (inputs, labels) of this rank: of `distributed.loader(..., split="test")`, or a
            DataLoader with `distributed.sampler(..., shuffle=False)`. There may be none.
        criterion: returns the mean loss of (outputs, labels), or the loss of each sample.

    Returns:
        `loss`, `samples`, and `accuracy` if outputs are logits [n, classes] and labels whole
        numbers [n].

    Raises:
        UsageError: if no rank has a sample.
    """
    state = states.current()
    for prepared in state.models:
        prepared.meet()
    state.agreement.exchange(Note(Action.EVALUATING))
    losses: list[float] = []
    samples = correct = 0
    is_classifier = True
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for inputs, labels in batches:
                inputs, labels = (
                    _on_device(value, state.place.device) for value in (inputs, labels)
                )
                outputs = model(inputs)
                count = len(labels)
                loss = criterion(outputs, labels).double()
                losses.append(float(loss * count if loss.dim() == 0 else loss.sum()))
                samples += count
                is_classifier = is_classifier and _are_logits(outputs, labels)
                if is_classifier:
                    correct += int((outputs.argmax(1) == labels).sum())
    finally:
        model.train(was_training)
    everywhere = state.agreement.gather(
        Note(Action.EVALUATING), (math.fsum(losses), samples, correct, is_classifier)
    )
    sums, counts, hits, kinds = zip(*everywhere, strict=True)
    if not sum(counts):
        raise UsageError("evaluate got no samples on any rank: give it the batches of a split")
    result = {"loss": math.fsum(sums) / sum(counts), "samples": float(sum(counts))}
    return result | ({"accuracy": sum(hits) / sum(counts)} if all(kinds) else {})


def _on_device(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _are_logits(outputs: Any, labels: Any) -> bool:
    return (
        isinstance(outputs, Tensor)
        and isinstance(labels, Tensor)
        and outputs.dim() == 2
        and labels.dim() == 1
        and not labels.is_floating_point()
    )
