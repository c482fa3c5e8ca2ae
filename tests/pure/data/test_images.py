"""Pictures of every kind become RGB of the right pixels, and damaged ones are named."""

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data.images import MOST_PIXELS, decode, resize, shown
from hvdtrain.errors import DataError, UsageError


def a_picture(height: int = 20, width: int = 30) -> NDArray[np.uint8]:
    rows, columns = np.mgrid[:height, :width]
    planes = [rows * 255 // height, columns * 255 // width, (rows + columns) % 256]
    return np.stack(planes, axis=2).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "PPM"])
def test_what_is_stored_without_loss_comes_back(kind: str) -> None:
    picture = a_picture()
    options = {"lossless": True} if kind == "WEBP" else {}
    file = encoded(Image.fromarray(picture), kind, **options)
    np.testing.assert_array_equal(decode(file, "a"), picture)


def test_a_jpeg_is_about_the_picture() -> None:
    picture = a_picture(64, 64)
    back = decode(encoded(Image.fromarray(picture), "JPEG", quality=95), "a")
    assert np.abs(back.astype(int) - picture).mean() < 3


def test_grey_values_are_repeated_and_sixteen_bits_keep_the_high_byte() -> None:
    grey = a_picture()[..., 0]
    for file in (
        encoded(Image.fromarray(grey)),
        encoded(Image.fromarray(grey), "JPEG", quality=100),
        encoded(Image.fromarray(grey.astype(np.uint16) * 256 + 77)),
    ):
        back = decode(file, "a").astype(int)
        assert back.shape == (20, 30, 3)
        assert np.abs(back - grey[..., None]).max() <= 1
    one_bit = Image.fromarray(grey > 100).convert("1")
    np.testing.assert_array_equal(decode(encoded(one_bit), "a")[..., 2], 255 * (grey > 100))


def test_palettes_cmyk_and_alpha_are_converted() -> None:
    flat = Image.new("RGB", (8, 8), (200, 30, 90))
    np.testing.assert_array_equal(decode(encoded(flat.quantize(4)), "a")[0, 0], (200, 30, 90))
    cmyk = decode(encoded(flat.convert("CMYK"), "JPEG", quality=100), "a")
    assert np.abs(cmyk[0, 0].astype(int) - (200, 30, 90)).max() <= 3
    half = Image.new("RGBA", (8, 8), (0, 0, 0, 128))
    assert decode(encoded(half), "a")[0, 0].tolist() == [127, 127, 127]
    clear = flat.quantize(4)
    file = encoded(clear, transparency=clear.getpixel((0, 0)))
    assert decode(file, "a")[0, 0].tolist() == [255, 255, 255]
    grey_alpha = Image.new("LA", (8, 8), (10, 0))
    assert decode(encoded(grey_alpha), "a")[0, 0].tolist() == [255, 255, 255]


