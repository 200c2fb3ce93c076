"""Aya Vision and Command A Vision: the embeddings of all tiles of an image, between two tokens. Of
the former each tile has a name before it, of the latter a token behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shmllm.formats.image_settings import ImageSettings
from shmllm.frontend.images.rules.cohere2_vision import Cohere2VisionRules
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.internvl import InternVLRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, one_token
from shmllm.frontend.placeholders.tiles import TilesPlaceholder

_TOKEN, _PATCH = 255_036, "<|IMG_PATCH|>"
_BEGIN, _END = "<|START_OF_IMG|>", "<|END_OF_IMG|>"


@dataclass(frozen=True, kw_only=True)
class AyaVisionPlaceholder(TilesPlaceholder):
    """Attributes:
    begin, end: the texts of the tokens around an image.
    tile, whole: the texts before the number of a tile, and before the whole image.
    """

    RULES: ClassVar[type[Rules]] = InternVLRules
    AUTHOR: ClassVar[str] = "Aya Vision"

    begin: str
    end: str
    tile: str
    whole: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        mark = texts.get("image_token", "<image>")
        return cls(
            mark=mark,
            replaced=mark,
            replaced_ids=(),
            token=texts.get("img_patch_token", _PATCH),
            token_id=config.integer(
                "image_token_index", "image_token_id", default=_TOKEN, minimum=0
            ),
            **_sizes(config),
            begin=texts.get("start_of_img_token", _BEGIN),
            end=texts.get("end_of_img_token", _END),
            tile=texts.get("tile_token", "TILE"),
            whole=texts.get("tile_global_token", "TILE_GLOBAL"),
        )

    def adapted(self, settings: ImageSettings) -> ImageSettings:
        """The processor cuts images into tiles whatever the image processor's file says."""
        return settings.with_options(crop_to_patches=True)

    def expansion(self, item: PreparedItem) -> str:
        tokens = self.token * self.tokens
        tiles = "".join(f"{self.tile}_{tile}{tokens}" for tile in range(1, item.grid[0]))
        return f"{self.begin}{tiles}{self.whole}{tokens}{self.end}"


@dataclass(frozen=True, kw_only=True)
class Cohere2VisionPlaceholder(TilesPlaceholder):
    """Attributes:
    begin, end: the texts of the tokens around an image.
    behind: the text of the token behind a tile.
    """

    RULES: ClassVar[type[Rules]] = Cohere2VisionRules
    AUTHOR: ClassVar[str] = "Command A Vision"

    begin: str
    end: str
    behind: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        token = config.integer("image_token_id", default=_TOKEN, minimum=0)
        return cls(
            **one_token(texts.get("image_token", _PATCH), token),
            **_sizes(config),
            begin=texts.get("boi_token", _BEGIN),
            end=texts.get("eoi_token", _END),
            behind=texts.get("img_line_break_token", "<|IMG_LINE_BREAK|>"),
        )

    def expansion(self, item: PreparedItem) -> str:
        tile = self.token * self.tokens + self.behind
        return f"{self.begin}{tile * item.grid[0]}{self.end}"

    def check_rules(self, rules: Rules) -> None:
        super().check_rules(rules)
        assert isinstance(rules, Cohere2VisionRules)
        if rules.side**2 != self.tokens:
            raise Config({}).error(
                f"the vision tower has {self.tokens} embeddings of a tile, and the image "
                f"processor's patch_size ({rules.side}) says {rules.side**2}"
            )


def _sizes(config: Config) -> dict[str, Any]:
    """The side of a tile, and the number of its embeddings."""
    vision = config.table("vision_config")
    side = vision.integer("image_size", default=224)
    rows = side // vision.integer("patch_size", default=16)
    return {"side": side, "tokens": (rows // config.integer("downsample_factor", default=2)) ** 2}
