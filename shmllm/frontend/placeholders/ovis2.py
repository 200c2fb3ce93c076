"""Ovis 2: the embeddings of the whole image and of its tiles, with marks around and between them
whose embeddings are the image's, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.ovis2 import Ovis2Rules
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.placeholders.family import Config, ImagePlaceholder
from shmllm.params.items import Grid

_MARK, _ATOM = "<image>", "<IMG_ATOM>"
_BEGIN, _BEHIND_WHOLE, _BEHIND_COLUMN, _BEHIND_ROW, _END = (
    f"<IMG_{name}>" for name in ("START", "GRID", "COL", "ROW", "END")
)
_TOKENS = tuple(range(151_666, 151_671))


@dataclass(frozen=True, kw_only=True)
class Ovis2Placeholder(ImagePlaceholder):
    """Attributes:
    tokens: the number of embeddings of a tile.
    marks: the ids of the marks.
    """

    RULES: ClassVar[type[Rules]] = Ovis2Rules
    AUTHOR: ClassVar[str] = "Ovis 2"

    tokens: int
    marks: tuple[int, ...]

    @classmethod
    def of(cls, config: Config, texts: Mapping[str, str]) -> Self:
        vision = config.table("vision_config")
        side = vision.integer("image_size", default=224)
        patches = side // vision.integer("patch_size", default=14)
        rows = patches // vision.integer("hidden_stride", default=1)
        marks: Any = config.values.get("visual_indicator_token_ids") or _TOKENS
        if not isinstance(marks, list | tuple) or any(type(each) is not int for each in marks):
            raise config.error(f"'visual_indicator_token_ids' must be tokens, not {marks!r}")
        return cls(
            mark=_MARK,
            replaced=_MARK,
            replaced_ids=(),
            token=_ATOM,
            token_id=config.integer("image_token_id", default=151_665, minimum=0),
            side=side,
            tokens=rows**2,
            marks=tuple(marks),
        )

    def visible(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Marks are tokens of embeddings, too."""
        return np.where(np.isin(ids, self.marks), self.token_id, ids)

    def count(self, grid: Grid) -> int:
        return grid[0] * self.tokens + 2 + grid[1] * grid[2]

    def expansion(self, item: PreparedItem) -> str:
        tiles, rows, columns = item.grid
        tile = _ATOM * self.tokens
        row = _BEHIND_COLUMN.join([tile] * columns)
        behind = _BEHIND_ROW.join([row] * rows) if tiles > 1 else ""
        return f"{_BEGIN}{tile}{_BEHIND_WHOLE}{behind}{_END}"
