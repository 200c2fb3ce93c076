"""GLM-4.1V: a token for each square of merged patches of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.glm4v import Glm4vRules
from shmllm.frontend.images.rules.squares import SquaresRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, one_token
from shmllm.frontend.placeholders.squares import SquaresPlaceholder


@dataclass(frozen=True, kw_only=True)
class Glm4vPlaceholder(SquaresPlaceholder):
    """The defaults of transformers' `Glm4vVisionConfig`."""

    TOKEN: ClassVar[int] = 151_343
    RULES: ClassVar[type[SquaresRules]] = Glm4vRules
    AUTHOR: ClassVar[str] = "GLM-4.1V"

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        text = texts.get("image_token", "<|image|>")
        token = config.integer("image_token_id", default=cls.TOKEN, minimum=0)
        return cls(
            **one_token(text, token, mark=f"<|begin_of_image|>{text}<|end_of_image|>"),
            side=None,
            patch_size=vision.integer("patch_size", default=14),
            merge_size=vision.integer("spatial_merge_size", default=2),
        )

    def expansion(self, item: PreparedItem) -> str:
        return self.token * self.count(item.grid)


class Glm4vMoePlaceholder(Glm4vPlaceholder):
    """GLM-4.5V and 4.6V."""

    TOKEN: ClassVar[int] = 151_363
    AUTHOR: ClassVar[str] = "GLM-4.5V"
