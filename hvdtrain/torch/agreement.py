"""The agreement of all ranks on what they do next: one small all-gather before they communicate.

Every collective call of a user's loop starts with such a note. If one rank makes a step fewer than
the others, its next note names another action than theirs, and all ranks report it, where they
would otherwise wait for one another without an end.
"""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain import transfer
from hvdtrain.errors import CheckFailed, RankError, UsageError
from hvdtrain.host.poll import wait_until
from hvdtrain.parallel.checksums import fingerprint
from hvdtrain.world import World

Facts = Mapping[str, Mapping[str, str]]  # in words, by kind and name


class Action(IntEnum):
    """An action that all ranks must do together."""

    PREPARING = 0
    COUNTING = 1
    REDUCING = 2
    COMPARING = 3
    EVALUATING = 4
    ADDING = 5
    SAVING = 6
    LOADING = 7
    LEAVING = 8
    MEETING = 9


WORDS = {
    Action.PREPARING: "preparing model {model}",
    Action.COUNTING: "counting the samples of backward {number} of model {model}",
    Action.REDUCING: "in backward {number} of model {model}",
    Action.COMPARING: "comparing model {model}",
    Action.EVALUATING: "evaluating",
    Action.ADDING: "adding up numbers",
    Action.SAVING: "saving",
    Action.LOADING: "loading",
    Action.LEAVING: "at the end of the program",
    Action.MEETING: "averaging model {model} in meeting {number}",
}


class Note(NamedTuple):
    """One rank's line in the all-gather; all values are integers of 64 bits.

    Attributes:
        action: what the rank does next.
        model: number of the prepared model.
        number: number of the backward of this model, from 1.
        position: samples of the loader consumed after this batch; -1 without a loader.
        samples: samples of this rank.
        weight: bits of the weight that the user gave them.
        settings: checksum of the learning rates and other options of its optimizers.
        contents: checksum of the data set.
        missing: number of parameters without a gradient on this rank.
        missing_digest: checksum of their places.
        fingerprint: of the weights; 0 where they are not compared.
        changed: number of buffers that changed for the first time.
        interrupted, preempted: whether this rank was requested to stop.
    """

    action: int
    model: int = 0
    number: int = 0
    position: int = -1
    samples: int = 0
    weight: int = 0
    settings: int = 0
    contents: int = 0
    missing: int = 0
    missing_digest: int = 0
    fingerprint: int = 0
    changed: int = 0
    interrupted: int = 0
    preempted: int = 0


class Agreement:
    """Sends and compares the notes of all ranks.

    Args:
        limit: seconds to wait for the other ranks.

    Attributes:
        settle: reads the note that is under way before another one is sent, as in a backward that
            passes through two models; None if its sender reads it.
    """

    def __init__(self, world: World, limit: float) -> None:
        self.limit = limit
        self.rank, self.size = world.rank, world.size
        # A communicator of its own: an all-gather must not meet another collective call.
        self.communicator = world.communicator.Dup() if world.communicator is not None else None
        self._sent: np.ndarray | None = None
        self._received = np.empty((world.size, len(Note._fields)), np.int64)
        self._request: Any = None
        self._note = Note(Action.LEAVING)
        self.settle: Callable[[], object] | None = None

    def post(self, note: Note) -> None:
        """Send this rank's note, and return at once."""
        if self.settle is not None:
            self.settle()
        assert self._request is None, "one note at a time"
        self._note = note
        # The memory must live as long as the request.
        self._sent = np.array(note, np.int64)
        if self.communicator is not None:
            self._request = self.communicator.Iallgather(self._sent, self._received)
        else:
            self._received[0] = self._sent

    def read(self) -> list[Note]:
        """Return the notes of all ranks, in rank order, to the note that was posted.

        Raises:
            CheckFailed: on all ranks, if they do different things.
            RankError: if a rank does not answer within the limit.
        """
        if self._request is not None:
            self._wait(self._request)
            self._request = None
        notes = [Note(*map(int, row)) for row in self._received]
        check_same(notes)
        return notes

    def exchange(self, note: Note) -> list[Note]:
        """Post a note and return those of all ranks, as `read` does."""
        self.post(note)
        return self.read()

    def gather(self, note: Note, value: Any) -> list[Any]:
        """Return every rank's small `value`, in rank order, once all ranks agree on the note."""
        self.exchange(note)
        return self.communicator.allgather(value) if self.communicator else [value]

    def broadcast(self, note: Note, value: Any, root: int = 0) -> Any:
        """Return the `value` of rank `root`, once all ranks agree on the note.

        It may hold tensors of any size.
        """
        self.exchange(note)
        return transfer.broadcast(self.communicator, value, root) if self.communicator else value

    def close(self) -> None:
        """Free the communicator. Collective."""
        if self.communicator is not None:
            self.communicator.Free()
            self.communicator = None

    def _wait(self, request: Any) -> None:
        until = time.monotonic() + self.limit
        wait_until(lambda: request.Test() or time.monotonic() > until)
        if not request.Test():
            raise RankError(
                f"rank {self.rank} has waited {self.limit:.0f} s for the other ranks "
                f"{in_words(self._note)}: look for a rank that hangs, or raise stall_timeout of "
                "hvdtrain.torch.start"
            )


