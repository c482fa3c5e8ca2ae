"""Sizes of the built-in models, for both frameworks: nothing here loads one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import UsageError

LARGEST_SMALL_IMAGE = 64  # pixels: small images have smaller stems and patches
STEM_CHANNELS = 64  # of a ResNet, and of its first layer
EPSILON = 1e-6  # of the layer norms of a vision transformer


@dataclass(frozen=True)
class Shape:
    """Sizes of a vision transformer.

    Attributes:
        width: of a token.
        depth: number of blocks.
        heads: per attention.
        hidden: width of the hidden layer of each MLP.
    """

    width: int
    depth: int
    heads: int
    hidden: int


VITS = {
    "vit_tiny": Shape(width=192, depth=12, heads=3, hidden=768),
    "vit_b16": Shape(width=768, depth=12, heads=12, hidden=3072),
}
DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}  # blocks of each layer


def component_seed(seed: int, name: str) -> int:
    """Return the 64-bit seed of component `name` in a run with `seed`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def patch_size_of(image_size: int, patch_size: int | None) -> int:
    """Return the side of a patch in pixels: the given one, else 4 for small images, or 16.

    Raises:
        UsageError: if images do not divide into such patches.
    """
    if patch_size is None:
        patch_size = 4 if image_size <= LARGEST_SMALL_IMAGE else 16
    if patch_size >= 1 and image_size % patch_size == 0:
        return patch_size
    patch_sizes = [size for size in range(1, image_size + 1) if image_size % size == 0]
    message = (
        f"images of {image_size} x {image_size} do not divide into patches of "
        f"{patch_size} x {patch_size}: use a patch size of {_either(patch_sizes)}"
    )
    if patch_size >= 1:
        below = image_size // patch_size * patch_size
        image_sizes = [size for size in (below, below + patch_size) if size > 0]
        message += f", or an image size of {_either(image_sizes)}"
    raise UsageError(message)


def _either(sizes: Sequence[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
