"""What users give becomes RGB images; what cannot is one error with the image's name."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from shmllm.errors import RequestError
from shmllm.frontend.images.opening import FORMATS, open_bytes, open_image
from shmllm.frontend.images.picture import MOST_OF_SIDE, MOST_PIXELS

NAME = "prompt 3: image 1"
ORIENTATION = 0x0112


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header claims any size, without pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def is_refused(data: bytes) -> bool:
    """Whether an image is refused, with its name; any other error fails the test."""
    try:
        open_bytes(NAME, data)
    except RequestError as error:
        return str(error).startswith(NAME) or pytest.fail(f"no name: {error}")
    return False


def gradient(mode: str) -> Image.Image:
    """An image with many values in each band, the last of which is alpha in modes with A."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.arange(12 * 10 * bands, dtype=np.uint32).reshape(12, 10, bands) * 37 % 256
    if bands == 1:
        gray = Image.fromarray(values[..., 0].astype(np.uint8))
        return gray.convert(mode)
    return Image.frombytes(mode, (10, 12), values.astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "LA", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"]
)
def test_every_mode_becomes_the_rgb_of_transformers(mode: str) -> None:
    image = gradient(mode)
    opened = open_image(NAME, image)
    assert opened.mode == "RGB"
    assert np.asarray(opened).tobytes() == convert_to_rgb(image, return_numpy=True).tobytes()


@pytest.mark.parametrize("mode", ["L", "P", "RGB"])
def test_a_transparent_colour_becomes_white(mode: str) -> None:
    image = Image.new("L", (4, 4), 7).convert(mode)
    image.info["transparency"] = image.getpixel((0, 0))
    for given in (image, encoded(image)):
        assert np.asarray(open_image(NAME, given)).min() == 255


def test_premultiplied_alpha_goes_on_white() -> None:
    image = gradient("RGBA")
    straight = np.asarray(open_image(NAME, image.convert("RGBa").convert("RGBA")))
    assert np.asarray(open_image(NAME, image.convert("RGBa"))).tobytes() == straight.tobytes()
    assert np.asarray(open_image(NAME, Image.new("La", (2, 2), (0, 0)))).min() == 255


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_16_bits_become_the_higher_8(mode: str) -> None:
    values = np.array([[0, 255, 256, 0x1234, 0xFFFF]], ">u2" if mode == "I;16B" else "<u2")
    image = Image.frombytes(mode, (5, 1), values.tobytes())
    opened = np.asarray(open_image(NAME, image))
    assert opened[0].tolist() == [[v] * 3 for v in (0, 0, 1, 0x12, 0xFF)]


def test_a_png_of_16_bits_is_read() -> None:
    image = Image.fromarray(np.array([[0, 0x8000]], np.uint16))
    assert np.asarray(open_image(NAME, encoded(image)))[0, :, 0].tolist() == [0, 0x80]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_without_a_range_are_refused(mode: str) -> None:
    with pytest.raises(RequestError, match=f"{NAME} has mode '{mode}', whose values have no fixed"):
        open_image(NAME, Image.new(mode, (2, 2)))


def test_an_rgb_image_is_the_result_itself(random_image: Callable[..., Image.Image]) -> None:
    image = random_image(5, 6)
    assert open_image(NAME, image) is image


@pytest.mark.parametrize("kind", ["numpy", "torch", "strided"])
def test_arrays_of_each_shape_are_images(
    kind: str, random_image: Callable[..., Image.Image]
) -> None:
    image = random_image(5, 6)
    rows = np.asarray(image)
    gray = np.asarray(image.convert("L"))
    for array, expected in (
        (rows, rows),
        (np.ascontiguousarray(rows.transpose(2, 0, 1)), rows),
        (gray, np.repeat(gray[..., None], 3, axis=2)),
    ):
        given: Any = array.copy()
        if kind == "torch":
            given = torch.from_numpy(given)
        elif kind == "strided":
            given = np.repeat(given, 2, axis=0)[::2]
        assert np.asarray(open_image(NAME, given)).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((4, 5, 3), np.float32), "pixels must be uint8, from 0 to 255, not float32"),
        (torch.zeros(4, 5, 3), "not torch.float32"),
        (np.zeros((4, 5, 4), np.uint8), r"\[height, width\], not \[4, 5, 4\]"),
        (np.zeros((4, 5, 1), np.uint8), r"not \[4, 5, 1\]"),
        (np.zeros((3, 5, 3), np.uint8), r"not \[3, 5, 3\]"),
        (np.zeros((1, 4, 5, 3), np.uint8), r"not \[1, 4, 5, 3\]"),
        (np.zeros((5,), np.uint8), r"not \[5\]"),
        (np.zeros((), np.uint8), r"not \[\]"),
        (np.zeros((0, 5, 3), np.uint8), r"has no pixels: its shape is \[0, 5, 3\]"),
        (np.zeros((0, 0), np.uint8), "has no pixels"),
        ("a.png", "an image of PIL, a numpy array, a torch tensor or encoded bytes, not str"),
        (None, "not NoneType"),
        (b"", r"is empty \(0 bytes\)"),
        (
            b"hello, this is not an image",
            "has an unknown format or a damaged header; known are PNG",
        ),
        (Image.new("RGB", (0, 0)), "has no pixels: its size is 0x0"),
        (Image.new("RGB", (0, 7)), "has no pixels: its size is 0x7"),
    ],
)
def test_what_is_no_image_is_refused_with_its_name(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        open_image(NAME, value)
    assert str(raised.value).startswith(NAME)


@pytest.mark.parametrize("form", ["PNG", "BMP", "PPM", "TIFF", "GIF", "WEBP", "JPEG", "JPEG2000"])
def test_bytes_of_every_format_are_read(
    form: str, random_image: Callable[..., Image.Image]
) -> None:
    data = encoded(random_image(20, 30), form)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))
    for given in (data, bytearray(data), memoryview(data)):
        assert np.asarray(open_image(NAME, given)).tobytes() == expected.tobytes()


