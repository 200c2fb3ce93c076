"""LightOnOCR: a token for each square of merged patches, and none between rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.formats.image_settings import OWN, ImageSettings
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.pixtral import STEP, PixtralRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Beside, Config, one_token
from shmllm.frontend.placeholders.squares import SquaresPlaceholder

_DEFAULTS = {"patch_size": 14, "spatial_merge_size": 2}
"""Those of transformers' `LightOnOcrProcessor`."""


@dataclass(frozen=True, kw_only=True)
class LightOnOcrPlaceholder(SquaresPlaceholder):
    """The defaults of transformers' `LightOnOcrConfig`."""

    EMBEDS: ClassVar[Beside | None] = "nothing"
    RULES: ClassVar[type[Rules]] = PixtralRules
    AUTHOR: ClassVar[str] = "Pixtral"

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        text = texts.get("image_token", "<|image_pad|>")
        token = config.integer("image_token_id", "image_token_index", default=151_655, minimum=0)
        return cls(
            **one_token(text, token),
            side=None,
            patch_size=vision.integer("patch_size", default=16 if vision.values else 14),
            merge_size=config.integer("spatial_merge_size", default=2),
        )

    def adapted(self, settings: ImageSettings) -> ImageSettings:
        """The sizes of images are multiples of the image processor's own patch size, because the
        processor does not tell it that patches are merged."""
        given = settings.options
        step = given.get(f"{OWN}patch_size", given.get("patch_size"))
        absent = {name: value for name, value in _DEFAULTS.items() if f"{OWN}{name}" not in given}
        return settings.with_options(**absent, **{STEP: step})

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens
