"""Mistral 3: a token for each square of merged patches, others between rows, and one behind the
last row. Pixtral, as a LLaVA: the same with a token for each patch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.pixtral import PixtralRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, one_token
from shmllm.frontend.placeholders.squares import SquaresPlaceholder


@dataclass(frozen=True, kw_only=True)
class Mistral3Placeholder(SquaresPlaceholder):
    """Attributes:
    between: the text of the token between two rows.
    end: the text of the token behind the last row.
    TOKEN, MERGE: the defaults of the token that stands for an embedding, and of the side of a
        square.
    """

    RULES: ClassVar[type[Rules]] = PixtralRules
    AUTHOR: ClassVar[str] = "Pixtral"
    TOKEN: ClassVar[int] = 10
    MERGE: ClassVar[int] = 2

    between: str
    end: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        text = texts.get("image_token", "[IMG]")
        token = config.integer("image_token_index", "image_token_id", default=cls.TOKEN, minimum=0)
        return cls(
            **one_token(text, token),
            side=None,
            patch_size=vision.integer("patch_size", default=16 if vision.values else 14),
            merge_size=config.integer("spatial_merge_size", default=cls.MERGE),
            between=texts.get("image_break_token", "[IMG_BREAK]"),
            end=texts.get("image_end_token", "[IMG_END]"),
        )

    def expansion(self, item: PreparedItem) -> str:
        _, rows, columns = (side // self.merge_size for side in item.grid)
        return self.between.join([self.token * columns] * rows) + self.end


@dataclass(frozen=True, kw_only=True)
class PixtralPlaceholder(Mistral3Placeholder):
    """The defaults of transformers' `LlavaConfig` and `PixtralProcessor`."""

    TOKEN: ClassVar[int] = 32_000
    MERGE: ClassVar[int] = 1

    @classmethod
    def is_taken(cls, config: Config) -> bool:
        return config.table("vision_config").values.get("model_type") == "pixtral"
