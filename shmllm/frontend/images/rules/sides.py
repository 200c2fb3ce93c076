"""Sizes for which a file gives both sides, or the shorter one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture, resized
from shmllm.frontend.images.rules.options import Options

FIXED, SHORTEST = ("height", "width"), ("shortest_edge",)


def fixed_sides(size: Mapping[str, int] | None) -> tuple[int, int] | None:
    """Height and width of all images that are resized to a size; None if they have several."""
    return None if size is None or "height" not in size else (size["height"], size["width"])


def resized_to(picture: Picture, size: Mapping[str, int], resample: int) -> Picture:
    """The image with the sides that `size` gives. With a shortest edge the ratio of the sides
    stays, and the longer one is rounded down."""
    width, height = picture.size
    if "shortest_edge" not in size:
        return resized(picture, size["width"], size["height"], resample)
    edge = size["shortest_edge"]
    longer = int(edge * max(width, height) / min(width, height))
    if width <= height:
        return resized(picture, edge, longer, resample)
    return resized(picture, longer, edge, resample)


def mean_colour(options: Options) -> tuple[int, ...]:
    """The colour around an image that is not square, from 0 to 255."""
    scaled = [each * 255 for each in options.values["image_mean"]]
    if not all(-1 < each < 256 for each in scaled):
        raise RequestError("'image_mean' must consist of numbers from 0 to 1")
    return tuple(map(int, scaled))


def in_square(picture: Picture, colour: tuple[int, ...]) -> Picture:
    """A square of a colour with the image in the middle."""
    from PIL import Image

    width, height = picture.size
    side = max(width, height)
    square: Any = Image.new("RGB", (side, side), colour)
    square.paste(picture, ((side - width) // 2, (side - height) // 2))
    found: Picture = square
    return found
