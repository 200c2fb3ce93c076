"""LFM2-VL: a token for each square of merged patches. Each tile is behind its row and column, the
whole image behind a token of its own, and all are between two more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.lfm2_vl import Lfm2VlRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, one_token
from shmllm.frontend.placeholders.internvl import square_side
from shmllm.frontend.placeholders.squares import SquaresPlaceholder


@dataclass(frozen=True, kw_only=True)
class Lfm2VlPlaceholder(SquaresPlaceholder):
    """Attributes:
    begin, end: the texts of the tokens around an image.
    whole: the text of the token before the whole of an image in tiles.
    """

    RULES: ClassVar[type[Rules]] = Lfm2VlRules
    AUTHOR: ClassVar[str] = "LFM2-VL"

    begin: str
    end: str
    whole: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        text = texts.get("image_token", "<image>")
        return cls(
            **one_token(text, config.integer("image_token_id", default=396, minimum=0)),
            side=None,
            patch_size=square_side(config.table("vision_config"), "patch_size", 16),
            merge_size=config.integer("downsample_factor", default=2),
            begin=texts.get("image_start_token", "<|image_start|>"),
            end=texts.get("image_end_token", "<|image_end|>"),
            whole=texts.get("image_thumbnail_token", "<|img_thumbnail|>"),
        )

    def expansion(self, item: PreparedItem) -> str:
        texts = [self.token * part.num_tokens for part in item.parts]
        if item.divided:
            _, rows, columns = item.grid
            marks = [
                f"<|img_row_{row}_col_{column}|>"
                for row in range(1, rows + 1)
                for column in range(1, columns + 1)
            ]
            names = [*marks, self.whole][: len(texts)]
            texts = [name + text for name, text in zip(names, texts, strict=True)]
        return f"{self.begin}{''.join(texts)}{self.end}"
