"""The rules of Qwen's video processors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.qwen2_vl import Qwen2VLRules
from shmllm.frontend.images.rules.squares import SquaresRules
from shmllm.frontend.videos.rules.family import BoundedTogether, SquaresVideoRules, read_count


@dataclass(frozen=True, kw_only=True)
class QwenVideoRules(SquaresVideoRules):
    """
    Attributes:
        count: how many frames are used; None: as `rate` says.
        fewest, most: the bounds of that number.
    """

    FRAMES: ClassVar[type[SquaresRules]] = Qwen2VLRules
    OVERRIDES: ClassVar[frozenset[str]] = Qwen2VLRules.OVERRIDES | {
        *("do_sample_frames", "fps", "num_frames", "min_frames", "max_frames")
    }

    count: int | None
    fewest: int
    most: int

    @classmethod
    def _further(cls, options: Options, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "count": read_count(options, changes),
            "fewest": options.count("min_frames"),
            "most": options.count("max_frames"),
        }

    def time_text(self, first_s: float, last_s: float) -> str:
        return f"<{(first_s + last_s) / 2:.1f} seconds>"


@dataclass(frozen=True, kw_only=True)
class Qwen2VLVideoRules(QwenVideoRules):
    """Those of transformers' `Qwen2VLVideoProcessor`: the bounds are those of a frame."""

    def choose(self, total: int, rate: float) -> list[int]:
        step = self.frames_at_once
        if self.count is not None:
            count = min(round(self.count / step) * step, total)
        else:
            most = min(self.most, total) // step * step
            wanted = min(max(total / rate * self.rate, self.fewest), most, total)
            count = math.floor(wanted / step) * step
        count = max(count, 1)
        # transformers' arange of floats, which has an index behind the last frame now and then
        return [index * total // count for index in range(count)]

    def size_of(self, width: int, height: int, frames: int) -> tuple[int, int]:
        return self.of_frames.size_of(width, height)


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVideoRules(BoundedTogether, QwenVideoRules):
    """Those of transformers' `Qwen3VLVideoProcessor`."""

    def choose(self, total: int, rate: float) -> list[int]:
        count = self.count if self.count is not None else int(total / rate * self.rate)
        if self.count is None:
            count = max(count, self.fewest)
        count = max(min(count, self.most, total), 1)
        return [int(index) for index in np.linspace(0, total - 1, count).round()]
