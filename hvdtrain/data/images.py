"""Pictures: from the bytes of an image file to RGB pixels, and from those to the size of a model.

Both functions are pure, so that packing, loading and predicting see the same pixels. Pillow
decodes without the lock of the interpreter, so that threads are enough.
"""

import io
import os
import warnings
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data.index import Resize
from hvdtrain.errors import DataError, UsageError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM")
MOST_PIXELS = 2**27  # of one image: 400 MB as RGB
SMALLEST_SIDE = 2
LARGEST_SIZE = 4096
BACKGROUND = (255, 255, 255)  # behind transparent pixels

_ORIENTATION = 0x0112  # the EXIF tag
# The transposition that turns an image upright, by its EXIF orientation.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_HIGH_BYTE = 8  # bits to shift 16-bit pixels by, as Pillow does for 16-bit RGB

# Pillow warns of large images and damaged EXIF blocks. This module refuses or accepts them itself.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decode(encoded: bytes, name: str) -> NDArray[np.uint8]:
    """Return the pixels of an image file: uint8 [height, width, 3], red, green, blue.

    JPEG, PNG, WebP, BMP and PPM are read, of an animation the first frame. Grey values are
    repeated. Palettes and CMYK are converted. Transparent pixels are laid on white. Of 16-bit
    values the high byte is kept. The image is turned upright by its EXIF orientation.

    Args:
        encoded: the content of the file.
        name: of the file, for the message; it may hold any character.

    Raises:
        DataError: naming the file, if it is truncated, damaged or of another format, has more than
            MOST_PIXELS pixels, or a side of a single pixel.
    """
    return np.array(open_image(encoded, name), np.uint8)


def open_image(encoded: bytes, name: str) -> Image.Image:
    """Return what `decode` does as an RGB image of Pillow; raise DataError as it does."""
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            width, height = image.size
            if min(width, height) < SMALLEST_SIDE:
                raise DataError(
                    f"{shown(name)}: image of {width}x{height} pixels: too small to train on"
                )
            if width * height > MOST_PIXELS:
                raise Image.DecompressionBombError
            image.load()
            turn = _UPRIGHT.get(_orientation(image))
            return rgb(image if turn is None else image.transpose(turn))
    except DataError:
        raise
    except Image.DecompressionBombError:
        raise DataError(
            f"{shown(name)}: image of more than {MOST_PIXELS // 10**6} million pixels: make it "
            "smaller"
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise many kinds for damaged files
        raise DataError(f"{shown(name)}: {_reason(encoded, error)}") from None


def resize(
    image: NDArray[np.uint8], size: int, how: Resize = "shorter", name: str = ""
) -> NDArray[np.uint8]:
    """Return the image as a square of `size` pixels: uint8 [size, size, 3].

    The filter is Pillow's bilinear one, which averages over all pixels when it shrinks. Sides are
    rounded down to whole pixels, but to at least one. An image of that size is returned as it is.

    Args:
        image: uint8 [height, width, 3].
        how: "shorter" scales the shorter side to `size` and keeps the centre of the longer one;
            where it cannot be central, it is half a pixel up or left. "squash" scales each side on
            its own. "pad" scales the longer side to `size` and puts black bars on both sides of
            the shorter one; the second bar is wider where they differ.
        name: of the image, for the message.

    Raises:
        UsageError: for a size outside 1..LARGEST_SIZE, or another `how`.
        DataError: for an image so long that "shorter" scales it to more than MOST_PIXELS pixels.
    """
    check_size(size, how)
    if image.shape[:2] == (size, size):
        return image
    return resized(Image.fromarray(image), size, how, name)


def resized(image: Image.Image, size: int, how: Resize, name: str = "") -> NDArray[np.uint8]:
    """Return an RGB image of Pillow as `resize` does."""
    width, height = image.size
    if (width, height) == (size, size):
        return np.array(image, np.uint8)
    if how == "squash":
        return scaled(image, size, size)
    if how == "shorter":
        short = min(height, width)
        if max(height, width) * size // short * size > MOST_PIXELS:
            place = f"{shown(name)}: " if name else ""
            raise DataError(
                f"{place}image of {width}x{height} pixels: too long to scale its shorter side to "
                f"{size}: cut it, or choose --resize squash or pad"
            )
        return centre(scaled(image, height * size // short, width * size // short), size)
    long = max(height, width)
    small = scaled(image, max(1, height * size // long), max(1, width * size // long))
    top, left = (size - small.shape[0]) // 2, (size - small.shape[1]) // 2
    square = np.zeros((size, size, 3), np.uint8)
    square[top : top + small.shape[0], left : left + small.shape[1]] = small
    return square


def check_size(size: int, how: str) -> None:
    """Raise UsageError for a size or a way to resize that there is not."""
    if not 1 <= size <= LARGEST_SIZE:
        raise UsageError(f"an image size of {size}: choose from 1 to {LARGEST_SIZE}")
    if how not in get_args(Resize):
        raise UsageError(f"no way {how!r} to resize: choose {', '.join(get_args(Resize))}")


def centre(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Return the central squares of images [..., height, width, channels], which are as large."""
    height, width = images.shape[-3:-1]
    top, left = (height - size) // 2, (width - size) // 2
    return images[..., top : top + size, left : left + size, :]


def scaled(
    image: Image.Image, height: int, width: int, box: tuple[int, int, int, int] | None = None
) -> NDArray[np.uint8]:
    """Return an RGB image, or the box (left, top, right, bottom) of it, scaled bilinearly.

    The result is uint8 [height, width, 3].
    """
    filtered = image.resize((width, height), Image.Resampling.BILINEAR, box)
    return np.array(filtered, np.uint8)


def rgb(image: Image.Image) -> Image.Image:
    """Return a Pillow image of any mode as an RGB image."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        high = np.asarray(image).astype(np.int64) >> _HIGH_BYTE
        return Image.fromarray(high.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, (*BACKGROUND, 255))
        image = Image.alpha_composite(ground, image.convert("RGBA"))
    return image.convert("RGB")


def pixels(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return an array of one image as RGB: uint8 [height, width, 3].

    Args:
        array: uint8 [height, width], or [height, width, channels] of 1 (grey), 3 or 4 (alpha)
            channels.

    Raises:
        ValueError: for another type or shape, with the reason.
    """
    if array.dtype != np.uint8:
        raise ValueError(f"its pixels are {array.dtype}: give uint8, values from 0 to 255")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        shape = "x".join(map(str, array.shape))
        raise ValueError(f"its shape is {shape}: give height x width x 3 (or 1, or 4)")
    if array.shape[2] == 4:
        return np.array(rgb(Image.fromarray(np.ascontiguousarray(array))), np.uint8)
    return array if array.shape[2] == 3 else np.repeat(array, 3, axis=2)


def shown(name: str | bytes | os.PathLike[str]) -> str:
    r"""Return a file name as printable text of one line.

    Line breaks, other control characters and bytes that are not UTF-8 become escapes such as \n
    and \xff.
    """

    def plain(character: str) -> str:
        if "\udc80" <= character <= "\udcff":  # a byte that is not UTF-8
            return f"\\x{ord(character) - 0xDC00:02x}"
        is_plain = character.isprintable()
        return character if is_plain else character.encode("unicode_escape").decode()

    return "".join(map(plain, os.fsdecode(name)))


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 for upright, and where the EXIF block is damaged."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # as many kinds as for the pixels, but these are fine
        return 1


def _reason(encoded: bytes, error: Exception) -> str:
    if not encoded:
        return "the file is empty"
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image that can be read (JPEG, PNG, WebP, BMP or PPM)"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"the image is damaged or truncated ({text})"
