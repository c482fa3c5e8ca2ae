"""Groups of samples that batch norm normalises together under a plan.

All functions are pure functions of plan and batch size.
"""

from collections.abc import Collection

from hvdtrain.parallel.cut import Cut, Range, cut
from hvdtrain.parallel.plan import Plan

Groups = tuple[tuple[Range, ...], ...]  # per replica: ranges of samples normalised together


def groups_of(plan: Plan, pieces: Cut, stage: int, is_synchronised: bool) -> Groups:
    """Return the groups of a stage: per replica, or one set for all if synchronised."""
    parts = list(pieces.parts[stage].values())
    if is_synchronised:
        microbatches = zip(*parts, strict=True)
        parts = [tuple((ranges[0][0], ranges[-1][1]) for ranges in microbatches)]
    return tuple(tuple(r for r in ranges if r[0] < r[1]) for ranges in parts)


def is_same(
    before: Plan, after: Plan, sizes: Collection[int], normed: Collection[str], is_synced: bool
) -> bool:
    """Return whether batch norm, running statistics included, computes the same under both plans.

    Args:
        sizes: the batch sizes to compare.
        normed: the components that have batch norms.
    """
    return all(
        _by_component(before, size, normed, is_synced)
        == _by_component(after, size, normed, is_synced)
        for size in sizes
    )


def _by_component(
    plan: Plan, size: int, normed: Collection[str], is_synced: bool
) -> dict[str, Groups]:
    pieces = cut(plan, size)
    return {
        name: groups_of(plan, pieces, number, is_synced)
        for number, stage in enumerate(plan.stages)
        for name in stage.components
        if name in normed
    }


def sample_counts(
    plan: Plan, pieces: Cut, normed: Collection[str], synchronised: Collection[int]
) -> list[int]:
    """Return the sizes of the groups, ascending; an empty list without batch norms."""
    counts = {
        stop - start
        for number, stage in enumerate(plan.stages)
        if any(name in normed for name in stage.components)
        for ranges in groups_of(plan, pieces, number, number in synchronised)
        for start, stop in ranges
    }
    return sorted(counts)
