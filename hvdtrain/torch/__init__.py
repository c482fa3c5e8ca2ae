"""Horovod for any PyTorch training loop, in three lines of its program.

    import hvdtrain.torch as distributed

    rank = distributed.start()
    model, optimizer = distributed.prepare(model, optimizer)
    for images, labels in distributed.loader(folder, batch_size):
        ...

After `loss.backward()` gradients are those of the mean loss over the global batch, whatever share
of it each rank has. Everything else of the loop stays as it is.
"""

from hvdtrain.torch.checkpoint import load, save, steps
from hvdtrain.torch.evaluate import evaluate, total
from hvdtrain.torch.loader import loader, sampler
from hvdtrain.torch.prepare import accumulate, clip_norm_, prepare, weight
from hvdtrain.torch.start import Rank, alone, start, stop

__all__ = [
    "Rank",
    "accumulate",
    "alone",
    "clip_norm_",
    "evaluate",
    "load",
    "loader",
    "prepare",
    "sampler",
    "save",
    "start",
    "steps",
    "stop",
    "total",
    "weight",
]
