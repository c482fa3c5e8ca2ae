"""What one step has of its own: input, tensors on their way, and results as they come."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from hvdtrain.parallel.halves import Group
from hvdtrain.parallel.program import Key
from hvdtrain.parallel.waiting import ReductionTime, WaitTime


class Held(dict[Key, tuple[Tensor, int]]):
    """Tensors, each with the number of uses after which it is gone."""

    def put(self, key: Key, tensor: Tensor, uses: int) -> None:
        """Keep a tensor for so many uses."""
        if uses:
            self[key] = tensor, uses

    def use(self, key: Key) -> Tensor:
        """A tensor that is kept; the last use lets it go."""
        tensor, uses = self.pop(key)
        self.put(key, tensor, uses - 1)
        return tensor


@dataclass
class Step:
    """One step of one rank.

    Attributes:
        images: uint8 [n, H, W, C], this rank's of the first stage. labels: int64, of the last.
        loss_sum, correct: over this rank's samples in the last stage; correct in evaluation.
        seconds: by kind of action, without waiting.
        reduction: of gradients. waited: for other ranks otherwise.
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
    is_finished: bool = False  # all gradients are reduced and clipped
    norm: float = math.nan  # of all gradients, where the rule asks for it
    is_bad: bool = False  # an update was left out, because the gradients are not what they may be
