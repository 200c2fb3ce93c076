"""MiniMax M3's images: Qwen2-VL's, with bounds of its own where files have a size that its authors'
code does not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shmllm.errors import RequestError
from shmllm.formats.image_defaults import MINIMAX_M3_SIZE
from shmllm.frontend.images.rules.qwen2_vl import Qwen2VLRules

_UNREAD = [672, 672]
_BY_LONG_SIDE = "max_long_side_pixel"


@dataclass(frozen=True, kw_only=True)
class MiniMaxM3Rules(Qwen2VLRules):
    """The rules of transformers' `MiniMaxM3VLImageProcessor`."""

    @classmethod
    def merged(cls, values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        if values.get(_BY_LONG_SIDE) is not None:
            raise RequestError(
                f"{_BY_LONG_SIDE!r} is not supported; images have bounds of their numbers of "
                "pixels: remove it",
                parameter=_BY_LONG_SIDE,
            )
        if values.get("size") == _UNREAD:
            values = values | {"size": dict(MINIMAX_M3_SIZE)}
        return super().merged(values, changes)
