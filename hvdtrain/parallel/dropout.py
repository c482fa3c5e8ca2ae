"""Dropout with the same mask for each sample under every plan.

PyTorch draws the mask of a whole forward from a generator of the process: with other micro-batches
or ranks the masks differ, so that the plan changes the results of training. Here the mask of a
sample is a hash of the step, the layer, and the sample's place in the batch (SplitMix64: Steele,
Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), the same on every
device.

A checkpoint inside a model runs a forward again in backward. Checkpoints restore the process's
generator, so the number that it draws at each call identifies the mask to reuse.
"""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hvdtrain.errors import UsageError

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIXERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@dataclass
class Draws:
    """The source of masks for the dropout layers of a rank.

    Attributes:
        seed: of the step, the same on all ranks.
        samples: of the current forward, as a range [start, stop) of places in the batch.
        calls: how often each layer was called in this forward.
        made: keys and samples of the step's masks, by the number that the process's generator
            drew for them.
    """

    seed: int = 0
    samples: tuple[int, int] = (0, 0)
    calls: Counter[str] = field(default_factory=Counter)
    made: dict[int, tuple[int, tuple[int, int]]] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Forget the masks of the previous step."""
        self.made.clear()

    def begin_forward(self, samples: tuple[int, int]) -> None:
        """Start the forward of other samples."""
        self.samples = samples
        self.calls.clear()

    def mask(self, layer: str) -> tuple[int, tuple[int, int]]:
        """Return the key and the samples of the mask that a layer needs now.

        Raises:
            UsageError: if a forward is run again in backward with other random numbers.
        """
        drawn = int(torch.randint(2**62, ()))
        if torch._C._current_graph_task_id() == -1:  # not in a backward
            words = repr((self.seed, layer, self.calls[layer])).encode()
            self.calls[layer] += 1
            digest = hashlib.blake2b(words, digest_size=8).digest()
            self.made[drawn] = int.from_bytes(digest) - 2**63, self.samples
        if drawn not in self.made:
            raise UsageError(
                f"dropout {layer} is run again in backward without the random state of its "
                "forward: give the checkpoint preserve_rng_state=True"
            )
        return self.made[drawn]


class SampleDropout(nn.Module):
    """A dropout layer whose mask depends on the sample; see `follow_samples`.

    `Dropout` drops values, the other classes whole channels.

    Attributes:
        p: the probability with which a value is dropped.
        inplace: as in PyTorch.
        draws: the source of masks.
        name: of the layer, unique in the model.
    """

    p: float
    inplace: bool
    draws: Draws
    name: str

    def forward(self, input: Tensor) -> Tensor:
        """Drop values of [n, ...], or of [n * k, ...] with k rows per sample; scale the others.

        PyTorch masks input of any other shape, whose first dimension is not that of the samples.
        """
        if not self.training or self.p == 0 or input.ndim == 0:
            return super().forward(input)  # type: ignore[no-any-return]
        key, (first, end) = self.draws.mask(self.name)
        rows = max(end - first, 1)
        if len(input) % rows:
            return super().forward(input)  # type: ignore[no-any-return]
        shape = input.shape if isinstance(self, nn.Dropout) else input.shape[:2]
        values = math.prod(shape) // rows
        dropped = dropped_of_samples(key, first, rows, values, self.p, input.device)
        mask = dropped.view(*shape, *[1] * (input.ndim - len(shape)))
        target = input if self.inplace else input.clone()  # a clone keeps the memory format
        return target.masked_fill_(mask, 0).mul_(1 / (1 - self.p) if self.p < 1 else 0.0)


# PyTorch's dropout classes and their replacements.
FOLLOWING: dict[type[nn.Module], type[SampleDropout]] = {
    kind: type(f"Sample{kind.__name__}", (SampleDropout, kind), {})
    for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
}


def follow_samples(name: str, component: nn.Module, draws: Draws) -> None:
    """Make every dropout layer in a component mask by samples, in place.

    Functions such as `functional.dropout`, and the dropout inside attention, still draw per rank.

    Args:
        name: of the component.
        component: the module.
        draws: the source of masks.
    """
    for path, layer in component.named_modules():
        if type(layer) in FOLLOWING:
            # Change the class in place: other modules may hold references to the layer.
            layer.__class__ = FOLLOWING[type(layer)]
            assert isinstance(layer, SampleDropout)
            layer.draws, layer.name = draws, f"{name}.{path}" if path else name


def dropped_of_samples(
    key: int, first: int, rows: int, values: int, probability: float, device: torch.device
) -> Tensor:
    """Return the mask of `rows` samples from place `first`: bool [rows, values], True to drop.

    Each bit depends only on the key, the sample's place, the value's place and the probability.
    """
    samples = torch.arange(first, first + rows, device=device)
    streams = _mix(samples.add_(1).mul_(GOLDEN).add_(key))
    counters = torch.arange(1, (values + 1) // 2 + 1, device=device).mul_(GOLDEN)
    drawn = _mix(streams[:, None] + counters).view(torch.int32)[:, :values]
    return drawn < round(probability * 2**32) - 2**31


def _mix(bits: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 in place: each output bit depends on all 64 input bits."""
    for shift, factor in MIXERS:
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(factor)
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Shift int64 right, filling with zeros."""
    return (bits >> places).bitwise_and_(2 ** (64 - places) - 1)
