"""PowerSGD: sums of gradients as products of two thin matrices.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, arXiv 1905.13727.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvdtrain.plan import traffic
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.gradients import Bucket
from hvdtrain.sync.residuals import CompressedSums, Residual
from hvdtrain.sync.states import Shapes

FACTOR = "factor/"


@dataclass
class Matrix:
    """The gradient of a parameter as a matrix [rows, columns] in the order of its memory.

    Attributes:
        piece: its place in the bucket.
        factor: [columns, rank], Q of the last step that counted; the same on all replicas.
        following: Q of the last step, until that step counts.
    """

    name: str
    piece: slice
    rows: int
    columns: int
    factor: Tensor
    following: Tensor | None = None

    def of(self, flat: Tensor) -> Tensor:
        """Return the view of this matrix in a flat tensor of the bucket."""
        return flat[self.piece].view(self.rows, self.columns)


@dataclass
class Pieces:
    """A bucket's matrices, and the parts that travel as they are.

    Attributes:
        matrices: in the order of the bucket.
        exact: places of the other gradients.
    """

    matrices: list[Matrix] = field(default_factory=list)
    exact: list[slice] = field(default_factory=list)


class PowerSums(CompressedSums):
    """Sums of matrices M = P Q^T, where P [rows, rank] has orthonormal columns.

    Each replica computes M_i Q with the Q of the step before. P is the sum of these products with
    its columns made orthonormal, and the new Q is the sum of M_i^T P. So P Q^T is the sum of all
    M_i, projected on the columns of P. Replica i has sent P P^T M_i, and keeps the rest of its own
    M_i. The paper has means where these are sums, since its gradients are not weighted yet.

    Parameters of less than two dimensions, and matrices whose factors would not be smaller than
    they are, travel as they are with the statistics.

    Args:
        rank: columns of P and Q.
    """

    parts = ("p", "q")

    def __init__(self, rank: int, collectives: Collectives, after: int = 0) -> None:
        super().__init__(collectives, after)
        self.rank = rank
        self.pieces: dict[str, Pieces] = {}

    def shrinks(self, rows: int, columns: int) -> bool:
        """Return whether the two factors of a matrix are smaller than the matrix."""
        return traffic.shrinks(self.rank, rows, columns)

    def attach(self, buckets: Sequence[Bucket]) -> None:
        """Allocate residuals, and draw a first Q for each matrix."""
        super().attach(buckets)
        self.pieces = {bucket.name: self._pieces(bucket) for bucket in buckets}

    def send(self, residual: Residual, full: Tensor) -> tuple[object, Tensor]:
        """Start to sum the products M_i Q, all that travels as it is, and the statistics."""
        pieces = self.pieces[residual.bucket.name]
        with one_thread():
            factors = [orthonormal(matrix.factor) for matrix in pieces.matrices]
        products = [
            matrix.of(full) @ factor
            for matrix, factor in zip(pieces.matrices, factors, strict=True)
        ]
        exact = [full[piece] for piece in pieces.exact]
        flat = torch.cat([value.flatten() for value in (*products, *exact, residual.tail)])
        return self.collectives.all_reduce(flat, f"{residual.bucket.name}.p"), flat

    def receive(self, residual: Residual, handle: tuple[object, Tensor]) -> None:
        """Sum the products M_i^T P, and store the sum of the bucket."""
        pieces, full = self.pieces[residual.bucket.name], residual.following
        waiting, flat = handle
        self.collectives.wait(waiting)
        shapes = [(matrix.rows, matrix.factor.shape[1]) for matrix in pieces.matrices]
        sizes = [rows * rank for rows, rank in shapes]
        parts = [*sizes, *(piece.stop - piece.start for piece in pieces.exact), len(residual.tail)]
        *sums, tail = flat.split(parts)
        residual.tail.copy_(tail)
        for piece, value in zip(pieces.exact, sums[len(shapes) :], strict=True):
            residual.gradients[piece] = value
            full[piece] = 0
        with one_thread():
            columns = [
                orthonormal(value.view(shape)) for value, shape in zip(sums, shapes, strict=False)
            ]
        self._receive_factors(residual, columns)

    def after_update(self) -> None:
        """Count the step, and continue with its residuals and factors."""
        super().after_update()
        for matrix in self._matrices():
            matrix.factor = matrix.factor if matrix.following is None else matrix.following
            matrix.following = None

    def saved(self) -> dict[str, Tensor]:
        """Return what all compressed sums keep, and on the first replica the factors."""
        factors = {f"{FACTOR}{matrix.name}": matrix.factor for matrix in self._matrices()}
        return {**super().saved(), **({} if self.collectives.place else factors)}

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return what all compressed sums read, and the names of the factors."""
        names = {
            f"{FACTOR}{matrix.name}"
            for matrix in self._matrices()
            if shapes.get(f"{FACTOR}{matrix.name}") == tuple(matrix.factor.shape)
        }
        return super().wanted(shapes) | names

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with residuals, steps and factors."""
        super().load(tensors)
        for matrix in self._matrices():
            if (value := tensors.get(f"{FACTOR}{matrix.name}")) is not None:
                matrix.factor.copy_(value)

    def _receive_factors(self, residual: Residual, columns: Sequence[Tensor]) -> None:
        matrices, full = self.pieces[residual.bucket.name].matrices, residual.following
        if not matrices:
            return
        factors = [matrix.of(full).T @ p for matrix, p in zip(matrices, columns, strict=True)]
        for matrix, p, q in zip(matrices, columns, factors, strict=True):
            matrix.of(full).addmm_(p, q.T, alpha=-1)
        flat = torch.cat([factor.flatten() for factor in factors])
        name = f"{residual.bucket.name}.q"
        self.collectives.wait(self.collectives.all_reduce(flat, name))
        sums = flat.split([factor.numel() for factor in factors])
        for matrix, p, total in zip(matrices, columns, sums, strict=True):
            matrix.following = total.view_as(matrix.factor).clone()
            with one_thread():
                torch.mm(p, matrix.following.T, out=matrix.of(residual.gradients))

    def _matrices(self) -> list[Matrix]:
        return [matrix for pieces in self.pieces.values() for matrix in pieces.matrices]

    def _pieces(self, bucket: Bucket) -> Pieces:
        pieces, offset = Pieces(), 0
        for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
            piece = slice(offset, offset + parameter.numel())
            offset = piece.stop
            rows, columns = traffic.as_matrix(parameter.shape, parameter.stride())
            if parameter.dim() > 1 and self.shrinks(rows, columns):
                rank = traffic.factor_rank(self.rank, rows, columns)
                factor = first_factor(name, columns, rank).to(bucket.flat)
                pieces.matrices.append(Matrix(name, piece, rows, columns, factor))
            else:
                pieces.exact.append(piece)
        return pieces


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside the block.

    All replicas compute the same from the same sums. Their bits depend on the number of threads,
    which differs where hosts have unequal numbers of ranks.
    """
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def first_factor(name: str, columns: int, rank: int) -> Tensor:
    """Return the first Q [columns, rank] of a parameter, the same on all replicas."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(columns, rank, generator=generator, dtype=torch.float64)


def orthonormal(matrix: Tensor) -> Tensor:
    """Return orthonormal columns that span those of a matrix [n, rank], n >= rank.

    Columns that depend on others are replaced by any that are orthonormal, also those of zeros. If
    a value is not finite, all results are NaN.
    """
    columns: Tensor = torch.linalg.qr(matrix)[0]
    return columns * (1 + 0 * matrix.sum())
