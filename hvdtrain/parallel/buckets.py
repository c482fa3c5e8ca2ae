"""How gradients are grouped for reduction: in the order in which backward completes them."""

from collections.abc import Sequence

BUCKET_BYTES = 25 * 2**20
# The first bucket is small, so that reductions begin early in backward, as in PyTorch's DDP (Li et
# al., "PyTorch Distributed", VLDB 2020).
FIRST_BUCKET_BYTES = 2**20


def group_by_bytes(sizes: Sequence[int], limit: int, first: int) -> list[list[int]]:
    """Indices of `sizes` in order, in groups closed as soon as they reach `limit` bytes.

    Args:
        first: the limit of the first group.
    """
    groups: list[list[int]] = [[]]
    held = 0
    for index, size in enumerate(sizes):
        if held >= (limit if len(groups) > 1 else first):
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += size
    return groups
