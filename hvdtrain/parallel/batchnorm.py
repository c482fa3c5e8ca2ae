"""Batch norm over a whole micro-batch that several replicas share.

Each replica reduces its rows to count, mean and sum of squared deviations (M2) per channel. One
all-gather gives every replica the moments of all rows, combined as in Chan, Golub and LeVeque,
"Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979. Backward takes
one more all-gather. Gathered values are added in the order of the replicas, so that all replicas
compute the same bits. A replica without rows takes part in both.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hvdtrain.device import is_cpu
from hvdtrain.errors import UsageError

AllGather = Callable[[Tensor], Tensor]  # [k] -> [replicas, k], of the same dtype and device


@dataclass(frozen=True)
class Moments:
    """Mean and variance of a micro-batch, per channel.

    Attributes:
        count: values per channel, over all replicas.
        mean: [channels], in fp32, or fp64 if the input is.
        variance: [channels], biased, of the same dtype.
    """

    count: float
    mean: Tensor
    variance: Tensor


class SynchronisedBatchNorm(_BatchNorm):
    """A batch norm that normalises over the rows of all replicas in training.

    All replicas must run the same layers in the same order, forward and backward, even without
    rows. Gradients of weight and bias are those of this replica's rows; their sum over the
    replicas is the whole gradient.

    Attributes:
        all_gather: blocks until every replica of the stage has called it.
        record: if set, each forward appends its moments to this list.
        replay: if set, forward takes its moments from this iterator and gathers nothing.
    """

    all_gather: AllGather
    record: list[Moments] | None = None
    replay: Iterator[Moments] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [n, channels, ...]; n may be 0 in training.

        Raises:
            ValueError: if all replicas together have one value per channel.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        moments = self._moments(input)
        if self.track_running_stats:
            self._track(moments)
        normalised: Tensor = _Normalise.apply(
            input, self.weight, self.bias, moments, self.eps, self.all_gather
        )
        return normalised

    def _moments(self, input: Tensor) -> Moments:
        if self.replay is not None:
            return next(self.replay)
        moments = gather_moments(input.detach(), self.all_gather)
        if moments.count == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{tuple(input.shape)} on this replica and one value over all of them"
            )
        if self.record is not None:
            self.record.append(moments)
        return moments

    @torch.no_grad()
    def _track(self, moments: Moments) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None or moments.count == 0:
            return
        factor = self.momentum
        if factor is None:
            tracked = self.num_batches_tracked
            factor = 0.0 if tracked is None else 1 / float(tracked)
        unbiased = moments.variance * (moments.count / (moments.count - 1))
        self.running_mean.mul_(1 - factor).add_(moments.mean, alpha=factor)
        self.running_var.mul_(1 - factor).add_(unbiased, alpha=factor)


class SynchronisedBatchNorm1d(SynchronisedBatchNorm, nn.BatchNorm1d):
    """Synchronised batch norm of [n, channels] and [n, channels, length]."""


class SynchronisedBatchNorm2d(SynchronisedBatchNorm, nn.BatchNorm2d):
    """Synchronised batch norm of [n, channels, height, width]."""


class SynchronisedBatchNorm3d(SynchronisedBatchNorm, nn.BatchNorm3d):
    """Synchronised batch norm of [n, channels, depth, height, width]."""


SYNCHRONISED: dict[type[nn.Module], type[SynchronisedBatchNorm]] = {
    nn.BatchNorm1d: SynchronisedBatchNorm1d,
    nn.BatchNorm2d: SynchronisedBatchNorm2d,
    nn.BatchNorm3d: SynchronisedBatchNorm3d,
}


def synchronise(module: nn.Module, all_gather: AllGather) -> int:
    """Make every batch norm in `module` normalise over the rows of all replicas.

    The change is in place: parameters and buffers stay the same objects under the same names.
    Batch norms that are synchronised already get the new `all_gather`.

    Args:
        module: a component, or a batch norm itself.
        all_gather: [k] -> [replicas, k], rows in the same order on all replicas; called once in
            each forward and once in each backward whose input needs a gradient.

    Returns:
        The number of batch norms.

    Raises:
        UsageError: if a layer is a batch norm of another class, whose forward is not known.
    """
    layers = [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)
    ]
    for name, layer in layers:
        if not isinstance(layer, SynchronisedBatchNorm) and type(layer) not in SYNCHRONISED:
            raise UsageError(
                f"layer {name!r} is a {type(layer).__name__}, which cannot be synchronised: use "
                "torch.nn.BatchNorm1d, 2d or 3d, or --batch-norm local"
            )
    for _, layer in layers:
        # Change the class in place: other modules may hold references to the layer.
        layer.__class__ = SYNCHRONISED.get(type(layer), type(layer))
        assert isinstance(layer, SynchronisedBatchNorm)
        layer.all_gather = all_gather
    return len(layers)


@contextmanager
def keeping_statistics(layers: Iterable[_NormBase]) -> Iterator[None]:
    """Let forwards of PyTorch's layers in training mode leave running statistics as they are.

    For backwards: a checkpoint inside a model runs forwards again, which would count each
    micro-batch twice, and in an order that depends on the plan.
    """
    spare = torch.zeros((), dtype=torch.long)
    changed = [
        (vars(layer), layer._buffers, layer.momentum, layer.num_batches_tracked)
        for layer in layers
        if layer.training
    ]
    for attributes, buffers, _, counter in changed:  # setting attributes of modules is slow
        # Not `track_running_stats`: a checkpoint must save as many tensors as its forward.
        attributes["momentum"] = 0.0
        if counter is not None:
            buffers["num_batches_tracked"] = spare
    try:
        yield
    finally:
        for attributes, buffers, momentum, counter in changed:
            attributes["momentum"] = momentum
            if counter is not None:
                buffers["num_batches_tracked"] = counter


def gather_moments(input: Tensor, all_gather: AllGather) -> Moments:
    """Return the moments of [n, channels, ...] over the rows of all replicas."""
    channels, dtype = input.size(1), torch.promote_types(input.dtype, torch.float32)
    # Gather in fp64: fp32 cannot count beyond 2**24 values. The message is small either way.
    local = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
    if input.numel() > 0:
        count = input.numel() // channels
        mean, variance = _local_moments(input, dtype)
        local[0] = count
        local[1 : 1 + channels] = mean
        local[1 + channels :] = variance.double() * count
    gathered = all_gather(local)
    counts, means, m2 = gathered.split([1, channels, channels], dim=1)
    total = sum(counts.flatten().tolist())
    divisor = max(total, 1)
    mean = _sum_in_order(counts * means) / divisor
    variance = _sum_in_order(m2 + counts * (means - mean).square()) / divisor
    return Moments(total, mean.to(dtype), variance.to(dtype))


def _local_moments(input: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not is_cpu(input.device):
        return moments_by_operations(input, dtype)
    # The kernel of torch's own batch norm, many times faster than torch.var_mean on CPUs. Its
    # results have the dtype of the running statistics that it takes, which are unused here.
    unused = torch.zeros(2, input.size(1), dtype=dtype, device=input.device)
    mean, variance = torch.batch_norm_update_stats(input, unused[0], unused[1], 0.0)
    return mean, variance


def moments_by_operations(input: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of each channel, on any device."""
    variance, mean = torch.var_mean(input.to(dtype), _all_but_channels(input), correction=0)
    return mean, variance


