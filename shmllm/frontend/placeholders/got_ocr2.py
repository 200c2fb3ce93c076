"""GOT-OCR 2: the embeddings of all tiles of an image, between two tokens that prompts have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.formats.image_settings import ImageSettings
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.internvl import InternVLRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Beside, Config, one_token
from shmllm.frontend.placeholders.tiles import TilesPlaceholder

_TOKEN = "<imgpad>"


@dataclass(frozen=True, kw_only=True)
class GotOcr2Placeholder(TilesPlaceholder):
    """The defaults of transformers' `GotOcr2Config`; the texts are those of its processor."""

    EMBEDS: ClassVar[Beside | None] = "nothing"
    RULES: ClassVar[type[Rules]] = InternVLRules
    AUTHOR: ClassVar[str] = "GOT-OCR 2"

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        side = vision.integer("image_size", default=1024)
        rows = side // vision.integer("patch_size", default=16)
        for _ in range(2):  # convolutions that read every other row
            rows = -(-rows // 2)
        token = config.integer("image_token_index", "image_token_id", default=151_859, minimum=0)
        return cls(
            **one_token(_TOKEN, token, mark=f"<img>{_TOKEN}</img>"), side=side, tokens=rows**2
        )

    def adapted(self, settings: ImageSettings) -> ImageSettings:
        """The processor cuts no image unless it is asked to, whatever the file says."""
        return settings.with_options(crop_to_patches=False, min_patches=1, max_patches=12)

    def expansion(self, item: PreparedItem) -> str:
        return self.token * item.num_tokens
