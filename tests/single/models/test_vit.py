import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain import models
from hvdtrain.errors import UsageError
from hvdtrain.models import vit
from hvdtrain.models.component import build_component, parameter_count
from hvdtrain.models.vit import Attention, attend, vit_tiny


def layer_norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / (variance + 1e-6).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def naive_attention(weights: dict[str, Tensor], name: str, x: Tensor, heads: int) -> Tensor:
    """Compute attention one head after another, with an explicit softmax."""
    projected = linear(weights, f"{name}.in_proj", layer_norm(weights, f"{name}.ln_1", x))
    queries, keys, values = projected.chunk(3, dim=-1)
    size = x.shape[-1] // heads
    attended = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = queries[..., part] @ keys[..., part].transpose(1, 2) / math.sqrt(size)
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
        shares = exponentials / exponentials.sum(-1, keepdim=True)
        attended.append(shares @ values[..., part])
    return x + linear(weights, f"{name}.out_proj", torch.cat(attended, dim=-1))


def naive_forward(weights: dict[str, Tensor], images: Tensor, patch: int) -> Tensor:
    """Compute ViT-Tiny in training mode, with patches from `unfold`."""
    tiles = images.unfold(2, patch, patch).unfold(3, patch, patch)  # [n, 3, rows, columns, p, p]
    patches = tiles.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    kernel = weights["embed.conv_proj.weight"].flatten(1)
    x = patches @ kernel.T + weights["embed.conv_proj.bias"]
    x = torch.cat([weights["embed.class_token"].repeat(len(x), 1, 1), x], dim=1)
    x = x + weights["embed.pos_embedding"]
    for block in range(12):
        x = naive_attention(weights, f"block{block}.attention", x, heads=3)
        name = f"block{block}.mlp"
        hidden = linear(weights, f"{name}.linear_1", layer_norm(weights, f"{name}.ln_2", x))
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        x = x + linear(weights, f"{name}.linear_2", hidden)
    return linear(weights, "head.fc", layer_norm(weights, "head.ln", x)[:, 0])


def test_parameter_counts_are_those_of_deit_tiny() -> None:
    assert parameter_count(vit_tiny(1000, 224)) == 5_717_416
    assert parameter_count(vit_tiny(10, 32)) == 5_362_762


def test_attention_and_mlp_are_components_of_their_own() -> None:
    blocks = [f"block{block}.{half}" for block in range(12) for half in ("attention", "mlp")]
    assert [component.name for component in vit_tiny(10, 32)] == ["embed", *blocks, "head"]


def test_logits_and_gradients_equal_a_naive_version(
    assemble: Any, images_and_labels: Any, largest_difference: Any
) -> None:
    model = assemble(vit_tiny(10, 12, 3), dtype=torch.float64)
    with torch.no_grad():  # far from the small initial values, so that every term counts
        for index, value in enumerate(model.parameters.values()):
            generator = torch.Generator().manual_seed(index)
            value.add_(torch.randn(value.shape, generator=generator, dtype=value.dtype) / 20)
    images, labels = images_and_labels(3, 12, 10, torch.float64)
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in model.parameters.items()
    }
    logits = naive_forward(weights, images, 3)
    assert torch.allclose(model.forward(images), logits, rtol=0, atol=1e-12)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    gradients = torch.autograd.grad(loss, list(weights.values()))
    expected = dict(zip(weights, gradients, strict=True))
    assert largest_difference(model.gradients(images, labels), expected) <= 1e-12


def test_attention_in_bf16_is_as_exact_as_the_fused_one() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(4, 3, 2, 65, 64, dtype=torch.float64, generator=generator)
    results = []
    for attention, dtype in (
        (functional.scaled_dot_product_attention, torch.float64),
        (functional.scaled_dot_product_attention, torch.bfloat16),
        (attend, torch.bfloat16),
    ):
        inputs, upstream = exact[:3].to(dtype).requires_grad_(), exact[3].to(dtype)
        attended = attention(*inputs)
        (gradient,) = torch.autograd.grad(attended, inputs, upstream)
        results.append([*gradient.double(), attended.detach().double()])
    expected, fused, explicit = results
    for right, one, other in zip(expected, fused, explicit, strict=True):
        assert (other - right).norm() <= max(1.2 * (one - right).norm(), 0.01 * right.norm())
        assert (other - right).norm() > 0, "it was not computed in bf16"


