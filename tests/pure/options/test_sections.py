"""The parameters without weight decay, by their names in PyTorch and Keras."""

import pytest

from hvdtrain.options.sections import is_exempt


@pytest.mark.proves(
    "Weight decay leaves out norms, biases, and position embeddings, in both frameworks."
)
@pytest.mark.parametrize(
    ("name", "layer", "dimensions", "exempt"),
    [
        ("weight", "Conv2d", 4, False),
        ("0.bias", "Linear", 1, True),
        ("in_proj_bias", "MultiheadAttention", 1, True),
        ("bn1.weight", "BatchNorm2d", 1, True),
        ("bn1.bias", "BatchNorm2d", 1, True),
        ("ln.weight", "RMSNorm", 1, True),
        ("weight", "NormalisedLinear", 2, False),
        ("pos_embedding", "Embedding", 3, True),
        ("pos_embed.weight", "Embedding", 2, True),
        ("cls_token", "Model", 3, True),
        ("relative_position_bias_table", "Attention", 2, True),
        ("decomposition", "Odd", 2, False),
        ("conv/kernel", "conv", 4, False),
        ("conv/bias", "conv", 1, True),
        ("bn1/gamma", "bn1", 1, True),
        ("batch_normalization/beta", "batch_normalization", 1, True),
    ],
)
def test_a_parameter_is_exempt_by_its_name_and_layer(
    name: str, layer: str, dimensions: int, exempt: bool
) -> None:
    assert is_exempt(name, layer, dimensions) is exempt
