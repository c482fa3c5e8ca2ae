"""A run says if bf16 is slow on its processor."""

import pytest
import torch

from hvdtrain.backends.pytorch import remarks
from hvdtrain.backends.pytorch.remarks import precision_remark

CPU = torch.device("cpu")


@pytest.mark.parametrize(("bf16", "is_said"), [(0.06, True), (0.002, False), (0.0005, False)])
def test_a_slow_bf16_is_said_with_its_ratio(
    monkeypatch: pytest.MonkeyPatch, bf16: float, is_said: bool
) -> None:
    seconds = {torch.bfloat16: bf16, torch.float32: 0.001}
    monkeypatch.setattr(remarks, "_seconds", seconds.__getitem__)
    line = precision_remark("bf16", CPU)
    assert bool(line) == is_said
    assert not is_said or line.startswith("bf16 takes 60x the time of fp32")
    seconds[torch.float16] = 0.04
    assert precision_remark("fp16", CPU).startswith("fp16 takes 40x the time of fp32")


def test_the_measurement_agrees_with_the_processor() -> None:
    """oneDNN has kernels for bf16 where there is AVX-512 on x86: with or without its own bf16."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert precision_remark("bf16", CPU)
    elif torch.cpu._is_avx512_bf16_supported():
        assert not precision_remark("bf16", CPU)


def test_nothing_is_measured_in_fp32_and_random_numbers_stay() -> None:
    before = torch.get_rng_state()
    assert precision_remark("fp32", CPU) == ""
    precision_remark("bf16", CPU)
    assert torch.equal(torch.get_rng_state(), before)
