"""LLaVA: as many image tokens as the tower has patches. LLaVA-NeXT and LLaVA-OneVision: those of
several tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isqrt
from types import MappingProxyType
from typing import Any, ClassVar, Self

from shmllm.formats.joined_tiles import (
    DEFAULT_SIZES,
    ONEVISION_SIZES,
    Size,
    join_tiles,
    read_most_tiles,
)
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.llava_next import LlavaNextRules
from shmllm.frontend.images.rules.llava_onevision import LlavaOnevisionRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import (
    Beside,
    Config,
    ImagePlaceholder,
    VideoPlaceholder,
    one_token,
)
from shmllm.frontend.placeholders.mistral3 import PixtralPlaceholder
from shmllm.frontend.videos.rules.family import VideoRules
from shmllm.frontend.videos.rules.tiles import TilesVideoRules
from shmllm.params.items import Grid

_TOWERS = {"clip_vision_model": (1, 224, 32), "siglip_vision_model": (0, 224, 16)}
"""Of each kind of tower the number of tokens before the patches (CLIP's CLS), and the sides of an
image and of a patch where config.json is silent."""


@dataclass(frozen=True, kw_only=True)
class LlavaPlaceholder(ImagePlaceholder):
    """Attributes:
    TOWERS: the kinds of towers, the default first.
    STRATEGIES: the values of ``vision_feature_select_strategy``, the default first.
    TOKEN: the default of the token that stands for an embedding.
    tokens: the number of embeddings of an image.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    TOWERS: ClassVar[tuple[str, ...]] = tuple(_TOWERS)
    STRATEGIES: ClassVar[tuple[str, ...]] = ("default", "full")
    TOKEN: ClassVar[int] = 32000

    tokens: int

    @classmethod
    def is_taken(cls, config: Config) -> bool:
        """Whether the model has none of Pixtral's towers; see `PixtralPlaceholder`."""
        return not PixtralPlaceholder.is_taken(config)

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        return cls(**cls._values(config, texts))

    @classmethod
    def _values(cls, config: Config, texts: Mapping[str, str]) -> dict[str, Any]:
        vision = config.table("vision_config")
        tower = vision.choice("model_type", cls.TOWERS)
        leading, image_size, patch_size = _TOWERS[tower]
        if not vision.values:
            image_size, patch_size = 336, 14
        side = vision.integer("image_size", default=image_size)
        rows = side // vision.integer("patch_size", default=patch_size)
        dropped = config.choice("vision_feature_select_strategy", cls.STRATEGIES) == "default"
        text = texts.get("image_token", "<image>")
        token = config.integer("image_token_id", "image_token_index", default=cls.TOKEN, minimum=0)
        return {
            **one_token(text, token),
            "side": side,
            "tokens": rows * rows + leading - dropped,
        }

    def count(self, grid: Grid) -> int:
        return self.tokens

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens


@dataclass(frozen=True, kw_only=True)
class VipLlavaPlaceholder(LlavaPlaceholder):
    """ViP-LLaVA: that of LLaVA with CLIP, whose first token never counts."""

    TOWERS: ClassVar[tuple[str, ...]] = ("clip_vision_model",)
    STRATEGIES: ClassVar[tuple[str, ...]] = ("default",)


@dataclass(frozen=True, kw_only=True)
class LlavaNextPlaceholder(LlavaPlaceholder):
    """LLaVA-NeXT: behind the embeddings of the whole image those of a larger one, as many as its
    size asks for.

    Attributes:
        SIZES: the default of `sizes`.
        patches: the number of patches in a row of a tile.
        sizes: the possible sizes of the larger image.
        most_tiles: see `join_tiles`.
    """

    RULES: ClassVar[type[Rules]] = LlavaNextRules
    AUTHOR: ClassVar[str] = "LLaVA-NeXT"
    SIZES: ClassVar[tuple[Size, ...]] = DEFAULT_SIZES

    patches: int
    sizes: tuple[Size, ...]
    most_tiles: int = 0

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        values = cls._values(config, texts)
        sizes = config.values.get("image_grid_pinpoints") or cls.SIZES
        try:
            pairs = tuple((int(height), int(width)) for height, width in sizes)
        except (TypeError, ValueError):
            raise config.error(
                f"'image_grid_pinpoints' must list heights and widths, not {sizes!r}"
            ) from None
        values |= {"sizes": pairs, "most_tiles": cls._most_tiles(config)}
        return cls(**values, patches=isqrt(values["tokens"]))

    @classmethod
    def _most_tiles(cls, config: Config) -> int:
        return 0

    def count(self, grid: Grid) -> int:
        _, height, width = grid
        assert self.side is not None, "tiles have one size"
        joined = join_tiles(height, width, self.sizes, self.side, self.patches, self.most_tiles)
        return self.tokens + joined.num_embeddings

    def check_rules(self, rules: Rules) -> None:
        if type(rules) is not self.RULES:
            raise Config({}).error(
                f"the model needs {self.AUTHOR}'s image processor, not {rules!r}"
            )
        assert isinstance(rules, LlavaNextRules)
        if (rules.tile, rules.sizes) != (self.side, self.sizes):
            raise Config({}).error(
                f"the model has tiles of {self.side} pixels and the sizes {self.sizes}, the image "
                f"processor has {rules.tile} and {rules.sizes}"
            )


@dataclass(frozen=True, kw_only=True)
class Granite4VisionPlaceholder(LlavaNextPlaceholder):
    """Granite 4 Vision: as LLaVA-NeXT with tiles of fewer embeddings in a row."""

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        found, rate = super().of(config, texts), config.values.get("downsample_rate")
        try:
            patches = int(found.patches * Fraction(str(rate)))
        except (ValueError, ZeroDivisionError):
            raise config.error(f"'downsample_rate' must be a fraction, not {rate!r}") from None
        return replace(found, patches=patches, tokens=patches**2)


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionPlaceholder(LlavaNextPlaceholder):
    """LLaVA-OneVision: the same, of a smaller number of embeddings if the image is large, or those
    of one tile and one more."""

    RULES: ClassVar[type[Rules]] = LlavaOnevisionRules
    AUTHOR: ClassVar[str] = "LLaVA-OneVision"
    TOWERS: ClassVar[tuple[str, ...]] = tuple(reversed(_TOWERS))
    STRATEGIES: ClassVar[tuple[str, ...]] = ("full", "default")
    TOKEN: ClassVar[int] = 151_646
    SIZES: ClassVar[tuple[Size, ...]] = ONEVISION_SIZES

    @classmethod
    def _most_tiles(cls, config: Config) -> int:
        value = config.values.get("vision_aspect_ratio")
        most = read_most_tiles(value)
        if most is None:
            raise config.error(f"'vision_aspect_ratio' must be 'anyres_max_N', not {value!r}")
        return most

    def count(self, grid: Grid) -> int:
        return self.tokens + 1 if grid[0] == 1 else super().count(grid)


@dataclass(frozen=True, kw_only=True)
class LlavaNextVideoImagePlaceholder(LlavaNextPlaceholder):
    """LLaVA-NeXT-Video: images as those of LLaVA-NeXT, with another token."""

    TOKEN: ClassVar[int] = 32001


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionVideoPlaceholder(VideoPlaceholder):
    """LLaVA-OneVision: a video token for each square of patches of a frame, also for those that the
    edge cuts, and one more behind the last frame.

    Attributes:
        image: how the model's prompts contain images.
        tokens: the number of embeddings of a frame.
        behind: that of embeddings behind the last one.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    processors: ClassVar[tuple[str, ...]] = ("LlavaOnevisionVideoProcessor",)
    IMAGE: ClassVar[type[LlavaNextPlaceholder]] = LlavaOnevisionPlaceholder
    TOKEN: ClassVar[int] = 151_647

    image: LlavaNextPlaceholder
    tokens: int
    behind: int = 1

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        text, names = texts.get("video_token", "<video>"), ("video_token_id", "video_token_index")
        token = config.integer(*names, default=cls.TOKEN, minimum=0)
        image = cls.IMAGE.of(config, texts)
        return cls(
            **one_token(text, token),
            image=image,
            frames_at_once=1,
            tokens=cls._side(config, image.patches) ** 2,
        )

    @classmethod
    def _side(cls, config: Config, patches: int) -> int:
        """The number of embeddings in a row of a frame."""
        return -(-patches // 2)

    def count(self, grid: Grid) -> int:
        return grid[0] * self.tokens + self.behind

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens

    def check_rules(self, rules: VideoRules) -> None:
        side = self.image.side
        assert isinstance(rules, TilesVideoRules), "the processors make tiles"
        if (found := rules.of_frames.sides()) != (side, side):
            raise Config({}).error(
                f"the vision tower takes frames of {side}x{side} pixels, and the video processor "
                f"makes frames of {found or 'several sizes'}: change its settings"
            )


@dataclass(frozen=True, kw_only=True)
class LlavaNextVideoPlaceholder(LlavaOnevisionVideoPlaceholder):
    """LLaVA-NeXT-Video: a video token for each whole square of patches of a frame."""

    processors: ClassVar[tuple[str, ...]] = ("LlavaNextVideoVideoProcessor",)
    own_settings: ClassVar[Mapping[str, Any]] = MappingProxyType({"do_pad": None})
    IMAGE: ClassVar[type[LlavaNextPlaceholder]] = LlavaNextVideoImagePlaceholder
    TOKEN: ClassVar[int] = 32000

    behind: int = 0

    @classmethod
    def _side(cls, config: Config, patches: int) -> int:
        return patches // config.integer("spatial_pool_stride", default=2)
