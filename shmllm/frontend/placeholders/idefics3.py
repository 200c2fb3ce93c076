"""Idefics3, SmolVLM and Granite-Docling: each tile is a run of image tokens behind its row and
column, each row ends with a newline, and the whole image comes last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.granite_docling import GraniteDoclingRules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, one_token
from shmllm.frontend.placeholders.tiles import TilesPlaceholder

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, kw_only=True)
class Idefics3Placeholder(TilesPlaceholder):
    """Attributes:
    around: the text of the token before each tile, and behind the last one.
    whole: the text before the whole image.
    """

    around: str
    whole: str

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        factor = config.integer("scale_factor", default=2)
        return cls(
            **_shared(config, texts, {"image_size": 224, "patch_size": 32}, 128_257, factor),
            around=texts.get("fake_image_token", _AROUND),
            whole=texts.get("global_image_token", _WHOLE),
        )

    def expansion(self, item: PreparedItem) -> str:
        rows = self._rows(item)
        behind = f"{self.around}{self.whole}{self.token * self.tokens}{self.around}"
        return f"{rows}\n{behind}" if rows else behind

    def _rows(self, item: PreparedItem) -> str:
        """The texts of the tiles but for the whole image."""
        _, rows, columns = item.grid
        tokens = self.token * self.tokens
        lines = (
            "".join(f"{self.around}<row_{row}_col_{c}>{tokens}" for c in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, kw_only=True)
class ColModernVBertPlaceholder(Idefics3Placeholder):
    """The texts do not depend on the tokenizer."""

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        factor = config.integer("pixel_shuffle_factor", default=4)
        sizes = {"image_size": 224, "patch_size": 16}
        return cls(**_shared(config, {}, sizes, 50_407, factor), around=_AROUND, whole=_WHOLE)


@dataclass(frozen=True, kw_only=True)
class GraniteDoclingPlaceholder(Idefics3Placeholder):
    """An image of one tile has no other one for the whole of it, and its own has a row and a
    column."""

    RULES: ClassVar[type[Rules]] = GraniteDoclingRules
    AUTHOR: ClassVar[str] = "Granite-Docling"

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        factor = config.table("vision_config").integer("scale_factor", default=4)
        sizes = {"image_size": 512, "patch_size": 16}
        return cls(**_shared(config, texts, sizes, 100_337, factor), around=_AROUND, whole=_WHOLE)

    def expansion(self, item: PreparedItem) -> str:
        return super().expansion(item) if item.grid[0] > 1 else self._rows(item)


def _shared(
    config: Config, texts: Mapping[str, str], sizes: Mapping[str, int], token: int, factor: int
) -> dict[str, Any]:
    """The attributes that do not depend on texts around tiles.

    Args:
        config: config.json.
        texts: see `Placeholder.of`.
        sizes: the defaults of a tile's and a patch's side.
        token: that of ``image_token_id``.
        factor: the side of the square of patches that becomes one embedding.
    """
    vision = config.table("vision_config")
    side, patch = (vision.integer(name, default=default) for name, default in sizes.items())
    return {
        **one_token(
            texts.get("image_token", "<image>"),
            config.integer("image_token_id", default=token, minimum=0),
        ),
        "side": side,
        "tokens": (side // patch) ** 2 // factor**2,
    }
