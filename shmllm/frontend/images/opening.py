"""Makes RGB images of what users give: images of pillow, arrays, tensors, encoded bytes.

Transparent pixels become white, as in transformers; pillow's own conversion drops the alpha
channel. EXIF data turns images that are decoded here, not images that callers pass. An error of an
image is one RequestError with the image's name. pillow is imported with the first image, and its
limit of pixels is neither read nor changed: ours is checked before anything is decoded.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture, excess_of

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "AVIF", "JPEG2000")
"""The formats that are decoded. Others are left out on purpose: EPS would run another program."""
_MANY_IN_ONE = "MPO"
"""The name of a photograph that has further pictures behind it, such as previews: no animation."""
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N")
_WITHOUT_RANGE = ("I", "F")
_PREMULTIPLIED = {"RGBa": "RGBA", "La": "LA"}


def open_image(name: str, value: Any) -> Picture:
    """Makes an RGB image of what a user gives.

    Args:
        name: the image's name for messages, such as "prompt 3: image 1".
        value: an image of pillow; uint8 pixels as a numpy array or torch tensor of shape
            [height, width, 3], [3, height, width] or [height, width]; or encoded bytes.

    Returns:
        An image of pillow with mode RGB, decoded; `value` itself if it is one.

    Raises:
        RequestError: `value` is something else, or cannot be decoded.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return open_bytes(name, bytes(value))
    if hasattr(value, "getbands") and hasattr(value, "convert"):
        return _decoded(name, value)
    if hasattr(value, "ndim") and hasattr(value, "dtype"):
        return _of_array(name, value)
    raise RequestError(
        f"{name} must be an image of PIL, a numpy array, a torch tensor or encoded bytes, not "
        f"{type(value).__name__}"
    )


def open_bytes(name: str, data: bytes) -> Picture:
    """Decodes an encoded image, turns it as its EXIF data says, and makes it RGB.

    Raises:
        RequestError: the data are empty, damaged, cut off, of an unknown format or an animation, or
            the image has more than MOST_PIXELS pixels, or MOST_OF_SIDE in a row or a column.
    """
    if not data:
        raise RequestError(f"{name} is empty (0 bytes)")
    picture = _guarded(name, lambda: _identify(data))
    if picture is None:
        raise RequestError(
            f"{name} has an unknown format or a damaged header; known are {', '.join(FORMATS)}"
        )
    return _decoded(name, picture, turn=True)


def _identify(data: bytes) -> Any:
    """The image whose header has been read, None without one. `PIL.Image.open` would warn of large
    images; this asks the same decoders without it."""
    from PIL import Image

    Image.preinit()
    for name in FORMATS:
        if name not in Image.OPEN:
            Image.init()
        factory, accept = Image.OPEN.get(name, (None, None))
        accepted = accept is None or accept(data[:16])
        if factory is None or not accepted or isinstance(accepted, str):
            continue  # A text says which library is missing.
        try:
            return factory(BytesIO(data), "")
        except SyntaxError:
            continue
    return None


def _decoded(name: str, picture: Any, turn: bool = False) -> Picture:
    """Checks an image before and after it is decoded, and makes it RGB."""
    _check_size(name, picture)
    many = _guarded(name, lambda: getattr(picture, "is_animated", False))
    if many and getattr(picture, "format", None) != _MANY_IN_ONE:
        raise RequestError(f"{name} has several frames; pass one of them, as frame.copy() makes it")
    _guarded(name, picture.load)
    if turn:
        _guarded(name, lambda: _turn(picture))
    _check_size(name, picture)
    if picture.mode in _WITHOUT_RANGE:
        raise RequestError(
            f"{name} has mode {picture.mode!r}, whose values have no fixed range; scale them to 0 "
            "to 255 and convert it to mode 'L'"
        )
    rgb: Picture = _guarded(name, lambda: _rgb(picture))
    return rgb


def _turn(picture: Any) -> None:
    from PIL import ImageOps

    ImageOps.exif_transpose(picture, in_place=True)


def _rgb(picture: Any) -> Picture:
    """16 bits become 8 by their higher byte, where pillow's conversion cuts at 255."""
    from PIL import Image

    if picture.mode in _PREMULTIPLIED:
        picture = picture.convert(_PREMULTIPLIED[picture.mode])
    if picture.mode in _DEEP:
        values = np.asarray(picture.convert("I"))
        picture = Image.fromarray((values >> 8).astype(np.uint8))
    elif "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture)
    rgb: Picture = picture if picture.mode == "RGB" else picture.convert("RGB")
    return rgb


def _of_array(name: str, value: Any) -> Picture:
    """An image of uint8 pixels in a numpy array or a torch tensor."""
    from PIL import Image

    shape = tuple(int(each) for each in value.shape)
    if str(value.dtype).removeprefix("torch.") != "uint8":
        raise RequestError(
            f"{name}: pixels must be uint8, from 0 to 255, not {value.dtype}; scale and round them"
        )
    first, last = shape[:1] == (3,), shape[-1:] == (3,)
    if not (len(shape) == 2 or (len(shape) == 3 and first != last)):
        raise RequestError(
            f"{name}: pixels must have the shape [height, width, 3], [3, height, width] or "
            f"[height, width], not {list(shape)}; for others, pass an image of PIL"
        )
    if 0 in shape:
        raise RequestError(f"{name} has no pixels: its shape is {list(shape)}")
    height, width = shape[1:] if len(shape) == 3 and first else shape[:2]
    _check_excess(name, width, height)
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if len(shape) == 3 and first:
        array = array.transpose(1, 2, 0)
    picture: Picture = Image.fromarray(np.ascontiguousarray(array))
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _check_size(name: str, picture: Any) -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise RequestError(f"{name} has no pixels: its size is {width}x{height}")
    _check_excess(name, width, height)


def _check_excess(name: str, width: int, height: int) -> None:
    if (excess := excess_of(width, height)) is not None:
        raise RequestError(f"{name} has {width}x{height} pixels, {excess}; make it smaller")


def _guarded(name: str, action: Callable[[], Any]) -> Any:
    """Calls a function of pillow, whose decoders raise errors of every kind for damaged data."""
    try:
        return action()
    except RequestError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise RequestError(
            f"{name} cannot be decoded: {reason}; is it damaged or cut off?"
        ) from None
