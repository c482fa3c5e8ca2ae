"""A few steps in which every two of the things that a step can have meet at least once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product

from tests.mpi.plans import PLANS


@dataclass(frozen=True)
class Case:
    """One step to compare with the serial one."""

    plan: str
    model: str
    precision: str
    batch_size: int
    microbatches: int  # 0: those of the plan
    batch_norm: str
    recompute: str | None
    label_smoothing: float
    synchronous: bool

    def __str__(self) -> str:
        values = (f"{field.name}={getattr(self, field.name)}" for field in fields(self)[1:])
        return f"{self.plan} {' '.join(values)}"


RECOMPUTED = {"cnn": "conv*", "vit": "*.mlp,embed", "resnet": "layer1.0,layer3.0,stem"}


def possible(ranks: int) -> list[Case]:
    """Every combination that makes sense on so many ranks."""
    found = []
    for plan, model, precision, batch in product(
        PLANS[ranks], RECOMPUTED, ("fp64", "fp32", "bf16"), (13, 8, 1)
    ):
        if precision == "bf16" and model != "vit":
            continue  # the bound of bf16 is that of a transformer
        normed, split = model == "resnet", "zb-h1" in plan
        # Batch norm needs more than one value per channel.
        size, microbatches = (26, 2) if normed else (batch, 0)
        for norm, again, smoothing, synchronous in product(
            ("local", "sync") if normed and not split else ("local",),
            (None,) if split else (None, RECOMPUTED[model]),
            (0.0, 0.1),
            (False, True),
        ):
            found.append(
                Case(
                    *(plan, model, precision, size, microbatches),
                    *(norm, again, smoothing, synchronous),
                )
            )
    return list(dict.fromkeys(found))


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Return cases that hold every pair of values which any case holds, greedily few."""
    held: Mapping[Case, frozenset[object]] = {case: frozenset(pairs(case)) for case in cases}
    missing = set().union(*held.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(held[case] & missing))
        missing -= held[best]
        chosen.append(best)
    return chosen


def pairs(case: Case) -> list[object]:
    """Every two values of a case, with their names."""
    values = [(field.name, getattr(case, field.name)) for field in fields(case)]
    return list(combinations(values, 2))
