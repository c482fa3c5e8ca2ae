"""Compressed sums of gradients: in 16 or 8 bits, of the largest values only, or of low rank.

Error feedback: what a compressed sum leaves out of a gradient is added to the next gradient
(Stich et al., "Sparsified SGD with Memory", 2018; Karimireddy et al., "Error Feedback Fixes
SignSGD and other Gradient Compression Schemes", 2019). A replica sends an approximation of g + e,
its gradient and its residual; the new residual is what it has not sent. Gradients are weighted by
the replica's share of the global batch, so that sums are means over the samples, and the sum of
all residuals is what the weights have not received yet.

Low rank is PowerSGD: sums of gradients as products of two thin matrices (Vogels, Karimireddy,
Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, arXiv 1905.13727).
"""

import abc
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.options import requests
from hvdtrain.options.requests import CompressRequest
from hvdtrain.plan import traffic
from hvdtrain.plan.traffic import BLOCK, SCALE_BYTES, largest_count, slice_length
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.gradients import Bucket, ExactSums, Sums, laid_out
from hvdtrain.sync.states import Shapes

RESIDUAL, STEPS = "residual/", "compressed-steps/"
FACTOR = "factor/"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Residual:
    """The part of the gradients of one bucket that a replica has not sent yet.

    Attributes:
        size: elements of the gradients, without the statistics that follow them.
        current: [size], what the next step adds to its gradients.
        following: [size], that of the step after it, which replaces `current` if the step counts.
            Until a bucket has been compressed it is the gradient with `current` added.
        is_pending: whether `following` belongs to a step that does not count yet.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.size = sum(parameter.numel() for parameter in bucket.parameters)
        self.current = torch.zeros_like(bucket.flat[: self.size])
        self.following = torch.zeros_like(self.current)
        self.is_pending = False

    @property
    def gradients(self) -> Tensor:
        """The gradients of the bucket [size]."""
        return self.bucket.flat[: self.size]

    @property
    def tail(self) -> Tensor:
        """The statistics of the bucket, which always travel as they are."""
        return self.bucket.flat[self.size :]

    def start(self) -> Tensor:
        """Return `following` with what should be sent: the gradients with `current` added."""
        self.is_pending = True
        return torch.add(self.gradients, self.current, out=self.following)

    def after_update(self) -> None:
        """Continue with the residual of the last step."""
        if self.is_pending:
            self.current, self.following = self.following, self.current
            self.is_pending = False

    def by_name(self) -> dict[str, Tensor]:
        """Return `current` by parameter, each a view with the shape of the parameter."""
        views, offset = {}, int(self.current.storage_offset())
        for name, parameter in zip(self.bucket.names, self.bucket.parameters, strict=True):
            views[name] = laid_out(self.current, parameter, offset)
            offset += parameter.numel()
        return views


class CompressedSums(Sums, abc.ABC):
    """Approximate sums of buckets with error feedback, after some exact steps.

    Checkpoints hold the residual of each replica and parameter, and the number of steps. On
    another number of replicas the first one continues with the sum of all residuals, since the
    weights receive no more than their sum.

    Args:
        collectives: among the replicas.
        after: first steps, whose sums are exact. Steps that do not count, such as one with bad
            gradients, are not among them.
    """

    def __init__(self, collectives: Collectives, after: int = 0) -> None:
        self.collectives, self.after, self.steps = collectives, after, 0
        self.exact = ExactSums(collectives)
        self.residuals: dict[str, Residual] = {}

    @abc.abstractmethod
    def send(self, residual: Residual, full: Tensor) -> Any:
        """Start to sum the approximation of `full`; return what `receive` needs.

        Args:
            full: `residual.following`, to which other calls may not refer.
        """

    @abc.abstractmethod
    def receive(self, residual: Residual, handle: Any) -> None:
        """Store the sum in the bucket, and in `residual.following` what was not sent."""

    def attach(self, buckets: Sequence[Bucket]) -> None:
        """Allocate a residual per bucket."""
        self.residuals = {bucket.name: Residual(bucket) for bucket in buckets}

    def start(self, bucket: Bucket) -> Any:
        """Start the sum of a bucket."""
        if self.steps < self.after:
            return self.exact.start(bucket)
        residual = self.residuals[bucket.name]
        full = residual.start()
        return self.send(residual, full) if len(full) else self.exact.start(bucket)

    def finish(self, bucket: Bucket, handle: Any) -> None:
        """Wait for the sum, and compute the residual."""
        residual = self.residuals[bucket.name]
        if residual.is_pending and residual.size:
            self.receive(residual, handle)
        else:
            self.exact.finish(bucket, handle)

    def after_update(self) -> None:
        """Count the step, and continue with its residuals."""
        self.steps += 1
        for residual in self.residuals.values():
            residual.after_update()

    def counted(self) -> Mapping[str, float]:
        """Return the bytes that this rank has sent, and the norm of its current residuals."""
        norms = [residual.current.norm().double().cpu() for residual in self.residuals.values()]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        return {**self.exact.counted(), "residual_norm": norm}

    def saved(self) -> dict[str, Tensor]:
        """Return this replica's residuals, and on the first one the number of steps."""
        place = self.collectives.place
        residuals = {
            f"{RESIDUAL}{place}/{name}": value
            for residual in self.residuals.values()
            for name, value in residual.by_name().items()
        }
        names = self._names()
        steps = {f"{STEPS}{names[0]}": torch.tensor(self.steps)} if names and not place else {}
        return {**residuals, **steps}

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return the names of the residuals to add up, and of all numbers of steps.

        A stage of another plan may have another first parameter.
        """
        places, names = _places(shapes), set(self._names())
        residuals = {
            f"{RESIDUAL}{place}/{name}"
            for name in names & places.keys()
            for place in self._places_to_load(places[name])
        }
        return frozenset(residuals).union(name for name in shapes if name.startswith(STEPS))

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with the sum of the loaded residuals of each parameter."""
        self.steps = max(
            (int(value) for name, value in tensors.items() if name.startswith(STEPS)), default=0
        )
        places = _places(tensors)
        for residual in self.residuals.values():
            residual.is_pending = False
            for name, view in residual.by_name().items():
                view.zero_()
                for place in places[name]:
                    view.add_(tensors[f"{RESIDUAL}{place}/{name}"].to(view.device))

    def _names(self) -> list[str]:
        return [name for residual in self.residuals.values() for name in residual.bucket.names]

    def _places_to_load(self, places: Sequence[int]) -> Sequence[int]:
        if len(places) == self.collectives.size:
            return [self.collectives.place]
        return places if self.collectives.place == 0 else []


