"""PaliGemma: as many image tokens as the tower has patches, before the beginning of the text, which
ends with a newline. BLIP-2: as many as it has queries, before the beginning of the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder, one_token
from shmllm.params.items import Grid


@dataclass(frozen=True, kw_only=True)
class PaliGemmaPlaceholder(ImagePlaceholder):
    """Attributes:
    tokens: the number of embeddings of an image.
    begin: the text of the token at the beginning of a text.
    END: what a text ends with.
    """

    END: ClassVar[str] = "\n"

    tokens: int
    begin: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        side = vision.integer("image_size", default=224)
        patch_size = vision.integer("patch_size", default=16 if vision.values else 14)
        token = config.integer("image_token_index", "image_token_id", default=256_000)
        return cls(
            **one_token(texts.get("image_token", "<image>"), token),
            side=side,
            tokens=(side // patch_size) ** 2,
            begin=texts.get("bos_token", "<bos>"),
        )

    def complete(self, text: str, count: int) -> str:
        """See `Placeholder.complete`. Texts without marks get them."""
        if self.mark not in text:
            text = self.mark * count + text
        end = text.rfind(self.mark) + len(self.mark)
        return f"{text[:end]}{self.begin}{text[end:].removesuffix(self.END)}{self.END}"

    def count(self, grid: Grid) -> int:
        return self.tokens

    def expansion(self, item: PreparedItem) -> str:
        return self.token * self.tokens


@dataclass(frozen=True, kw_only=True)
class Blip2Placeholder(PaliGemmaPlaceholder):
    """The text that transformers' `Blip2Processor` writes."""

    END: ClassVar[str] = ""

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        token = config.integer("image_token_index", "image_token_id", minimum=0)
        return cls(
            **one_token(texts.get("image_token", "<image>"), token),
            side=config.table("vision_config").integer("image_size", default=224),
            tokens=config.integer("num_query_tokens", default=32),
            begin=texts.get("bos_token", "</s>"),
        )
