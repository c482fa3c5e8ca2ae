"""Checksums of tensors: a fast one on their device, and SHA-256."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

ROW = 1024


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Return a number that depends on every bit of the tensors and on their places.

    The memory is read as integers of 64 bits; the result is their sum modulo 2**64, each weighted
    by its place, computed on the tensors' device. Odd weights ensure that a change of a single
    integer changes the sum. It is not a hash: several changes may cancel out. It depends on the
    memory layout.
    """
    sums = [_weighted_sum(_bytes(tensor.detach())) for tensor in tensors if tensor.numel()]
    if not sums:
        return 0
    device = sums[0].device  # of most: a few tensors may be elsewhere
    whole = torch.stack([value.to(device) for value in sums])
    return int((whole * _places(0, len(sums), device)).sum())


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as uint8 [n], in the order of memory if the tensor is dense."""
    strides = tensor.stride()
    flat = tensor.permute(sorted(range(tensor.dim()), key=lambda place: -strides[place]))
    return flat.contiguous().view(-1).view(torch.uint8)


def _weighted_sum(memory: Tensor) -> Tensor:
    """Return the sum over i of words[i] x (2 i + 1) as int64; the last, partial word as bytes.

    Sums of rows and columns need two reads of the memory and no temporary of its size.
    """
    count = len(memory) // 8
    whole = memory[: 8 * count]
    words = (whole if whole.storage_offset() % 8 == 0 else whole.clone()).view(torch.int64)
    rows = count // ROW
    table = words[: rows * ROW].view(rows, ROW)
    rest = torch.cat([words[rows * ROW :], memory[8 * count :].long()])
    total = (rest * _places(rows * ROW, rows * ROW + len(rest), words.device)).sum()
    if rows:
        by_row = table.sum(1) * _places(0, rows * ROW, words.device, ROW)
        by_column = table.sum(0) * torch.arange(0, 2 * ROW, 2, device=words.device)
        total = total + by_row.sum() + by_column.sum()
    return total


def _places(start: int, stop: int, device: torch.device, step: int = 1) -> Tensor:
    return torch.arange(2 * start + 1, 2 * stop + 1, 2 * step, device=device)


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and bits."""
    content = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()
