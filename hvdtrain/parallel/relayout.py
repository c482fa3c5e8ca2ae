"""What has to move when a plan takes another's place."""

from typing import NamedTuple

from hvdtrain.parallel.plan import Plan


class Move(NamedTuple):
    """All of a component, from a rank that holds it to one that needs it."""

    component: str
    sender: int
    receiver: int


def is_same_layout(before: Plan, after: Plan) -> bool:
    """Whether every rank holds the same stages: then nothing moves, and nothing is built anew."""
    pairs = [[(stage.components, stage.ranks) for stage in p.stages] for p in (before, after)]
    return pairs[0] == pairs[1]


def moves(before: Plan, after: Plan) -> list[Move]:
    """What ranks need under `after` and do not hold under `before`, in the order of the model.

    Replicas take turns as senders, so that no one sends everything.
    """
    held = _holders(before)
    found: list[Move] = []
    for component, receivers in _holders(after).items():
        senders = held[component]
        lacking = [rank for rank in receivers if rank not in senders]
        for receiver in lacking:
            found.append(Move(component, senders[len(found) % len(senders)], receiver))
    return found


def _holders(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: stage.ranks for stage in plan.stages for name in stage.components}
