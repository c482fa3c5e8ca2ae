"""The state of one step: its input, tensors that later actions need, and its results."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from hvdtrain.parallel.halves import Group
from hvdtrain.parallel.program import Key
from hvdtrain.parallel.waiting import ReductionTime, WaitTime


class Held(dict[Key, tuple[Tensor, int]]):
    """Tensors by key, each kept for a fixed number of uses."""

    def put(self, key: Key, tensor: Tensor, uses: int) -> None:
        """Keep a tensor for `uses` calls of `use`."""
        if uses:
            self[key] = tensor, uses

    def use(self, key: Key) -> Tensor:
        """Return a tensor that is kept; the last use removes it."""
        tensor, uses = self.pop(key)
        self.put(key, tensor, uses - 1)
        return tensor


@dataclass
class Step:
    """One step of one rank.

    Attributes:
        images: uint8 [n, H, W, C], this rank's samples in the first stage.
        labels: int64 [n], of this rank's samples in the last stage.
        inputs: of this rank's stages, until their backward has run.
        targets: labels on the device, per micro-batch.
        outputs: of this rank's stages.
        input_gradients: gradients of `inputs`.
        pending_weights: the second halves of split backwards.
        loss_sum: over this rank's samples in the last stage.
        correct: correctly classified samples of this rank in the last stage; evaluation only.
        seconds: by kind of action, without waiting.
        reduction: time of the gradient reductions.
        waited: time spent waiting for other ranks, without reductions.
        is_finished: whether all gradients are reduced and clipped.
        norm: of all gradients together; NaN unless the update rule needs it.
        is_bad: whether an update was left out because of bad gradients.
    """

    images: np.ndarray
    labels: np.ndarray
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    targets: dict[Key, Tensor] = field(default_factory=dict)
    outputs: Held = field(default_factory=Held)
    input_gradients: Held = field(default_factory=Held)
    pending_weights: dict[Key, list[Group]] = field(default_factory=dict)
    loss_sum: Tensor | None = None
    correct: Tensor | None = None
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    reduction: ReductionTime = field(default_factory=ReductionTime)
    waited: WaitTime = field(default_factory=WaitTime)
    is_finished: bool = False
    norm: float = math.nan
    is_bad: bool = False
