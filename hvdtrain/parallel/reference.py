"""The naive twin of the runtime: steps on one rank, by plain autograd.

It knows no schedule, no exchange and no bucket, and cuts the batch by itself: a sample that the
runtime's cut leaves out is missed here. Each replica's part of each micro-batch is run by itself,
with buffers of its own: batch norm sees what it sees under the plan, and kernels round alike.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.parallel.dropout import Draws
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.stage import StageModel

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True)
class Rules:
    """What a step does besides forward and backward.

    Attributes:
        is_synchronised: whether replicas normalise a micro-batch together. bf16: autocast.
        clip_norm: of all gradients together, None for never.
    """

    is_synchronised: bool = False
    bf16: bool = False
    label_smoothing: float = 0.0
    clip_norm: float | None = None


@dataclass
class Serial:
    """What one serial step found: the mean loss; clipped gradients, and buffers, by name."""

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Reference:
    """A whole model on one rank.

    Args:
        build: makes the components of these names anew, in training mode.
        draws: what their dropout layers draw from; by default they have none that ask it.
    """

    def __init__(
        self,
        plan: Plan,
        build: Callable[[Sequence[str]], StageModel],
        rules: Rules,
        draws: Draws | None = None,
    ) -> None:
        self.plan, self.rules, self.draws = plan, rules, draws or Draws()
        self.stages = [
            _SerialStage(*(build, stage.components, len(stage.ranks), rules), self.draws)
            for stage in plan.stages
        ]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        each = (stage.models[0].parameters() for stage in self.stages)
        return {name: value for own in each for name, value in own.items()}

    def undecayed(self, kinds: frozenset[str]) -> frozenset[str]:
        """As of a `StageModel`."""
        return frozenset().union(*(stage.models[0].undecayed(kinds) for stage in self.stages))

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over parameters and buffers by name; buffers of another form stay."""
        for model in (model for stage in self.stages for model in stage.models):
            own = model.tensors()
            model.put(
                {
                    name: value
                    for name, value in tensors.items()
                    if name in own and own[name].shape == value.shape
                }
            )

    def step(self, images: Tensor, labels: Tensor) -> Serial:
        """Run forward and backward of a whole batch, without an update.

        Args:
            images: [batch size, 3, H, W], normalised. labels: int64 [batch size].
        """
        size, rules, total = len(labels), self.rules, 0.0
        self.draws.begin_step()
        microbatches, parts = cut_alone(self.plan, size)
        for k, (start, stop) in enumerate(microbatches):
            activations = images[start:stop]
            for stage, own in zip(self.stages, parts, strict=True):
                ranges = [each[k] for each in own]
                activations = stage.forward(activations, ranges, start)
            logits = activations if activations.dtype == torch.float64 else activations.float()
            loss = functional.cross_entropy(
                *(logits, labels[start:stop]),
                reduction="sum",
                label_smoothing=rules.label_smoothing,
            )
            (loss / size).backward()
            total += float(loss.detach())
        buffers: dict[str, Tensor] = {}
        for stage, own in zip(self.stages, parts, strict=True):
            buffers |= stage.agreed_buffers([sum(b - a for a, b in each) for each in own])
        return Serial(total / size, self._take_gradients(), buffers)

    def _take_gradients(self) -> dict[str, Tensor]:
        """Clip the gradients, and forget them; what backward did not reach has zeros."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.rules.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.rules.clip_norm)
        found = {}
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            found[name], parameter.grad = parameter.grad, None
        return found


class _SerialStage:
    """A stage on one rank: a model for each replica that shares the parameters of the first.

    Where nothing is kept between forwards, or replicas normalise together, one model does.
    """

    def __init__(
        self,
        build: Callable[[Sequence[str]], StageModel],
        components: Sequence[str],
        replicas: int,
        rules: Rules,
        draws: Draws,
    ) -> None:
        self.models, self.rules, self.draws = [build(components)], rules, draws
        modules = [m for each in self.models[0].components.values() for m in each.modules()]
        self.is_merged = rules.is_synchronised and any(isinstance(m, _BatchNorm) for m in modules)
        if any(True for module in modules for _ in module.buffers(recurse=False)):
            for _ in range(0 if self.is_merged else replicas - 1):
                self.models.append(_tied(build(components), self.models[0]))

    def forward(self, activations: Tensor, parts: Sequence[Range], offset: int) -> Tensor:
        """Each replica's rows by themselves; `offset` is where the micro-batch starts."""
        if self.is_merged:
            self.draws.begin_forward((offset, offset + len(activations)))
            return self._run(self.models[0], activations)
        made = []
        for replica, (start, stop) in enumerate(parts):
            if start < stop:
                self.draws.begin_forward((start, stop))
                model = self.models[replica % len(self.models)]
                made.append(self._run(model, activations[start - offset : stop - offset]))
        return made[0] if len(made) == 1 else torch.cat(made)

    def _run(self, model: StageModel, activations: Tensor) -> Tensor:
        """One forward, as a rank runs it: a weight used twice in it is cast to bf16 once.

        Its gradients are summed as brain floats then, but those of replicas that share it are not.
        """
        autocast = torch.autocast(activations.device.type, torch.bfloat16)
        with autocast if self.rules.bf16 else nullcontext():
            return model(activations)

    def agreed_buffers(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Running statistics averaged by samples; other buffers of the first busy replica."""
        first = next(replica for replica, count in enumerate(samples) if count)
        found = dict(_buffers(self.models[first % len(self.models)]))
        if len(self.models) > 1:
            each = [model.statistics() for model in self.models]
            for name in (name for name, value in each[0].items() if value.is_floating_point()):
                weighted = [own[name] * count for own, count in zip(each, samples, strict=True)]
                found[name] = torch.stack(weighted).sum(0) / sum(samples)
        return {name: value.clone() for name, value in found.items()}


def _buffers(model: StageModel) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, component in model.components.items()
        for key, value in component.named_buffers()
    }


def _tied(model: StageModel, other: StageModel) -> StageModel:
    """`model`, with the parameters of `other` in place of its own."""
    for name, component in model.components.items():
        shared = dict(other.components[name].named_parameters(remove_duplicate=False))
        for path in [path for path, _ in component.named_parameters(remove_duplicate=False)]:
            owner, _, key = path.rpartition(".")
            setattr(component.get_submodule(owner), key, shared[path])
    return model


def cut_alone(plan: Plan, batch_size: int) -> tuple[list[Range], list[list[list[Range]]]]:
    """The micro-batches of a batch; and for each stage and replica its part of each of them.

    As `cut` has it, by arithmetic of its own: a batch is cut into the most micro-batches, up to
    those of the plan, in which each replica with a share has a sample; bounds are the nearest
    whole numbers, halves rounded up.
    """
    for number in range(min(plan.microbatches, batch_size), 0, -1):
        microbatches = _bounds(batch_size, [1] * number)
        parts = [_shared_out(microbatches, stage.shares) for stage in plan.stages]
        replicas = [
            own
            for stage, of_stage in zip(plan.stages, parts, strict=True)
            for share, own in zip(stage.shares, of_stage, strict=True)
            if share
        ]
        if number == 1 or all(start < stop for own in replicas for start, stop in own):
            break
    return microbatches, parts


def _shared_out(microbatches: Sequence[Range], shares: Sequence[int]) -> list[list[Range]]:
    """The part of each replica in each micro-batch."""
    cuts = [(start, _bounds(stop - start, shares)) for start, stop in microbatches]
    return [
        [(start + cut[replica][0], start + cut[replica][1]) for start, cut in cuts]
        for replica in range(len(shares))
    ]


def _bounds(count: int, shares: Sequence[int]) -> list[Range]:
    whole = sum(shares)
    ends = [
        floor(Fraction(count * part, whole) + Fraction(1, 2))
        for part in accumulate(shares, initial=0)
    ]
    return list(pairwise(ends))


def largest_errors(
    found: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> dict[str, float]:
    """The design's measure, by parameter: max |g - r| / max(max |r|, 1e-6 x the largest anywhere).

    Infinity where a tensor is missing, has another shape, or holds NaN.
    """
    largest = max((_largest(value) for value in reference.values()), default=0.0)
    floor_ = max(1e-6 * largest, torch.finfo(torch.float64).tiny)
    errors = {}
    for name, value in reference.items():
        other = found.get(name)
        if other is None or other.shape != value.shape:
            errors[name] = float("inf")
            continue
        error = _largest(difference(other, value)) / max(_largest(value), floor_)
        errors[name] = error if error == error else float("inf")  # not a number is no match
    return errors


def difference(found: Tensor, reference: Tensor) -> Tensor:
    """Element by element, in fp64; 0 where both are the same, be it infinite."""
    own, other = found.cpu().double(), reference.cpu().double()
    return torch.where(own == other, 0.0, own - other)


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0
