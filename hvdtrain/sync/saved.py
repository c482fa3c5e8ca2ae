"""State of a way to agree, which checkpoints hold beside weights and optimizer state."""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from torch import Tensor

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class Kept(Protocol):
    """Whatever has such a state; by default it has none.

    The names of the tensors end in the name of a parameter, so that those of two stages differ.
    """

    def saved(self) -> dict[str, Tensor]:
        """Return the tensors that this rank writes to a checkpoint, by name; not copies."""
        return {}

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return the names of the tensors that this rank reads.

        Args:
            shapes: of all such tensors of the checkpoint, by name.
        """
        return frozenset()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with the tensors that `wanted` has named."""
        return
