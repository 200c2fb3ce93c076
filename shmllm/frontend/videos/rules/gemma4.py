"""The rules of Gemma 4's video processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shmllm.frontend.images.rules.gemma4 import Gemma4Rules
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.squares import SquaresRules
from shmllm.frontend.videos.rules.family import VideoRules, read_count


@dataclass(frozen=True, kw_only=True)
class Gemma4VideoRules(VideoRules):
    """Those of transformers' `Gemma4VideoProcessor`: each frame has the size of an image, and a
    video that is shorter than `count` says has all of its frames.

    Attributes:
        count: how many frames are used; None: as `rate` says.
    """

    FRAMES: ClassVar[type[SquaresRules]] = Gemma4Rules
    OVERRIDES: ClassVar[frozenset[str]] = Gemma4Rules.OVERRIDES | {
        *("do_sample_frames", "fps", "num_frames")
    }

    count: int | None

    @classmethod
    def _further(cls, options: Options, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {"count": read_count(options, changes)}

    def choose(self, total: int, rate: float) -> list[int]:
        count = self.count if self.count is not None else int(total / rate * self.rate)
        count = max(min(count, total), 1)
        return [index * total // count for index in range(count)]

    def size_of(self, width: int, height: int, frames: int) -> tuple[int, int]:
        return self.of_frames.size_of(width, height)

    def time_text(self, first_s: float, last_s: float) -> str:
        minute, second = divmod(int(first_s), 60)
        return f"{minute:02d}:{second:02d}"
