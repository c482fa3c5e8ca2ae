"""A fingerprint depends on every bit and on places, and copies nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.sync.states import ROW, _bytes, digest, fingerprint

KINDS = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]


def of(*tensors: Tensor) -> int:
    return fingerprint(tensors)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_fingerprint_depends_on_every_bit(kind: torch.dtype) -> None:
    value = torch.arange(1, 6).to(kind)
    before, whole = value.clone(), of(value)
    bits = value.view(torch.uint8)
    for place in range(len(bits)):
        for bit in range(1 if kind is torch.bool else 8):
            bits[place] ^= 1 << bit
            assert of(value) != whole
            bits[place] ^= 1 << bit
    assert of(value) == whole
    assert value.tolist() == before.tolist(), "it changes nothing"


def test_a_fingerprint_is_the_sum_of_bits_weighted_by_place() -> None:
    """Cover whole rows, an incomplete row, and an incomplete integer at the end."""
    for length in (1, 6, 7, 2048, 4096, 6150, 6151):
        values = torch.randn(2 * length)[length:].clone()
        whole, rest = values[: length // 2 * 2], values[length // 2 * 2 :]
        integers = [*whole.view(torch.int64).tolist(), *rest.view(torch.uint8).tolist()]
        bits = enumerate(integers)
        expected = sum(value * (2 * place + 1) for place, value in bits) % 2**64
        assert of(values) % 2**64 == expected
        shifted = torch.cat([torch.zeros(3), values])[3:]
        assert of(shifted) == of(values), "independent of the storage offset"


def test_a_fingerprint_depends_on_places() -> None:
    one, other = torch.randn(7), torch.randn(2, 3, 4, 5)
    whole = of(one, other)
    assert of(other, one) != whole
    assert of(one.flip(0), other) != whole
    assert of(one, other.flip(0)) != whole
    assert of() == of(torch.empty(0)) == 0


def test_a_fingerprint_copies_nothing_of_what_lies_densely() -> None:
    weights = torch.randn(64, 32, 3, 3).contiguous(memory_format=torch.channels_last)
    assert _bytes(weights).data_ptr() == weights.data_ptr()
    assert of(weights) == of(weights.permute(0, 2, 3, 1).contiguous())


@pytest.mark.parametrize("size", [2**20, 2**20 + 1])
def test_no_number_of_bytes_needs_more_memory_than_a_row(size: int) -> None:
    """One byte more than a multiple of 8 once needed eight times the memory of a buffer."""
    largest = 0
    values = torch.ones(size, dtype=torch.uint8)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = function(*args, **kwargs or {})
            storage = result.untyped_storage() if isinstance(result, Tensor) else None
            if storage is not None and storage.data_ptr() != values.data_ptr():
                largest = max(largest, storage.nbytes())
            return result

    with Watch():
        of(values)
    assert largest <= 64 * ROW


def test_a_digest_is_of_any_dtype() -> None:
    value = torch.arange(6).view(2, 3)
    digests = {digest(value.to(kind)) for kind in KINDS}
    assert len(digests) == len(KINDS)
    assert digest(value.T) == digest(value.T.contiguous())
