"""Vision transformers (Dosovitskiy et al., ICLR 2021), also compact and convolutional ones.

"An Image is Worth 16x16 Words". Attention and MLP of each block are separate components, so that a
plan can place them separately. Initialisation and the tiny shape are those of DeiT (Touvron et
al., ICML 2021): truncated normal of 0.02, zero biases. No dropout.

Compact convolutional transformers (Hassani et al., arXiv 2104.05704): convolutions make the
tokens, which learn from few images, and a weighted mean of all tokens takes the place of the class
token. CCT-L/3x2 of the paper has L blocks and two 3x3 convolutions. The blocks normalise before
attention and before the MLP.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from hvdtrain.device import is_cpu
from hvdtrain.models.component import Component, check_image_size, kaiming_normal
from hvdtrain.models.find import IMAGE_CHANNELS
from hvdtrain.models.shapes import EPSILON, VITS, Shape, patch_size_of

MOST_TOKENS = 512  # more are not multiplied in batches, whose weights take tokens^2 values


def vit_tiny(classes: int, image_size: int, patch_size: int | None = None) -> list[Component]:
    """Return embed, block0.attention, block0.mlp, ..., block11.mlp, head.

    Images [n, 3, size, size] to logits [n, classes]; between components tokens [n, tokens, 192].
    5,362,762 parameters for 10 classes and 32x32. Raises UsageError where `image_size` is not a
    multiple of `patch_size` (by default 4 for images of up to 64 pixels, else 16).
    """
    return _vit(VITS["vit_tiny"], classes, image_size, patch_size)


def vit_b16(classes: int, image_size: int, patch_size: int | None = None) -> list[Component]:
    """Return ViT-Base: components and arguments as in `vit_tiny`, tokens [n, tokens, 768].

    86,567,656 parameters for 1000 classes and 224x224; 85,152,010 for 10 classes and 32x32, where
    patches of 4 x 4 pixels give 64 tokens, and patches of 16 x 16 would give 4.
    """
    return _vit(VITS["vit_b16"], classes, image_size, patch_size)


class Embedding(nn.Module):
    """Images [n, 3, size, size] to tokens [n, 1 + patches, width], the class token first."""

    def __init__(self, image_size: int, patch_size: int, width: int) -> None:
        super().__init__()
        tokens = 1 + (image_size // patch_size) ** 2
        self.conv_proj = nn.Conv2d(IMAGE_CHANNELS, width, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, width))
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embedding, std=0.02)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(patches.shape[0], -1, -1)
        return torch.cat([class_token, patches], dim=1) + self.pos_embedding


class Attention(nn.Module):
    """Layer norm, multi-head self-attention, residual: [n, tokens, width] to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width, eps=EPSILON)
        self.in_proj = linear(width, 3 * width)
        self.out_proj = linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        n, tokens, width = x.shape
        projected = self.in_proj(self.ln_1(x)).view(n, tokens, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = attend(query, key, value)
        projection: Tensor = self.out_proj(attended.transpose(1, 2).reshape(n, tokens, width))
        return x + projection


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return softmax(query key^T / sqrt(d)) value: each [n, heads, tokens, d], and so the result.

    PyTorch's fused attention multiplies many small matrices in its backward, which bfloat16 makes
    slow on CPUs. There the product is batched, and its [tokens, tokens] weights are stored.
    Costs are counted on fake tensors of a CPU, for GPUs too, and so with fused attention.
    """
    attended: Tensor
    is_on_cpu = is_cpu(query.device) and not isinstance(query, FakeTensor)
    if is_on_cpu and query.dtype == torch.bfloat16 and query.shape[2] <= MOST_TOKENS:
        heads = query.shape[:2]
        query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
        scores = torch.bmm(query * query.shape[-1] ** -0.5, key.transpose(1, 2))
        attended = torch.bmm(scores.softmax(-1), value).unflatten(0, heads)
    else:
        attended = functional.scaled_dot_product_attention(query, key, value)
    return attended


class Mlp(nn.Module):
    """Layer norm, linear, GELU, linear, residual: [n, tokens, width] to the same shape."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.ln_2 = nn.LayerNorm(width, eps=EPSILON)
        self.linear_1 = linear(width, hidden)
        self.linear_2 = linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        hidden = functional.gelu(self.linear_1(self.ln_2(x)))
        projection: Tensor = self.linear_2(hidden)
        return x + projection


class Head(nn.Module):
    """Layer norm of the class token and a linear layer: [n, tokens, width] to [n, classes]."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(width, eps=EPSILON)
        self.fc = linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        logits: Tensor = self.fc(self.ln(x[:, 0]))
        return logits


def _vit(shape: Shape, classes: int, image_size: int, patch_size: int | None) -> list[Component]:
    width, patch = shape.width, patch_size_of(image_size, patch_size)
    embed = Component("embed", partial(Embedding, image_size, patch, width))
    return [embed, *blocks(shape), Component("head", partial(Head, width, classes))]


def blocks(shape: Shape) -> Iterator[Component]:
    """Yield block0.attention, block0.mlp, block1.attention, ..."""
    for index in range(shape.depth):
        attention = partial(Attention, shape.width, shape.heads)
        yield Component(f"block{index}.attention", attention)
        yield Component(f"block{index}.mlp", partial(Mlp, shape.width, shape.hidden))


def linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear layer with the weights of DeiT."""
    layer = nn.Linear(in_features, out_features)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


CHANNELS = 64  # of the first convolution
SMALLEST_IMAGE = 4  # pixels: two poolings must leave at least one token


def cct_2(classes: int, image_size: int) -> list[Component]:
    """Return tokens, block0.attention, block0.mlp, block1.attention, block1.mlp, head.

    Images [n, 3, size, size] to logits [n, classes]; between components tokens [n, tokens, 128],
    64 of them for 32x32. 284,491 parameters for 10 classes and 32x32. Raises UsageError for images
    of less than 4 x 4 pixels.
    """
    return _cct(Shape(width=128, depth=2, heads=2, hidden=128), classes, image_size)


def cct_6(classes: int, image_size: int) -> list[Component]:
    """Return a larger model of 6 blocks: components and arguments as in `cct_2`, tokens of 256.

    3,331,531 parameters for 10 classes and 32x32.
    """
    return _cct(Shape(width=256, depth=6, heads=4, hidden=512), classes, image_size)


class Tokens(nn.Module):
    """Images [n, 3, size, size] to tokens [n, tokens, width], with positions."""

    def __init__(self, image_size: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(IMAGE_CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(CHANNELS, width, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        side = (image_size + 3) // 4
        self.pos_embedding = nn.Parameter(torch.empty(1, side**2, width))
        for convolution in (self.conv1, self.conv2):
            kaiming_normal(convolution.weight)
        nn.init.trunc_normal_(self.pos_embedding, std=0.2)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        # ReLU after pooling is the same function, of a quarter of the elements.
        x = functional.relu(self.pool(self.conv1(x)))
        x = functional.relu(self.pool(self.conv2(x)))
        return x.flatten(2).transpose(1, 2) + self.pos_embedding


class PooledHead(nn.Module):
    """Layer norm, a weighted mean of the tokens, linear: [n, tokens, width] to [n, classes]."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(width, eps=EPSILON)
        self.weigh = linear(width, 1)
        self.fc = linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        tokens = self.ln(x)
        weights = self.weigh(tokens).softmax(1)  # [n, tokens, 1]
        logits: Tensor = self.fc((weights * tokens).sum(1))
        return logits


def _cct(shape: Shape, classes: int, image_size: int) -> list[Component]:
    check_image_size("cct", image_size, SMALLEST_IMAGE)
    tokens = Component("tokens", partial(Tokens, image_size, shape.width))
    return [tokens, *blocks(shape), Component("head", partial(PooledHead, shape.width, classes))]
