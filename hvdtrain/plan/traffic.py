"""The operations by which the replicas of a stage agree, and their bytes, from sizes alone.

`hvdtrain/sync` carries them out; both take their sizes from the functions in this module.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hvdtrain.options.requests import NO_COMPRESSION, CompressRequest, PowerSGD, Rounded, TopK

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

HALF_BYTES = 2
BLOCK = 256  # values of 8 bits that have one scale
SCALE_BYTES = 4
PLACE_BYTES = 4  # of the place of a value that `topk` sends
COUNTER_BYTES = 8
# Bytes that each of n replicas sends, as a multiple of the bytes of its tensor, if an operation
# sends as few as any algorithm can: Thakur et al., "Optimization of Collective Communication
# Operations in MPICH", 2005.
MULTIPLES: Mapping[Kind, Callable[[int], float]] = {
    "all_reduce": lambda replicas: 2 * (replicas - 1) / replicas,
    "all_gather": lambda replicas: replicas - 1,
    "reduce_scatter": lambda replicas: (replicas - 1) / replicas,
    "all_to_all": lambda replicas: (replicas - 1) / replicas,
}


class Operation(NamedTuple):
    """A collective operation on a tensor of `size` bytes per replica."""

    kind: Kind
    size: int

    def sent_bytes(self, replicas: int) -> float:
        """Return the bytes that each replica sends."""
        return MULTIPLES[self.kind](replicas) * self.size

    def as_all_reduce(self, replicas: int) -> float:
        """Return the bytes of the tensor whose all-reduce sends as many bytes."""
        if self.kind == "all_reduce":
            return self.size
        return self.sent_bytes(replicas) / MULTIPLES["all_reduce"](replicas)


class Gradient(NamedTuple):
    """The gradient of a parameter as a matrix in the order of its memory.

    Attributes:
        is_matrix: whether the parameter has two dimensions or more.
    """

    rows: int
    columns: int = 1
    is_matrix: bool = False

    @property
    def elements(self) -> int:
        """The number of values."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Sizes:
    """The sizes of what the replicas of a component or stage agree on, in elements.

    Attributes:
        gradients: of the trainable parameters, in the order of the model.
        averages: of running means and variances of batch norms.
        counters: of the other running statistics of batch norms, which are integers.
        itemsize: bytes of a floating point value.
    """

    gradients: tuple[Gradient, ...] = ()
    averages: int = 0
    counters: int = 0
    itemsize: int = 4

    @classmethod
    def total(cls, parts: "Iterable[Sizes]") -> "Sizes":
        """Return the sizes of parts together, in their order."""
        parts = list(parts)
        return cls(
            tuple(gradient for part in parts for gradient in part.gradients),
            sum(part.averages for part in parts),
            sum(part.counters for part in parts),
            max((part.itemsize for part in parts), default=4),
        )

    @property
    def statistics(self) -> int:
        """The number of elements that travel with the gradients of every step."""
        return self.averages + self.counters

    @property
    def elements(self) -> int:
        """The number of gradients' values."""
        return sum(gradient.elements for gradient in self.gradients)


class Traffic(NamedTuple):
    """The operations that sum one bucket.

    Attributes:
        first: start once the bucket is complete, and continue while backward computes.
        second: start once the first ones have ended, and nothing hides them.
    """

    first: tuple[Operation, ...]
    second: tuple[Operation, ...] = ()

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All operations."""
        return (*self.first, *self.second)


def as_matrix(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a dense tensor as a matrix in the order of its memory.

    The rows are the outermost dimension. This is the first one, as in PowerSGD's paper, for
    weights of layers in contiguous and in channels_last order; the order of the columns does not
    matter.
    """
    elements = math.prod(shape)
    if not elements:
        return 0, 0
    # A dimension of size 1 may have any stride.
    pairs = zip(strides, shape, strict=True)
    _, rows = max(((stride, size) for stride, size in pairs if size > 1), default=(1, 1))
    return rows, elements // rows


def shrinks(rank: int, rows: int, columns: int) -> bool:
    """Return whether two factors of this rank are smaller than a matrix."""
    return rank * (rows + columns) < rows * columns


def factor_rank(rank: int, rows: int, columns: int) -> int:
    """Return the columns of the factors of a matrix."""
    return min(rank, rows, columns)


def slice_length(form: str, elements: int, replicas: int) -> int:
    """Return the values of each replica's slice of a bucket that is rounded to 16 or 8 bits."""
    block = BLOCK if form == "int8" else 1
    return -(-elements // (replicas * block)) * block


def slice_bytes(form: str, length: int) -> int:
    """Return the bytes of a slice: those of its values, and of the scales of blocks."""
    return length + length // BLOCK * SCALE_BYTES if form == "int8" else HALF_BYTES * length


def largest_count(ratio: float, elements: int) -> int:
    """Return how many values of a bucket `topk` sends."""
    return math.ceil(ratio * elements)


def bucket_traffic(
    request: CompressRequest,
    gradients: Sequence[Gradient],
    statistics: int,
    replicas: int,
    itemsize: int,
) -> Traffic:
    """Return the operations that sum a bucket of gradients, with statistics behind them.

    Args:
        statistics: number of their elements, which travel as they are.
    """
    count = sum(gradient.elements for gradient in gradients)
    whole = Traffic((Operation("all_reduce", itemsize * (count + statistics)),))
    if request == NO_COMPRESSION or not count:
        return whole
    tail = (Operation("all_reduce", itemsize * statistics),) if statistics else ()
    match request:
        case Rounded(form):
            one = slice_bytes(form, slice_length(form, count, replicas))
            slices = Operation("all_to_all", one * replicas)
            return Traffic((slices, *tail), (Operation("all_gather", one),))
        case TopK(ratio):
            size = largest_count(ratio, count) * (itemsize + PLACE_BYTES)
            return Traffic((Operation("all_gather", size), *tail))
        case PowerSGD(rank):
            return _factors(rank, gradients, statistics, itemsize)
    raise AssertionError(f"{request} is not known")


def _factors(rank: int, gradients: Sequence[Gradient], statistics: int, itemsize: int) -> Traffic:
    """Return the operations of PowerSGD: P with what travels as it is, then Q."""
    exact, p, q = statistics, 0, 0
    for rows, columns, is_matrix in gradients:
        if is_matrix and shrinks(rank, rows, columns):
            p += rows * factor_rank(rank, rows, columns)
            q += columns * factor_rank(rank, rows, columns)
        else:
            exact += rows * columns
    second = (Operation("all_reduce", itemsize * q),) if q else ()
    return Traffic((Operation("all_reduce", itemsize * (p + exact)),), second)


def meeting_operations(sizes: Sizes, replicas: int, state: int = 0) -> tuple[Operation, ...]:
    """Return the operations of one period of replicas with local steps.

    Averages travel with the weight of each replica. Buffers other than batch norm statistics that
    forwards change are not among them: only a trial shows which ones there are.

    Args:
        state: elements of the optimizer's state that are averaged, too.
    """
    count = sizes.elements + sizes.averages + state + replicas
    averages = Operation("all_reduce", sizes.itemsize * count)
    if not sizes.counters:
        return (averages,)
    return averages, Operation("all_reduce", COUNTER_BYTES * sizes.counters)