def test_the_exif_orientation_is_applied() -> None:
    upright = a_picture()
    stored = {  # what a camera stores, for the picture to be upright in the end
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = encoded(Image.fromarray(np.ascontiguousarray(pixels)), exif=exif)
        np.testing.assert_array_equal(decode(file, "a"), upright, err_msg=str(orientation))
    file = encoded(Image.fromarray(upright), "PNG", exif=b"Exif\0\0MM\0*nonsense")
    np.testing.assert_array_equal(decode(file, "a"), upright)


def a_bomb(side: int, rows: int = 1000) -> bytes:
    """Return a PNG of side x side pixels of one bit, which ends after some rows."""
    data = zlib.compress(bytes(rows * (1 + -(-side // 8))))

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def refusal(content: bytes, name: str = "cat.jpg") -> str:
    with pytest.raises(DataError) as caught:
        decode(content, name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_decompression_bomb_is_refused_before_it_is_decoded() -> None:
    assert len(a_bomb(50_000)) < 2**20
    many = "more than 134 million pixels"
    assert refusal(a_bomb(50_000)) == f"cat.jpg: image of {many}: make it smaller"
    assert many in refusal(a_bomb(int(MOST_PIXELS**0.5) + 1))


def test_what_is_accepted_is_decoded_without_warnings_of_pillow() -> None:
    """Pillow warns of more than 89 million pixels and of damaged EXIF blocks, on two lines."""
    damaged = encoded(Image.fromarray(a_picture()), "PNG", exif=b"Exif\0\0MM\0*nonsense")
    program = (
        "import sys\n"
        "from hvdtrain.data.images import decode\n"
        "content = sys.stdin.buffer.read()\n"
        f"print(decode(content[:{len(damaged)}], 'a').shape)\n"
        f"print(decode(content[{len(damaged)}:], 'a').shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=damaged + a_bomb(9600, 9600),
        capture_output=True,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    assert done.stdout.decode().split("\n")[:2] == ["(20, 30, 3)", "(9600, 9600, 3)"]
    assert done.stderr == b""


def test_what_is_damaged_is_named() -> None:
    whole = encoded(Image.fromarray(a_picture(64, 64)), "JPEG")
    assert refusal(whole[: len(whole) // 2]).startswith("cat.jpg: the image is damaged or trunc")
    png = encoded(Image.fromarray(a_picture(64, 64)))
    assert "damaged or truncated" in refusal(png[: len(png) // 2])
    assert refusal(b"") == "cat.jpg: the file is empty"
    assert refusal(b"GIF89a nonsense").startswith("cat.jpg: not an image that can be read")
    assert "1x1 pixels: too small" in refusal(encoded(Image.new("RGB", (1, 1))))


def test_no_damage_is_anything_but_one_line() -> None:
    generator = np.random.default_rng(0)
    image = Image.fromarray(a_picture())
    for kind in ("JPEG", "PNG", "WEBP"):
        whole = np.frombuffer(encoded(image, kind), np.uint8)
        for _ in range(150):
            content = whole.copy()
            places = generator.integers(0, len(content), 3)
            content[places] = generator.integers(0, 256, 3)
            try:
                assert decode(content.tobytes(), "a").shape[2] == 3
            except DataError as error:
                assert "\n" not in str(error)


def test_any_file_name_is_shown_in_one_printable_line() -> None:
    assert shown("plain cat é.jpg") == "plain cat é.jpg"
    assert shown("two\nlines\t.jpg") == "two\\nlines\\t.jpg"
    assert shown(b"caf\xe9.jpg") == "caf\\xe9.jpg"
    assert "cat\\n\\xff.jpg:" in refusal(b"x", "cat\n\udcff.jpg")


def test_an_image_of_the_size_stays_as_it_is() -> None:
    picture = a_picture(24, 24)
    for how in ("shorter", "squash", "pad"):
        assert resize(picture, 24, how) is picture


def test_the_ways_to_resize() -> None:
    wide = np.zeros((40, 81, 3), np.uint8)
    wide[:, :40], wide[:, 40:] = 100, 200
    shorter = resize(wide, 20, "shorter")
    squash = resize(wide, 20, "squash")
    pad = resize(wide, 20, "pad")
    assert {image.shape for image in (shorter, squash, pad)} == {(20, 20, 3)}
    assert (shorter[:, 0] == 100).all()
    assert (shorter[:, -1] == 200).all()
    assert (pad[:5] == 0).all()
    assert (pad[5:14] > 0).all()  # 40 * 20 // 81 = 9 lines
    assert (pad[14:] == 0).all()
    tall = wide.transpose(1, 0, 2)
    for how in ("shorter", "squash", "pad"):
        turned = resize(np.ascontiguousarray(tall), 20, how)
        np.testing.assert_array_equal(
            turned.transpose(1, 0, 2),
            resize(wide, 20, how),
        )
    assert resize(a_picture(2, 500), 8, "pad").shape == (8, 8, 3)
    assert resize(a_picture(2, 500), 8, "shorter").shape == (8, 8, 3)


def test_other_sizes_and_ways_are_refused() -> None:
    with pytest.raises(UsageError, match="choose from 1 to 4096"):
        resize(a_picture(), 0)
    with pytest.raises(UsageError, match="choose shorter, squash, pad"):
        resize(a_picture(), 8, "crop")  # type: ignore[arg-type]
    long = a_picture(2, 1_000_000)
    with pytest.raises(DataError, match=r"^a: image of 1000000x2 pixels: too long to scale"):
        resize(long, 4096, "shorter", "a")
