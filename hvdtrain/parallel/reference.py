"""A naive reference for the runtime: whole steps on one rank, by plain autograd.

It uses no schedule, no transfers and no buckets, and it cuts the batch with its own code, so that
a sample which the runtime drops shows up as a difference. Each replica's rows of a micro-batch run
separately, with separate buffers: batch norm sees the same samples as under the plan, and kernels
round alike.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.device import autocast
from hvdtrain.models.losses import Loss, cross_entropy
from hvdtrain.parallel.dropout import Draws
from hvdtrain.parallel.stage import StageModel
from hvdtrain.plan.plan import Plan
from hvdtrain.sync.gradients import whole_gradient

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True)
class Rules:
    """Options of a step besides forward and backward.

    Attributes:
        is_synchronised: whether the replicas of a stage normalise a micro-batch together.
        autocast: the dtype in which forwards run; None: that of the weights.
        loss_scale: factor of the loss, and divisor of the gradients: exact if a power of two.
        clip_norm: the largest norm of all gradients together; None disables clipping.
    """

    is_synchronised: bool = False
    autocast: torch.dtype | None = None
    loss: Loss = field(default_factory=cross_entropy)
    clip_norm: float | None = None
    loss_scale: float = 1.0


@dataclass
class Serial:
    """The results of one serial step.

    Attributes:
        loss: mean over the batch.
        gradients: by parameter name, after clipping.
        buffers: by name, after the step.
    """

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Reference:
    """A whole model on one rank.

    Args:
        build: makes new components with the given names, in training mode.
        draws: the source of dropout masks; the default is for models without `SampleDropout`.
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
            _SerialStage(build, stage.components, len(stage.ranks), rules, self.draws)
            for stage in plan.stages
        ]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name."""
        by_stage = (stage.models[0].parameters() for stage in self.stages)
        return {name: value for parameters in by_stage for name, value in parameters.items()}

    def undecayed(self) -> frozenset[str]:
        """Return the names of the parameters without weight decay."""
        return frozenset().union(*(stage.models[0].undecayed() for stage in self.stages))

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in parameters and buffers by name; skip those whose shape differs."""
        for model in (model for stage in self.stages for model in stage.models):
            targets = model.tensors()
            model.put(
                {
                    name: value
                    for name, value in tensors.items()
                    if name in targets and targets[name].shape == value.shape
                }
            )

    def step(self, images: Tensor, labels: Tensor) -> Serial:
        """Run forward and backward of a whole batch, without an update.

        Args:
            images: [batch size, 3, H, W], normalised.
            labels: int64 [batch size], or targets [batch size, ...].
        """
        size, rules, total = len(labels), self.rules, 0.0
        self.draws.begin_step()
        microbatches, parts = reference_cut(self.plan, size)
        for k, (start, stop) in enumerate(microbatches):
            activations = images[start:stop]
            for stage, replica_ranges in zip(self.stages, parts, strict=True):
                ranges = [by_microbatch[k] for by_microbatch in replica_ranges]
                activations = stage.forward(activations, ranges, start)
            outputs = activations if activations.dtype == torch.float64 else activations.float()
            loss = rules.loss(outputs, labels[start:stop]).sum()  # without its faster form
            with ExitStack() as stack:
                for model in (model for stage in self.stages for model in stage.models):
                    stack.enter_context(model.in_backward())
                (loss / size * rules.loss_scale).backward()
            total += float(loss.detach())
        buffers: dict[str, Tensor] = {}
        for stage, replica_ranges in zip(self.stages, parts, strict=True):
            samples = [sum(stop - start for start, stop in ranges) for ranges in replica_ranges]
            buffers |= stage.agreed_buffers(samples)
        return Serial(total / size, self._take_gradients(), buffers)

    def _take_gradients(self) -> dict[str, Tensor]:
        """Clip, return and reset the gradients; a parameter that backward missed has zeros."""
        for parameter in self.parameters.values():
            parameter.grad = whole_gradient(parameter).div_(self.rules.loss_scale)
        if self.rules.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.rules.clip_norm)
        gradients = {}
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            gradients[name], parameter.grad = parameter.grad, None
        return gradients


