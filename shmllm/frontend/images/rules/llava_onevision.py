"""LLaVA-OneVision's images: those of LLaVA-NeXT, or one tile that has the whole image in the middle
of a square."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shmllm.errors import RequestError
from shmllm.frontend.images.picture import MOST_PIXELS, Picture, pixels_of, resized
from shmllm.frontend.images.rules.family import Tiles
from shmllm.frontend.images.rules.llava_next import LlavaNextRules
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.sides import in_square, mean_colour

_ONE_TILE = "pad_to_square"


@dataclass(frozen=True)
class LlavaOnevisionRules(LlavaNextRules):
    """The rules of transformers' `LlavaOnevisionImageProcessor`.

    Attributes:
        one_tile: whether an image has one tile, as among several images.
        background: the colour around an image that is not square, from 0 to 255.
    """

    OVERRIDES: ClassVar[frozenset[str]] = frozenset({"resample", _ONE_TILE})

    one_tile: bool
    background: tuple[int, ...]

    @classmethod
    def _further(cls, options: Options) -> dict[str, Any]:
        if not options.flag("do_resize"):
            raise RequestError("'do_resize' must be true", parameter="do_resize")
        return {"one_tile": options.flag(_ONE_TILE), "background": mean_colour(options)}

    @classmethod
    def among(cls, count: int) -> Mapping[str, Any]:
        return {_ONE_TILE: True} if count > 1 else {}

    def tiles(self, picture: Picture) -> Tiles:
        if not self.one_tile:
            return super().tiles(picture)
        width, height = picture.size
        side = max(width, height)
        if side**2 > MOST_PIXELS:
            raise RequestError(
                f"an image of {width}x{height} pixels becomes a square of more than "
                f"{MOST_PIXELS:,} pixels by the model's settings; crop it"
            )
        square = in_square(picture, self.background)
        pixels = pixels_of(resized(square, self.tile, self.tile, self.resample))
        return Tiles(pixels[None], (1, height, width))