def test_attention_takes_an_empty_share() -> None:
    assert Attention(width=12, heads=3)(torch.empty(0, 5, 12)).shape == (0, 5, 12)


def test_weights_start_as_in_deit(assemble: Any) -> None:
    parameters = assemble(vit_tiny(10, 32)).parameters
    for name in ("block0.attention.in_proj", "block11.mlp.linear_1", "head.fc"):
        assert float(parameters[f"{name}.weight"].detach().std()) == pytest.approx(0.02, rel=0.06)
        assert not parameters[f"{name}.bias"].any()
    position = parameters["embed.pos_embedding"].detach()
    assert float(position.std()) == pytest.approx(0.02, rel=0.06)


@pytest.mark.parametrize(
    ("image_size", "patch_size", "kernel"), [(64, None, 4), (80, None, 16), (33, 11, 11)]
)
def test_patches_are_small_for_small_images(
    image_size: int, patch_size: int | None, kernel: int
) -> None:
    embed = build_component(vit_tiny(10, image_size, patch_size)[0], 0)
    assert embed.get_parameter("conv_proj.weight").shape[2:] == (kernel, kernel)
    tokens = 1 + (image_size // kernel) ** 2
    assert embed(torch.zeros(2, 3, image_size, image_size)).shape == (2, tokens, 192)


@pytest.mark.parametrize(
    ("image_size", "patch_size", "message"),
    [
        (
            30,
            None,
            "images of 30 x 30 do not divide into patches of 4 x 4: use a patch size of "
            "1, 2, 3, 5, 6, 10, 15 or 30, or an image size of 28 or 32",
        ),
        (
            3,
            7,
            "images of 3 x 3 do not divide into patches of 7 x 7: use a patch size of "
            "1 or 3, or an image size of 7",
        ),
        (
            4,
            0,
            "images of 4 x 4 do not divide into patches of 0 x 0: use a patch size of 1, 2 or 4",
        ),
    ],
)
def test_a_patch_size_that_does_not_fit_names_those_that_do(
    image_size: int, patch_size: int | None, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        vit_tiny(10, image_size, patch_size)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "width", "depth", "hidden"), [("cct_2", 128, 2, 128), ("cct_6", 256, 6, 512)]
)
def test_sizes_are_those_of_the_paper(name: str, width: int, depth: int, hidden: int) -> None:
    parts = models.components(name, 10, 32)
    tokens = 9 * (3 * 64 + 64 * width) + 64 * width
    attention = 2 * width + 4 * width * width + 4 * width
    mlp = 2 * width + 2 * width * hidden + hidden + width
    head = 2 * width + width + 1 + 10 * width + 10
    assert parameter_count(parts) == tokens + depth * (attention + mlp) + head
    assert f"{parameter_count(parts):,}" in (vit.cct_2.__doc__ or "") + (vit.cct_6.__doc__ or "")


@pytest.mark.parametrize(("size", "count"), [(32, 64), (31, 64), (8, 4), (4, 1)])
def test_tokens_are_the_pooled_pixels(size: int, count: int) -> None:
    stem = build_component(models.components("cct_2", 10, size)[0], 0)
    images = torch.randn(2, 3, size, size)
    weights = dict(stem.named_parameters())
    x = images
    for name in ("conv1", "conv2"):
        x = functional.max_pool2d(
            functional.relu(functional.conv2d(x, weights[f"{name}.weight"], padding=1)), 3, 2, 1
        )
    expected = x.flatten(2).transpose(1, 2) + weights["pos_embedding"]
    torch.testing.assert_close(stem(images), expected)
    assert expected.shape == (2, count, 128)


def test_the_head_takes_the_weighted_mean_of_the_tokens() -> None:
    head = build_component(models.components("cct_2", 5, 8)[-1], 0)
    weights = dict(head.named_parameters())
    tokens = torch.randn(3, 4, 128)
    normal = functional.layer_norm(tokens, (128,), eps=1e-6)
    for image, logits in zip(normal, head(tokens), strict=True):
        shares = (image @ weights["weigh.weight"][0] + weights["weigh.bias"]).exp()
        mean = (shares / shares.sum()) @ image
        expected = mean @ weights["fc.weight"].T + weights["fc.bias"]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 4"):
        models.components("cct_6", 10, 3)
