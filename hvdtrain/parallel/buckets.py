"""Group gradients for reduction, in the order in which backward completes them."""

from collections.abc import Sequence

BUCKET_BYTES = 25 * 2**20
# The first bucket is small, so that reductions start early in backward, as in PyTorch's DDP (Li et
# al., "PyTorch Distributed", VLDB 2020).
FIRST_BUCKET_BYTES = 2**20


def group_by_bytes(sizes: Sequence[int], limit: int, first: int) -> list[list[int]]:
    """Return the indices of `sizes`, in order, in groups of at least `limit` bytes.

    A group is closed as soon as it reaches its limit; the last one may be smaller.

    Args:
        sizes: in bytes.
        limit: of each group but the first, in bytes.
        first: the limit of the first group.
    """
    groups: list[list[int]] = [[]]
    total = 0
    for index, size in enumerate(sizes):
        if total >= (limit if len(groups) > 1 else first):
            groups.append([])
            total = 0
        groups[-1].append(index)
        total += size
    return groups
