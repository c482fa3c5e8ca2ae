"""Comparison of the ranks: settings of optimizers, and weights to the bit."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.sync.states import fingerprint
from hvdtrain.torch.agreement import Agreement, Note
from hvdtrain.torch.state import State

Facts = Mapping[str, Mapping[str, str]]  # in words, by kind and name


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


def check_models(state: State, note: Note, are_compared: bool = True) -> None:
    """Compare the weights of the prepared models, on the ranks that compare theirs. Collective.

    Raises:
        CheckFailed: on all ranks, if they differ.
    """
    check_weights(
        *(state, note),
        {
            f"{number}.{name}" if len(state.models) > 1 else name: value
            for number, model in enumerate(state.models if are_compared else ())
            for name, value in model.model.named_parameters()
        },
    )


def check_weights(state: State, note: Note, weights: Mapping[str, Tensor]) -> None:
    """Compare the weights of all ranks that give any. Collective.

    Raises:
        CheckFailed: on all ranks, if they differ.
    """
    number = fingerprint(weights.values()) if state.place.size > 1 else 0
    notes = state.agreement.exchange(note._replace(fingerprint=number))
    if len({one.fingerprint for one in notes if one.fingerprint}) > 1:
        raise_difference(state.agreement, note, weights)


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