def test_formats_that_run_other_programs_are_unknown() -> None:
    with pytest.raises(RequestError, match="unknown format"):
        open_bytes(NAME, encoded(Image.new("RGB", (4, 4)), "EPS"))
    assert "EPS" not in FORMATS


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_encoded_images_only(
    orientation: int, random_image: Callable[..., Image.Image]
) -> None:
    from PIL import ImageOps

    image = random_image(4, 6)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encoded(image, exif=exif)
    with Image.open(io.BytesIO(data)) as opened:
        turned = np.asarray(ImageOps.exif_transpose(opened))
        assert np.asarray(open_image(NAME, data)).tolist() == turned.tolist()
        assert np.asarray(open_image(NAME, opened)).tolist() == np.asarray(image).tolist()


def test_animations_are_refused(random_image: Callable[..., Image.Image]) -> None:
    frames = [random_image(8, 8, seed) for seed in range(3)]
    for form in ("GIF", "PNG", "WEBP", "TIFF"):
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
        with pytest.raises(RequestError, match=f"{NAME} has several frames"):
            open_bytes(NAME, data)
        with Image.open(io.BytesIO(data)) as image:
            with pytest.raises(RequestError, match="pass one of them"):
                open_image(NAME, image)
            image.seek(1)
            assert open_image(NAME, image.copy()).size == (8, 8)


def test_a_photograph_with_further_pictures_is_its_first(
    random_image: Callable[..., Image.Image],
) -> None:
    frames = [random_image(16, 16, seed) for seed in range(2)]
    data = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    first = encoded(frames[0], "JPEG")
    assert (
        np.asarray(open_bytes(NAME, data)).tolist() == np.asarray(open_bytes(NAME, first)).tolist()
    )


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "JPEG2000"])
def test_truncated_and_damaged_images_are_refused_with_their_name(
    form: str, random_image: Callable[..., Image.Image]
) -> None:
    data = encoded(random_image(40, 30), form)
    draw = random.Random(form)
    refused = 0
    for _ in range(60):
        damaged = bytearray(data[: draw.randint(1, len(data))])
        for _ in range(draw.randint(0, 8)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refused += is_refused(bytes(damaged))
    assert refused > 20


def test_a_lazy_image_that_is_truncated_is_refused(
    random_image: Callable[..., Image.Image],
) -> None:
    data = encoded(random_image(40, 30))
    with (
        Image.open(io.BytesIO(data[: len(data) // 2])) as image,
        pytest.raises(RequestError, match=f"{NAME} cannot be decoded: .*truncated"),
    ):
        open_image(NAME, image)


@pytest.mark.parametrize(
    ("width", "height"),
    [
        (2**31 - 1, 2**31 - 1),
        (MOST_PIXELS + 1, 1),
        (10_000, 10_000),
        (MOST_PIXELS, 1),
        (1, MOST_OF_SIDE + 1),
    ],
)
def test_a_bomb_is_refused_before_it_is_decoded_without_a_warning(width: int, height: int) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    with pytest.raises(RequestError, match=f"{NAME} has {width}x{height} pixels, more than"):
        open_bytes(NAME, png_of_size(width, height))
    assert limit == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(("width", "height"), [(MOST_OF_SIDE + 1, 1), (1, MOST_OF_SIDE + 1)])
def test_pixels_in_memory_have_the_same_limit_of_a_side(width: int, height: int) -> None:
    pixels = np.zeros((height, width, 3), np.uint8)
    images = [Image.new("RGB", (width, height)), pixels, pixels.transpose(2, 0, 1), pixels[..., 0]]
    for image in images:
        with pytest.raises(RequestError, match=f"{width}x{height} pixels, more than 1,048,576 "):
            open_image(NAME, image)
    assert open_image(NAME, Image.new("RGB", (MOST_OF_SIDE, 1))).size == (MOST_OF_SIDE, 1)


def test_the_limit_holds_whatever_pillows_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(RequestError, match="more than 89,478,485"):
        open_bytes(NAME, png_of_size(100_000, 100_000))
    with pytest.raises(RequestError, match="cannot be decoded"):
        open_bytes(NAME, png_of_size(100, 100))
    huge = np.broadcast_to(np.zeros(1, np.uint8), (100_000, 100_000))
    with pytest.raises(RequestError, match="more than 89,478,485"):
        open_image(NAME, huge)