class _Normalise(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, mean and variance depending on input.

    Ioffe and Szegedy, "Batch Normalization", ICML 2015; with xhat the normalised input, dy the
    gradient of the output and n the count, the gradient of the input is
    weight / sqrt(variance + eps) * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n).
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Moments,
        eps: float,
        all_gather: AllGather,
    ) -> Tensor:
        mean, variance = moments.mean, moments.variance
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.constants = moments.count, eps, all_gather
        return functional.batch_norm(input, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        count, eps, all_gather = ctx.constants
        sums = _gradient_sums(gradient, input, mean, variance, eps)
        of_input = None
        if ctx.needs_input_grad[0]:
            totals = _sum_in_order(all_gather(sums.flatten())).view_as(sums)
            scale = (variance + eps).rsqrt() * (1 if weight is None else weight)
            of_mean, of_variance = -scale * totals / max(count, 1)
            # Reuse batch_norm to compute xhat * of_variance + of_mean.
            of_input = functional.batch_norm(
                input.to(mean.dtype), mean, variance, of_variance, of_mean, eps=eps
            )
            of_input.addcmul_(gradient.to(mean.dtype), _per_channel(scale, input))
            of_input = of_input.to(input.dtype)
        of_bias, of_weight = sums
        return (
            of_input,
            of_weight if ctx.needs_input_grad[1] else None,
            of_bias if ctx.needs_input_grad[2] else None,
            *(None,) * 3,
        )


def _gradient_sums(
    gradient: Tensor, input: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Return sum(dy) and sum(dy * xhat) over this replica's rows, [2, channels]."""
    if input.numel() == 0:
        return torch.zeros(2, len(mean), dtype=mean.dtype, device=mean.device)
    if not is_cpu(input.device):
        return gradient_sums_by_operations(gradient, input, mean, variance, eps)
    # torch's kernel for a batch norm with fixed statistics returns both sums, as the gradients of
    # bias and weight. On a GPU it requires more, such as the gradient of the input.
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, input, None, mean, variance, None, None, False, eps, [False, True, True]
    )
    return torch.stack([of_bias, of_weight]).to(mean.dtype)


def gradient_sums_by_operations(
    gradient: Tensor, input: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Return sum(dy) and sum(dy * xhat), [2, channels], on any device."""
    dims, dy = _all_but_channels(input), gradient.to(mean.dtype)
    normalised = functional.batch_norm(input.to(mean.dtype), mean, variance, eps=eps)
    return torch.stack([dy.sum(dims), (dy * normalised).sum(dims)])


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _sum_in_order(rows: Tensor) -> Tensor:
    """Add up [replicas, k] row by row: torch.sum does not guarantee an order."""
    return reduce(torch.add, rows.unbind())


def _per_channel(values: Tensor, input: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (input.dim() - 2))
