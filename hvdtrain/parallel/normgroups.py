"""What batch norm normalises together under a plan: pure functions of plan and batch size."""

from collections.abc import Collection

from hvdtrain.parallel.cut import Cut, Range, cut
from hvdtrain.parallel.plan import Plan

Groups = tuple[tuple[Range, ...], ...]  # samples that are normalised together, replica by replica


def groups_of(plan: Plan, pieces: Cut, stage: int, is_synchronised: bool) -> Groups:
    """Of a stage, whose replicas normalise each by itself, or together."""
    parts = list(pieces.parts[stage].values())
    if is_synchronised:
        parts = [tuple((each[0][0], each[-1][1]) for each in zip(*parts, strict=True))]
    return tuple(tuple(own for own in each if own[0] < own[1]) for each in parts)


def is_same(
    before: Plan, after: Plan, sizes: Collection[int], normed: Collection[str], is_synced: bool
) -> bool:
    """Whether batch norm computes the same under both plans, its running statistics included.

    Args:
        sizes: of batches. normed: the components that have batch norms.
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
    """Sizes of what batch norms normalise together, ascending; none where there are none."""
    counts = {
        stop - start
        for number, stage in enumerate(plan.stages)
        if any(name in normed for name in stage.components)
        for each in groups_of(plan, pieces, number, number in synchronised)
        for start, stop in each
    }
    return sorted(counts)
