"""Meetings of replicas that do not agree in every step, and their state in checkpoints."""

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


class Meetings(Kept, Protocol):
    """The meetings of one stage's replicas. All methods are collective among them."""

    @property
    def differ(self) -> bool:
        """Return whether the replicas may hold different weights now."""

    def before_step(self, epoch: int) -> None:
        """Prepare for a step of training.

        Args:
            epoch: of the step, from 0.
        """

    def after_step(self, step: int) -> None:
        """Meet if it is due after a step of all replicas.

        Args:
            step: of the epoch, from 1, so that the meetings of an epoch do not depend on where
                the run was resumed.
        """

    def meet(self) -> None:
        """Agree now: before an evaluation, and at the end of the run."""

    def agreed(self) -> Mapping[str, Tensor]:
        """Return what all replicas would hold if they agreed now, by the names of a checkpoint.

        Checkpoints hold these tensors instead of those of one replica; tensors in which replicas
        do not differ are left out.
        """

    def counted(self) -> Mapping[str, float]:
        """Return what this rank has counted since the start, by name, such as meetings."""


class NoMeetings(Kept):
    """Replicas that agree in every step have nothing to meet for."""

    differ = False

    def before_step(self, epoch: int) -> None:
        """Do nothing."""

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def meet(self) -> None:
        """Do nothing."""

    def agreed(self) -> Mapping[str, Tensor]:
        """Return nothing: replicas agree."""
        return {}

    def counted(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}
