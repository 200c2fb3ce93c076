"""MiniCPM-V 4.6 and MiniCPM-OCR: the number of an image, the image as a whole, and its slices row
by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.minicpmv4_6 import MERGED, MiniCPMVRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, one_token
from shmllm.frontend.placeholders.squares import SquaresPlaceholder

_TEXTS = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


@dataclass(frozen=True, kw_only=True)
class MiniCPMVPlaceholder(SquaresPlaceholder):
    """Attributes:
    whole, slice, number: the texts of the tokens around the whole image, a slice and the number.
    MODE: the default of "downsample_mode".
    """

    RULES: ClassVar[type[Rules]] = MiniCPMVRules
    AUTHOR: ClassVar[str] = "MiniCPM-V 4.6"
    MODE: ClassVar[str] = "16x"

    whole: tuple[str, str]
    slice: tuple[str, str]
    number: tuple[str, str]

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        begin, end, slice_begin, slice_end, number_begin, number_end = (
            texts.get(name, text) for name, text in _TEXTS.items()
        )
        text = texts.get("image_token", "<|image_pad|>")
        modes = (cls.MODE, *(mode for mode in MERGED if mode != cls.MODE))
        return cls(
            **one_token(text, config.integer("image_token_id", minimum=0)),
            side=None,
            patch_size=config.table("vision_config").integer("patch_size", default=16),
            merge_size=MERGED[config.choice("downsample_mode", modes)],
            whole=(begin, end),
            slice=(slice_begin, slice_end),
            number=(number_begin, number_end),
        )

    def expansion(self, item: PreparedItem) -> str:
        first, *others = (self.token * part.num_tokens for part in item.parts)
        slices = [f"{self.slice[0]}{text}{self.slice[1]}" for text in others]
        columns = item.grid[2] if item.divided else 1
        rows = ("".join(slices[at : at + columns]) for at in range(0, len(slices), columns))
        return f"{self.whole[0]}{first}{self.whole[1]}" + "\n".join(rows)

    def expansions(self, items: Sequence[PreparedItem]) -> list[str]:
        begin, end = self.number
        texts = super().expansions(items)
        return [f"{begin}{number}{end}{text}" for number, text in enumerate(texts)]


@dataclass(frozen=True, kw_only=True)
class MiniCPMOcrPlaceholder(MiniCPMVPlaceholder):
    """With four times as many embeddings, unless config.json says otherwise."""

    AUTHOR: ClassVar[str] = "MiniCPM-OCR"
    MODE: ClassVar[str] = "4x"