def _places(named: Mapping[str, object]) -> defaultdict[str, list[int]]:
    """Return by parameter the places of the replicas whose residuals there are, in order."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for key in named:
        if key.startswith(RESIDUAL):
            place, name = key.removeprefix(RESIDUAL).split("/", 1)
            places[name].append(int(place))
    return defaultdict(list, {name: sorted(numbers) for name, numbers in places.items()})


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


def make_sums(request: CompressRequest, collectives: Collectives) -> Sums:
    """Return the sums that a value of `--compress` requests.

    A single replica sends nothing, and therefore compresses nothing.

    Args:
        collectives: among the replicas.
    """
    if isinstance(request, requests.NoCompression):
        return ExactSums(collectives)
    if collectives.size == 1:
        return SingleSums(collectives, request.after)
    match request:
        case requests.Rounded(form, after):
            return RoundedSums(form, collectives, after)
        case requests.TopK(ratio, after):
            return TopKSums(ratio, collectives, after)
        case requests.PowerSGD(rank, after):
            return PowerSums(rank, collectives, after)
    raise AssertionError(f"{request} is not known")


class SingleSums(CompressedSums):
    """The gradients of a single replica, to which it adds what several replicas have left out."""

    def send(self, residual: Residual, full: Tensor) -> str:
        """Store the gradients with the residual, which is then zero."""
        residual.gradients.copy_(full)
        full.zero_()
        return "done"  # None would mean that the bucket has not started

    def receive(self, residual: Residual, handle: Any) -> None:
        """Return at once: nothing is in flight."""


@dataclass
class Sent:
    """The operations of one bucket in flight.

    Attributes:
        handle: of the gradients.
        tail: of the statistics; None if there are none.
    """

    handle: Any
    tail: Any


class TwoPartSums(CompressedSums):
    """Compressed sums of gradients, beside an exact sum of the statistics of the same bucket."""

    def start_tail(self, residual: Residual) -> Any:
        """Start the exact sum of the statistics."""
        if not len(residual.tail):
            return None
        return self.collectives.all_reduce(residual.tail, f"{residual.bucket.name}.tail")

    def finish_tail(self, sent: Sent) -> None:
        """Wait for the sum of the statistics."""
        if sent.tail is not None:
            self.collectives.wait(sent.tail)


class RoundedSums(TwoPartSums):
    """Sums of gradients that travel in 16 or 8 bits.

    Each replica sums a slice of the bucket in the gradients' own dtype and sends the sum to all,
    rounded again. Both roundings enter the residuals. The bytes are those of an all-reduce of
    rounded values, which would add up rounded values and lose what each addition rounds off.

    Nothing else is scaled: gradients are weighted by the share of the global batch, so that the
    sum is the gradient of the mean loss, however many replicas there are. If a value or the sum
    exceeds the range of fp16, an infinity arrives on all replicas, and the step is a bad one.

    Args:
        form: "fp16", "bf16" or "int8".
    """

    def __init__(self, form: str, collectives: Collectives, after: int = 0) -> None:
        super().__init__(collectives, after)
        self.form = form

    def send(self, residual: Residual, full: Tensor) -> Sent:
        """Start to send each replica its slice."""
        size = self.collectives.size
        length = slice_length(self.form, len(full), size)
        slices = functional.pad(full, (0, size * length - len(full))).view(size, length)
        bits = encoded(self.form, slices)
        full.sub_(decoded(self.form, bits, full.dtype).flatten()[: len(full)])
        handle = self.collectives.all_to_all(bits.flatten(), f"{residual.bucket.name}.slices")
        return Sent(handle, self.start_tail(residual))

    def receive(self, residual: Residual, handle: Sent) -> None:
        """Sum this replica's slice, and gather the sums of all."""
        dtype = residual.gradients.dtype
        slices = decoded(self.form, self.collectives.wait(handle.handle), dtype)
        total = torch.zeros_like(slices[0])
        for piece in slices:
            total += piece
        bits = encoded(self.form, total[None])
        name = f"{residual.bucket.name}.sums"
        gathering = self.collectives.all_gather(bits.flatten(), name)
        mine = residual.following[self.collectives.place * len(total) :][: len(total)]
        mine.add_((total - decoded(self.form, bits, dtype)[0])[: len(mine)])
        sums = decoded(self.form, self.collectives.wait(gathering), dtype).flatten()
        residual.gradients.copy_(sums[: residual.size])
        self.finish_tail(handle)


