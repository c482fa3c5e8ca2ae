"""A small set of steps that contains every pair of settings of a step at least once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product

from tests.mpi.plans import PLANS


@dataclass(frozen=True)
class Case:
    """The settings of one step to compare with the serial one; 0 micro-batches: the plan's."""

    plan: str
    model: str
    precision: str
    batch_size: int
    microbatches: int
    batch_norm: str
    recompute: str | None
    loss: str
    synchronous: bool

    def __str__(self) -> str:
        values = (f"{field.name}={getattr(self, field.name)}" for field in fields(self)[1:])
        return f"{self.plan} {' '.join(values)}"


RECOMPUTED = {"cnn": "conv*", "vit": "*.mlp,embed", "resnet": "layer1.0,layer3.0,stem"}


def possible(ranks: int) -> list[Case]:
    """Return every valid combination of settings on a number of ranks."""
    cases = []
    for plan, model, precision, batch in product(
        PLANS[ranks], RECOMPUTED, ("fp64", "fp32", "bf16"), (13, 8, 1)
    ):
        if precision == "bf16" and model != "vit":
            continue  # the bound of bf16 is that of a transformer
        normed, split = model == "resnet", "zb-h1" in plan
        # Batch norm needs more than one value per channel.
        size, microbatches = (26, 2) if normed else (batch, 0)
        for norm, again, loss, synchronous in product(
            ("local", "sync") if normed and not split else ("local",),
            (None,) if split else (None, RECOMPUTED[model]),
            ("cross-entropy", "cross-entropy:0.1"),
            (False, True),
        ):
            cases.append(
                Case(
                    *(plan, model, precision, size, microbatches),
                    *(norm, again, loss, synchronous),
                )
            )
    return list(dict.fromkeys(cases))


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Return a few of the cases that hold every pair of values of all cases, chosen greedily."""
    held: Mapping[Case, frozenset[object]] = {case: frozenset(pairs(case)) for case in cases}
    missing = set().union(*held.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(held[case] & missing))
        missing -= held[best]
        chosen.append(best)
    return chosen


def pairs(case: Case) -> list[object]:
    """Return every pair of values of a case, with their names."""
    values = [(field.name, getattr(case, field.name)) for field in fields(case)]
    return list(combinations(values, 2))