def as_bits(number: float) -> int:
    """Return a number as an integer with the same bits, to travel in a note."""
    return int(np.float64(number).view(np.int64))


def from_bits(bits: int) -> float:
    """Return the number with these bits."""
    return float(np.int64(bits).view(np.float64))


def check_same(notes: Sequence[Note]) -> None:
    """Compare what the ranks do.

    Raises:
        CheckFailed: if it differs.
    """
    first = notes[0]
    for rank, note in enumerate(notes):
        if note[:3] != first[:3]:
            raise CheckFailed(
                f"rank {rank} is {in_words(note)} while rank 0 is {in_words(first)}: make the "
                "same steps, evaluations and saves on all ranks (distributed.loader and "
                "distributed.sampler yield the same number of batches on each)"
            )
        if note.position != first.position:
            raise CheckFailed(
                f"rank {rank} has read {note.position} samples and rank 0 has read "
                f"{first.position}, {in_words(note)}: take the same number of batches on all ranks"
            )


def in_words(note: Note) -> str:
    """Return what a rank does, as a part of a sentence."""
    return WORDS[Action(note.action)].format(model=note.model, number=note.number)


def settings(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[str, str]:
    """Return the classes and options of optimizers.

    Args:
        names: of the parameters, by their identity.
    """
    result: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        result[f"class of optimizer {number}"] = type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                what = [names.get(id(item)) for item in value] if key == "params" else value
                shown = what.tolist() if isinstance(what, Tensor) else what
                result[f"{key} of group {place} of optimizer {number}"] = str(shown)
    return result


def digest(optimizers: Sequence[Optimizer]) -> int:
    """Return a checksum of the learning rates and of all other numbers of optimizers."""
    numbers = [
        float(value)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for key, value in group.items()
        if isinstance(value, (int, float)) or key == "lr"
    ]
    return zlib.crc32(repr(numbers).encode())


def check_alike(everywhere: Sequence[Facts], cure: str = "build the same on all ranks") -> None:
    """Compare the facts of all ranks.

    Raises:
        UsageError: if any differ, naming the first one.
    """
    for rank, facts_of_rank in enumerate(everywhere):
        for kind, first in everywhere[0].items():
            values = facts_of_rank[kind]
            names = [name for name in {**first, **values} if first.get(name) != values.get(name)]
            if names:
                name = names[0]
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                theirs, expected = (side.get(name, "absent")[:80] for side in (values, first))
                raise UsageError(
                    f"rank {rank} has another {kind} than rank 0: {name} is {theirs} there and "
                    f"{expected} on rank 0{more}: {cure}"
                )


def check_weights(agreement: Agreement, note: Note, weights: Mapping[str, Tensor]) -> None:
    """Compare the weights of all ranks that give any. Collective.

    Raises:
        CheckFailed: on all ranks, if they differ.
    """
    number = fingerprint(weights.values()) if agreement.size > 1 else 0
    notes = agreement.exchange(note._replace(fingerprint=number))
    if len({one.fingerprint for one in notes if one.fingerprint}) > 1:
        raise_difference(agreement, note, weights)


def raise_difference(agreement: Agreement, note: Note, weights: Mapping[str, Tensor]) -> None:
    """Name the first weight that differs between ranks. Collective.

    Raises:
        CheckFailed: on all ranks.
    """
    digests: list[Any] = agreement.gather(
        note, {name: fingerprint([value]) for name, value in weights.items()}
    )
    everywhere = [(rank, theirs) for rank, theirs in enumerate(digests) if theirs]
    first, expected = everywhere[0]
    for rank, theirs in everywhere:
        different = [name for name in theirs if theirs[name] != expected[name]]
        if different:
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise CheckFailed(
                f"rank {rank} and rank {first} hold different values of {different[0]}{more}: "
                "load weights before prepare or on all ranks, change none on one rank only, and "
                "decide by numbers that are the same on all ranks, as of distributed.total"
            )
    raise CheckFailed("the ranks hold different weights: change none on one rank only")