def encoded(form: str, rows: Tensor) -> Tensor:
    """Return rows of numbers [rows, length] as rows of bytes, uint8.

    For "int8" the length is a multiple of BLOCK. A block has the scale max |x| / 127, fp32, behind
    all values: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016, with
    the blocks of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022. The
    scale of a block with a value that is not finite is not finite.
    """
    if form != "int8":
        return rows.to(DTYPES[form]).view(torch.uint8)
    blocks = rows.unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(2) / 127).float()
    steps = blocks / scales.to(rows.dtype)[..., None]
    whole = torch.where(scales[..., None] > 0, steps, 0).nan_to_num().round().clamp(-127, 127)
    values = whole.to(torch.int8).flatten(1).view(torch.uint8)
    return torch.cat([values, scales.view(torch.uint8)], 1)


def decoded(form: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [rows, length] of `encoded` rows, of a dtype."""
    if form != "int8":
        return rows.view(DTYPES[form]).to(dtype)
    number = rows.shape[1] // (BLOCK + SCALE_BYTES)
    values, scales = rows.split([number * BLOCK, number * SCALE_BYTES], 1)
    factors = _as_dtype(scales, torch.float32).to(dtype)
    numbers: Tensor = values.view(torch.int8).unflatten(1, (-1, BLOCK)) * factors[..., None]
    return numbers.flatten(1)


@dataclass
class SentLargest(Sent):
    """The operations of one bucket in flight, and the number of values that a replica sends."""

    count: int


class TopKSums(TwoPartSums):
    """Sums of the largest values of each replica's bucket.

    Stich et al., 2018; Lin et al., "Deep Gradient Compression", 2018, without its corrections of
    the momentum. The residual is what was not sent. NaN counts as the largest value, so that all
    replicas see it.

    Args:
        ratio: share of the values that each replica sends, rounded up per bucket.
    """

    def __init__(self, ratio: float, collectives: Collectives, after: int = 0) -> None:
        super().__init__(collectives, after)
        self.ratio = ratio

    def send(self, residual: Residual, full: Tensor) -> SentLargest:
        """Start to gather values and places, as bytes."""
        count = largest_count(self.ratio, len(full))
        places = full.abs().topk(count, sorted=False).indices
        bits = torch.cat([full[places].view(torch.uint8), places.int().view(torch.uint8)])
        full[places] = 0
        handle = self.collectives.all_gather(bits, f"{residual.bucket.name}.largest")
        return SentLargest(handle, self.start_tail(residual), count)

    def receive(self, residual: Residual, handle: SentLargest) -> None:
        """Add what each replica has sent, in the same order on all replicas."""
        gradients = residual.gradients
        gathered = self.collectives.wait(handle.handle)
        split = handle.count * gradients.element_size()
        values = _as_dtype(gathered[:, :split], gradients.dtype)
        places = _as_dtype(gathered[:, split:], torch.int32)
        gradients.zero_()
        for one, other in zip(places, values, strict=True):
            gradients.index_add_(0, one, other)
        self.finish_tail(handle)


def _as_dtype(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes [rows, bytes] as numbers [rows, n], in memory that is aligned for them."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)
