"""The naive twin of the runtime: one step on one rank, by plain autograd.

It knows no schedule, no exchange and no bucket. Only what batch norm sees is the plan's: where it
is local, each replica's part of each micro-batch is run by itself.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvdtrain.parallel.cut import Cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.stage import StageModel


@dataclass
class Serial:
    """What one serial step found: the mean loss; gradients and statistics by name."""

    loss: float
    gradients: dict[str, Tensor]
    statistics: dict[str, Tensor]


def serial_step(
    components: Mapping[str, nn.Module],
    plan: Plan,
    cut: Cut,
    images: Tensor,
    labels: Tensor,
    *,
    batch_norm: str = "local",
    bf16: bool = False,
    label_smoothing: float = 0.0,
) -> Serial:
    """Run forward and backward of a whole batch, and leave the statistics as the plan does.

    Args:
        components: all components of the model, in training mode, without gradients.
        images: [batch size, 3, H, W], normalised. labels: int64 [batch size].
    """
    stages = [
        _SerialStage(StageModel({name: components[name] for name in stage.components}), parts)
        for stage, parts in zip(plan.stages, _normalised_parts(plan, cut, batch_norm), strict=True)
    ]
    total = 0.0
    autocast = torch.autocast(images.device.type, dtype=torch.bfloat16) if bf16 else nullcontext()
    for k, (start, stop) in enumerate(_microbatches(cut)):
        activations = images[start:stop]
        with autocast:
            for stage in stages:
                activations = stage.forward(activations, k, start)
        logits = activations if activations.dtype == torch.float64 else activations.float()
        loss = functional.cross_entropy(
            logits, labels[start:stop], reduction="sum", label_smoothing=label_smoothing
        )
        (loss / cut.batch_size).backward()
        total += float(loss.detach())
    gradients: dict[str, Tensor] = {}
    statistics: dict[str, Tensor] = {}
    for stage in stages:
        stage.average_statistics(cut.batch_size)
        statistics |= stage.model.statistics()
        for name, parameter in stage.model.parameters().items():
            found = parameter.grad
            gradients[name] = torch.zeros_like(parameter) if found is None else found
    return Serial(total / cut.batch_size, gradients, statistics)


def largest_errors(
    found: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> dict[str, float]:
    """The design's measure, by parameter: max |g - r| / max(max |r|, 1e-6 x the largest anywhere).

    Raises:
        KeyError: if a gradient is missing.
    """
    largest = max((float(value.abs().max()) for value in reference.values()), default=0.0)
    floor = max(1e-6 * largest, torch.finfo(torch.float64).tiny)
    errors = {}
    for name, value in reference.items():
        difference = float((found[name].double() - value.double()).abs().max())
        error = difference / max(float(value.abs().max()), floor)
        errors[name] = error if error == error else float("inf")  # not a number is no match
    return errors


class _SerialStage:
    """A stage with the statistics of each of its replicas."""

    def __init__(self, model: StageModel, parts: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.model, self.parts = model, parts
        before = {name: value.clone() for name, value in model.statistics().items()}
        self.of_replicas = [{n: v.clone() for n, v in before.items()} for _ in parts]

    def forward(self, activations: Tensor, microbatch: int, offset: int) -> Tensor:
        """Each replica's rows by themselves; `offset` is where the micro-batch starts."""
        made = []
        for parts, own in zip(self.parts, self.of_replicas, strict=True):
            start, stop = parts[microbatch]
            if start == stop:
                continue
            for name, value in self.model.statistics().items():
                # Past autograd, which holds them for backward but does not use them there.
                value.data.copy_(own[name])
            made.append(self.model(activations[start - offset : stop - offset]))
            own.update({n: v.clone() for n, v in self.model.statistics().items()})
        return made[0] if len(made) == 1 else torch.cat(made)

    def average_statistics(self, batch_size: int) -> None:
        """Averages weighted by samples; counters are the first busy replica's."""
        samples = [sum(stop - start for start, stop in parts) for parts in self.parts]
        first = next(i for i, count in enumerate(samples) if count)
        for name, value in self.model.statistics().items():
            if value.is_floating_point():
                weighted = [
                    own[name] * (count / batch_size)
                    for own, count in zip(self.of_replicas, samples, strict=True)
                ]
                value.copy_(torch.stack(weighted).sum(0))
            else:
                value.copy_(self.of_replicas[first][name])


def _microbatches(cut: Cut) -> list[tuple[int, int]]:
    """The samples of each micro-batch."""
    parts = list(cut.parts[0].values())
    return [(parts[0][k][0], parts[-1][k][1]) for k in range(cut.microbatches)]


def _normalised_parts(
    plan: Plan, cut: Cut, batch_norm: str
) -> list[list[Sequence[tuple[int, int]]]]:
    """For each stage, the ranges that are normalised by themselves, by replica."""
    if batch_norm == "sync":
        return [[_microbatches(cut)] for _ in plan.stages]
    return [list(cut.parts[stage].values()) for stage in range(len(plan.stages))]
