"""The parameters that `--no-decay` selects, by their names in PyTorch and Keras."""

import pytest

from hvdtrain.options.decay import is_exempt, parse


@pytest.mark.proves(
    "`--no-decay` keeps weight decay from norms, biases, and position embeddings, in both "
    "frameworks; an older run resumes with its own rule."
)
@pytest.mark.parametrize(
    ("name", "layer", "dimensions", "kinds"),
    [
        ("weight", "Conv2d", 4, set()),
        ("0.bias", "Linear", 1, {"bias"}),
        ("in_proj_bias", "MultiheadAttention", 1, {"bias"}),
        ("bn1.weight", "BatchNorm2d", 1, {"norm"}),
        ("bn1.bias", "BatchNorm2d", 1, {"norm", "bias"}),
        ("ln.weight", "RMSNorm", 1, {"norm"}),
        ("weight", "NormalisedLinear", 2, set()),
        ("pos_embedding", "Embedding", 3, {"position"}),
        ("pos_embed.weight", "Embedding", 2, {"position"}),
        ("cls_token", "Model", 3, {"position"}),
        ("relative_position_bias_table", "Attention", 2, {"bias", "position"}),
        ("decomposition", "Odd", 2, set()),
        ("conv/kernel", "conv", 4, set()),
        ("conv/bias", "conv", 1, {"bias"}),
        ("bn1/gamma", "bn1", 1, {"norm"}),
        ("batch_normalization/beta", "batch_normalization", 1, {"norm"}),
    ],
)
def test_a_parameter_is_of_its_kinds(
    name: str, layer: str, dimensions: int, kinds: set[str]
) -> None:
    exempt = {
        kind
        for kind in ("norm", "bias", "position")
        if is_exempt(parse(kind), name, layer, dimensions)
    }
    assert exempt == kinds
    assert not is_exempt(parse("none"), name, layer, dimensions)
