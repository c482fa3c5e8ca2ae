"""Activation recomputation: drop a component's activations and run it again before backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, through torch's own
checkpointing. Recomputation does not change buffers and does not communicate: synchronised batch
norms reuse the moments of the first forward instead of gathering them again.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.parallel.batchnorm import Moments, SynchronisedBatchNorm


def forward_recomputed(module: nn.Module, activations: Tensor) -> Tensor:
    """Return `module(activations)`, keeping only `activations` and the moments of batch norms.

    Results, gradients and buffers have the same bits as those of a plain call. With gradients off
    it is a plain call. The recomputation uses the random numbers and autocast of the first
    forward. Forwards of several micro-batches may be in flight, with backwards in any order.

    Args:
        module: must run the same layers at each call.
        activations: [n, ...]; must not change before backward.

    Returns:
        The output of the module.
    """
    emitted: Tensor
    if torch.is_grad_enabled():
        emitted = checkpoint(
            module,
            activations,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=partial(_contexts, module),
        )
    else:
        emitted = module(activations)
    return emitted


def _contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a first forward and of its recomputations."""
    moments: dict[SynchronisedBatchNorm, list[Moments]] = {
        layer: [] for layer in module.modules() if isinstance(layer, SynchronisedBatchNorm)
    }
    return _recording(moments), _Recomputing(module, moments)


@contextmanager
def _recording(moments: dict[SynchronisedBatchNorm, list[Moments]]) -> Iterator[None]:
    for layer, record in moments.items():
        layer.record = record
    try:
        yield
    finally:
        for layer in moments:
            layer.record = None


class _Recomputing(AbstractContextManager[None]):
    """Replays the moments and lets the module change copies of its buffers, which are discarded.

    Entered once per recomputation; there are several if backward runs again on a retained graph.
    """

    def __init__(
        self, module: nn.Module, moments: dict[SynchronisedBatchNorm, list[Moments]]
    ) -> None:
        self.module, self.moments = module, moments
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        for layer, record in self.moments.items():
            layer.replay = iter(record)
        self.buffers = [
            (part, name, buffer)
            for part in self.module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]
        for part, name, buffer in self.buffers:
            setattr(part, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        for part, name, buffer in self.buffers:
            setattr(part, name, buffer)
        for layer in self.moments:
            layer.replay = None
