import torch
from torch import nn

from hvdtrain.parallel.exchange import to_channels_last


def test_weights_of_any_dimensions_keep_their_values() -> None:
    module = nn.ModuleList([nn.Conv1d(2, 3, 3), nn.Conv2d(2, 3, 3), nn.Conv3d(2, 3, 3)])
    module.register_buffer("volume", torch.rand(1, 2, 3, 4, 5))
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    to_channels_last(module)
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name])
        if value.dim() == 4:
            assert value.is_contiguous(memory_format=torch.channels_last)
            assert not value.is_contiguous()
    same = nn.Conv2d(2, 3, 1)
    strides = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last).weight.stride()  # type: ignore[call-overload]
    to_channels_last(same)
    assert same.weight.stride() == strides


def test_a_group_norm_trains_on_an_input_without_a_gradient() -> None:
    """PyTorch 2.13 crashes in channels_last format, as behind frozen layers."""
    norm = torch.nn.GroupNorm(2, 4)
    inputs = torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last)
    norm(inputs.contiguous()).square().sum().backward()
    expected, norm.weight.grad = norm.weight.grad, None
    to_channels_last(norm)
    norm(inputs).square().sum().backward()
    torch.testing.assert_close(norm.weight.grad, expected)
