"""The plans to test by world size, as functions of any list of components."""

from collections.abc import Callable, Sequence

from hvdtrain.plan.plan import Plan, Stage, pipeline, replicated

Maker = Callable[[Sequence[str]], Plan]


def staged(
    *stages: tuple[Sequence[int], Sequence[int]], microbatches: int = 4, schedule: str = "1f1b"
) -> Maker:
    """Return a maker of stages of (ranks, shares) with similar numbers of components."""

    def make(components: Sequence[str]) -> Plan:
        count, size = len(stages), len(components)
        bounds = [size * i // count for i in range(count + 1)]
        made = (
            Stage(tuple(components[bounds[i] : bounds[i + 1]]), tuple(ranks), tuple(shares))
            for i, (ranks, shares) in enumerate(stages)
        )
        return Plan(tuple(made), microbatches, schedule)

    return make


def dp(ranks: int, schedule: str = "1f1b") -> Maker:
    return lambda components: replicated(components, ranks, 3, schedule)


def hp(
    ranks: int, stages: int, replicas: int, schedule: str = "1f1b", microbatches: int = 4
) -> Maker:
    def make(components: Sequence[str]) -> Plan:
        costs = [1.0] * len(components)
        return pipeline(components, costs, ranks, stages, replicas, microbatches, schedule)

    return make


PLANS: dict[int, dict[str, Maker]] = {
    1: {
        "single": dp(1),
        "two stages on the rank": staged(([0], [1]), ([0], [1])),
        "four stages on the rank, zb-h1": hp(1, 4, 1, "zb-h1"),
    },
    2: {
        "dp": dp(2),
        "dp, gpipe": dp(2, "gpipe"),
        "shares 2:1": staged(([0, 1], [2, 1])),
        "mp": hp(2, 2, 1),
        "mp, gpipe": hp(2, 2, 1, "gpipe"),
        "mp, zb-h1": hp(2, 2, 1, "zb-h1"),
        "interleaved": hp(2, 4, 1, "interleaved"),
        "there and back": staged(([0], [1]), ([1], [1]), ([0], [1])),
        "there and back, zb-h1": staged(([0], [1]), ([1], [1]), ([0], [1]), schedule="zb-h1"),
        "replicas, then one": staged(([0, 1], [1, 1]), ([1], [1])),
        "one, then replicas": staged(([1], [1]), ([0, 1], [1, 2])),
        "replicas that share unlike": staged(([0, 1], [3, 1]), ([0, 1], [1, 3])),
    },
    3: {
        "dp": dp(3),
        "mp": hp(3, 3, 1),
        "mp, zb-h1": hp(3, 3, 1, "zb-h1"),
        "round to the first": staged(([0], [1]), ([1], [1]), ([2], [1]), ([0], [1])),
        "2+1": staged(([0, 1], [1, 1]), ([2], [1])),
        "1+2, shares 2:1": staged(([0], [1]), ([1, 2], [2, 1])),
        "2+1, zb-h1": staged(([0, 1], [1, 1]), ([2], [1]), schedule="zb-h1"),
        "overlapping": staged(([0, 1], [1, 1]), ([1, 2], [1, 1])),
        "one replica has none": staged(([0, 1], [1, 0]), ([2], [1])),
    },
    4: {
        "dp": dp(4),
        "mp": hp(4, 4, 1),
        "hp:2x2": hp(4, 2, 2),
        "hp:2x2, gpipe": hp(4, 2, 2, "gpipe"),
        "hp:2x2, zb-h1": hp(4, 2, 2, "zb-h1"),
        "hp:4x2, interleaved": hp(4, 4, 2, "interleaved"),
        "1+3": staged(([0], [1]), ([1, 2, 3], [1, 1, 1])),
        "3+1, shares 3:2:1": staged(([0, 1, 2], [3, 2, 1]), ([3], [1])),
        "hp:2x2, shares 2:1 and 1:2": staged(([0, 1], [2, 1]), ([2, 3], [1, 2])),
        "all, two, one": staged(([0, 1, 2, 3], [1] * 4), ([1, 3], [1, 1]), ([2], [1])),
    },
}
