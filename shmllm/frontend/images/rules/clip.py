"""CLIP's images: resized to a shortest edge, then cut to the middle. The grid is (1, 1, 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import Picture, pixels_of
from shmllm.frontend.images.rules.family import Rules, Tiles
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import FIXED, SHORTEST, fixed_sides, resized_to


@dataclass(frozen=True)
class ClipRules(Rules):
    """The rules of transformers' `CLIPImageProcessor`, and `LlavaImageProcessor` without padding.

    Attributes:
        size: the sides of the resized image, in pixels; None if it keeps its size.
        resample: the filter of pillow.
        crop: height and width of the middle that is kept; None if all of the image is.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset(
        {"do_resize", "size", "resample", "do_center_crop", "crop_size"}
    )

    size: dict[str, int] | None
    resample: int
    crop: tuple[int, int] | None

    @classmethod
    def of(cls, options: Options) -> Self:
        if options.flag("do_pad"):
            raise RequestError("'do_pad' is not supported", parameter="do_pad")
        size = options.sides("size", SHORTEST, FIXED, one="shortest_edge")
        crop = options.sides("crop_size", FIXED)
        return cls(
            size=size if options.flag("do_resize") else None,
            resample=options.filter(),
            crop=(crop["height"], crop["width"]) if options.flag("do_center_crop") else None,
        )

    def tiles(self, picture: Picture) -> Tiles:
        return Tiles(pixels_of(self.fitted(picture))[None], (1, 1, 1))

    def fitted(self, picture: Picture) -> Picture:
        """The tile of an RGB image."""
        if self.size is not None:
            picture = resized_to(picture, self.size, self.resample)
        if self.crop is not None:
            picture = _middle(picture, *self.crop)
        return picture

    def sides(self) -> tuple[int, int] | None:
        return fixed_sides(self.size) if self.crop is None else self.crop


def _middle(picture: Picture, height: int, width: int) -> Picture:
    """The middle of an image; pixels outside of the image are black."""
    left, top = (picture.size[0] - width) // 2, (picture.size[1] - height) // 2
    return picture.crop((left, top, left + width, top + height))
