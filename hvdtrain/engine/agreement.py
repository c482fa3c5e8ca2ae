"""Agreement of the ranks of a user's program on what they do next, and on what they have.

Their collective calls start with a note: one small all-gather before they communicate. If one rank
makes a step fewer than the others, its next note names another action than theirs, and all ranks
report it, where they would otherwise wait for one another without an end.
"""

import math
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvdtrain import transfer
from hvdtrain.errors import CheckFailed, RankError, UsageError
from hvdtrain.host.process import wait_until
from hvdtrain.world import World

Facts = Mapping[str, Mapping[str, str]]  # in words, by kind and name
Digest = TypeVar("Digest")


class Note(NamedTuple):
    """One rank's line in the all-gather; all values are integers of 64 bits.

    Attributes:
        action: checksum of what the rank does next, in words.
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
        cure: what users should do if the ranks do different things.
        limit: seconds to wait for the other ranks.
    """

    def __init__(self, world: World, cure: str, limit: float = math.inf) -> None:
        self.rank, self.size, self.cure, self.limit = world.rank, world.size, cure, limit
        # A communicator of its own: an all-gather must not meet another collective call.
        self.communicator = world.communicator.Dup() if world.communicator is not None else None

    def exchange(self, action: str, **facts: int) -> list[Note]:
        """Return the notes of all ranks, in rank order.

        Args:
            action: what this rank does, as a part of a sentence.
            facts: fields of its note.

        Raises:
            CheckFailed: on all ranks, if they do different things.
            RankError: if a rank does not answer within the limit.
        """
        note = Note(zlib.crc32(action.encode()), **facts)
        if self.communicator is None:
            return [note]
        sent, received = np.array(note, np.int64), np.empty((self.size, len(note)), np.int64)
        request = self.communicator.Iallgather(sent, received)
        until = time.monotonic() + self.limit
        wait_until(lambda: request.Test() or time.monotonic() > until)
        if not request.Test():
            raise RankError(
                f"rank {self.rank} has waited {self.limit:.0f} s for the other ranks {action}: "
                "look for a rank that hangs, or raise stall_timeout of hvdtrain.torch.start"
            )
        notes = [Note(*map(int, row)) for row in received]
        if len({note.action for note in notes}) > 1:
            actions = self.communicator.allgather(action)
            for rank, other in enumerate(actions):
                if other != actions[0]:
                    raise CheckFailed(
                        f"rank {rank} is {other} while rank 0 is {actions[0]}: {self.cure}"
                    )
        return notes

    def gather(self, action: str, value: Any) -> list[Any]:
        """Return every rank's small `value`, in rank order, once all ranks do the same."""
        self.exchange(action)
        return self.communicator.allgather(value) if self.communicator else [value]

    def broadcast(self, action: str, value: Any, root: int = 0) -> Any:
        """Return the `value` of rank `root`, once all ranks do the same.

        It may hold tensors of any size.
        """
        self.exchange(action)
        return transfer.broadcast(self.communicator, value, root) if self.communicator else value

    def close(self) -> None:
        """Free the communicator. Collective."""
        if self.communicator is not None:
            self.communicator.Free()
            self.communicator = None


def check_alike(everywhere: Sequence[Facts], cure: str) -> None:
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


def check_digests(everywhere: Sequence[Mapping[str, Digest]], why: str) -> dict[str, Digest]:
    """Return the digests of all tensors; a rank may hold only some of them.

    Args:
        everywhere: for each rank, the digests by the names of its tensors.
        why: the end of the error, from its punctuation on.

    Raises:
        CheckFailed: if ranks hold different values of a tensor, naming the first one.
    """
    whole: dict[str, Digest] = {}
    owner: dict[str, int] = {}
    for rank, theirs in enumerate(everywhere):
        different = [name for name, value in theirs.items() if whole.get(name, value) != value]
        if different:
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise CheckFailed(
                f"rank {rank} and rank {owner[different[0]]} hold different values of "
                f"{different[0]}{more}{why}"
            )
        whole |= theirs
        owner = dict.fromkeys(theirs, rank) | owner
    return whole
