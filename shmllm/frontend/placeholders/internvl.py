"""InternVL and Qianfan-OCR: the embeddings of all tiles of an image, between two tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shmllm.formats.image_settings import ImageSettings
from shmllm.formats.internvl_chat import ENCODER, IMAGE_TOKEN
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.internvl import InternVLRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Beside, Config, one_token
from shmllm.frontend.placeholders.tiles import TilesPlaceholder


@dataclass(frozen=True, kw_only=True)
class InternVLPlaceholder(TilesPlaceholder):
    """Attributes:
    begin, end: the texts of the tokens around an image.
    """

    EMBEDS: ClassVar[Beside | None] = "nothing"
    RULES: ClassVar[type[Rules]] = InternVLRules
    AUTHOR: ClassVar[str] = "InternVL"

    begin: str
    end: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        side = square_side(vision, "image_size", 448)
        ratio = config.values.get("downsample_ratio", 0.5)
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise config.error(f"'downsample_ratio' must be a number from 0 to 1, not {ratio!r}")
        rows = int(side // square_side(vision, "patch_size", 14) * ratio)
        text = texts.get("context_image_token", IMAGE_TOKEN)
        token = config.integer("image_token_id", default=151_667, minimum=0)
        replaced = one_token(text, token)
        if vision.values.get("model_type") == ENCODER:  # whose prompts have a text in its place
            replaced |= {"mark": "<image>", "replaced": "<image>", "replaced_ids": ()}
        return cls(
            **replaced,
            side=side,
            tokens=rows**2,
            begin=texts.get("start_image_token", "<img>"),
            end=texts.get("end_image_token", "</img>"),
        )

    def adapted(self, settings: ImageSettings) -> ImageSettings:
        """The processor cuts images into tiles whatever the image processor's file says."""
        return settings.with_options(crop_to_patches=True)

    def expansion(self, item: PreparedItem) -> str:
        return f"{self.begin}{self.token * item.num_tokens}{self.end}"


@dataclass(frozen=True, kw_only=True)
class QianfanOcrPlaceholder(InternVLPlaceholder):
    """Qianfan-OCR: prompts have a text of their own in the place of an image."""

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        mark = texts.get("image_placeholder_token", "<image>")
        return replace(super().of(config, texts), mark=mark, replaced=mark, replaced_ids=())


def square_side(vision: Config, name: str, default: int) -> int:
    """The side of a square: one number, or the height and the width."""
    value = vision.values.get(name)
    one = value[0] if isinstance(value, list | tuple) and value else value
    return Config({name: one}, vision.where).integer(name, default=default)