class _SerialStage:
    """A stage on one rank: one model per replica, all with the same parameters.

    One model is enough for a stage without buffers, and where replicas normalise together.
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
        modules = [m for module in self.models[0].components.values() for m in module.modules()]
        self.is_merged = rules.is_synchronised and any(isinstance(m, _BatchNorm) for m in modules)
        if any(True for module in modules for _ in module.buffers(recurse=False)):
            for _ in range(0 if self.is_merged else replicas - 1):
                self.models.append(_tied(build(components), self.models[0]))

    def forward(self, activations: Tensor, parts: Sequence[Range], offset: int) -> Tensor:
        """Run each replica's rows separately; `offset` is where the micro-batch starts."""
        if self.is_merged:
            self.draws.begin_forward((offset, offset + len(activations)))
            return self._run(self.models[0], activations)
        outputs = []
        for replica, (start, stop) in enumerate(parts):
            if start < stop:
                self.draws.begin_forward((start, stop))
                model = self.models[replica % len(self.models)]
                outputs.append(self._run(model, activations[start - offset : stop - offset]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run(self, model: StageModel, activations: Tensor) -> Tensor:
        """Run one forward as a rank runs it: a weight that is used twice is cast to 16 bits once.

        The gradients of these two uses are summed in 16 bits; those of replicas are not.
        """
        with autocast(activations.device, self.rules.autocast):
            return model(activations)

    def agreed_buffers(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Return the stage's buffers after a step, given each replica's number of samples.

        Running statistics are averaged by samples; the other buffers are those of the first
        replica that had samples.
        """
        first = next(replica for replica, count in enumerate(samples) if count)
        buffers = dict(_buffers(self.models[first % len(self.models)]))
        if len(self.models) > 1:
            statistics = [model.statistics() for model in self.models]
            floating = [name for name, v in statistics[0].items() if v.is_floating_point()]
            for name in floating:
                weighted = [s[name] * count for s, count in zip(statistics, samples, strict=True)]
                buffers[name] = torch.stack(weighted).sum(0) / sum(samples)
        return {name: value.clone() for name, value in buffers.items()}


def _buffers(model: StageModel) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, component in model.components.items()
        for key, value in component.named_buffers()
    }


def _tied(model: StageModel, other: StageModel) -> StageModel:
    """Replace the parameters of `model` by those of `other`; return `model`."""
    for name, component in model.components.items():
        shared = dict(other.components[name].named_parameters(remove_duplicate=False))
        for path in [path for path, _ in component.named_parameters(remove_duplicate=False)]:
            owner, _, key = path.rpartition(".")
            setattr(component.get_submodule(owner), key, shared[path])
    return model


def reference_cut(plan: Plan, batch_size: int) -> tuple[list[Range], list[list[list[Range]]]]:
    """Return the micro-batches of a batch, and per stage and replica its range of each of them.

    The same rule as `cut`, with separate arithmetic: the batch is cut into as many micro-batches
    as possible, up to the plan's number, such that every replica with a share has at least one
    sample in each. Bounds are rounded to the nearest whole number, halves up.
    """
    for number in range(min(plan.microbatches, batch_size), 0, -1):
        microbatches = _bounds(batch_size, [1] * number)
        parts = [_shared_out(microbatches, stage.shares) for stage in plan.stages]
        replicas = [
            ranges
            for stage, of_stage in zip(plan.stages, parts, strict=True)
            for share, ranges in zip(stage.shares, of_stage, strict=True)
            if share
        ]
        if number == 1 or all(start < stop for ranges in replicas for start, stop in ranges):
            break
    return microbatches, parts


def _shared_out(microbatches: Sequence[Range], shares: Sequence[int]) -> list[list[Range]]:
    """Return the range of each replica in each micro-batch: [replica][micro-batch]."""
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
    measured: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the error of each tensor, by name.

    The error is max |g - r| / max(max |r|, 1e-6 x the largest |r| of all tensors). It is infinity
    where a tensor is missing, has another shape, or holds NaN.
    """
    largest = max((_largest(value) for value in reference.values()), default=0.0)
    floor_ = max(1e-6 * largest, torch.finfo(torch.float64).tiny)
    errors = {}
    for name, value in reference.items():
        other = measured.get(name)
        if other is None or other.shape != value.shape:
            errors[name] = float("inf")
            continue
        error = _largest(difference(other, value)) / max(_largest(value), floor_)
        errors[name] = error if error == error else float("inf")  # NaN is not equal to itself
    return errors


def difference(measured: Tensor, reference: Tensor) -> Tensor:
    """Return `measured - reference` in fp64 or complex128; 0 where both are equal."""
    is_complex = measured.is_complex() or reference.is_complex()
    dtype = torch.complex128 if is_complex else torch.float64
    measured, reference = measured.cpu().to(dtype), reference.cpu().to(dtype)
    return torch.where(measured == reference, 0.0, measured - reference)


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0
