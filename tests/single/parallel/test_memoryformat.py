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
