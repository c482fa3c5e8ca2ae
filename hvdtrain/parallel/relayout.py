"""Compute which components move between ranks when a plan replaces another."""

from typing import NamedTuple

from hvdtrain.parallel.plan import Plan


class Move(NamedTuple):
    """The transfer of one component from a rank that holds it to a rank that needs it."""

    component: str
    sender: int
    receiver: int


def is_same_layout(before: Plan, after: Plan) -> bool:
    """Return whether every rank holds the same stages: then nothing is moved or rebuilt."""
    pairs = [[(stage.components, stage.ranks) for stage in p.stages] for p in (before, after)]
    return pairs[0] == pairs[1]


def moves(before: Plan, after: Plan) -> list[Move]:
    """Return the components that ranks need under `after` and do not hold under `before`.

    The moves are in the order of the model. Replicas take turns as senders, to share the load.
    """
    held = _holders(before)
    transfers: list[Move] = []
    for component, receivers in _holders(after).items():
        senders = held[component]
        lacking = [rank for rank in receivers if rank not in senders]
        for receiver in lacking:
            transfers.append(Move(component, senders[len(transfers) % len(senders)], receiver))
    return transfers


def _holders(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: stage.ranks for stage in plan.stages for name in stage.components}
