"""The rules of Gemma 4's video processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shmllm.frontend.images.rules.gemma4 import Gemma4Rules
from shmllm.frontend.images.rules.squares import SquaresRules
from shmllm.frontend.videos.rules.family import EvenVideoRules, SquaresVideoRules


@dataclass(frozen=True, kw_only=True)
class Gemma4VideoRules(SquaresVideoRules, EvenVideoRules):
    """Those of transformers' `Gemma4VideoProcessor`: each frame has the size of an image."""

    FRAMES: ClassVar[type[SquaresRules]] = Gemma4Rules
    OVERRIDES: ClassVar[frozenset[str]] = Gemma4Rules.OVERRIDES | {
        *("do_sample_frames", "fps", "num_frames")
    }

    def size_of(self, width: int, height: int, frames: int) -> tuple[int, int]:
        return self.of_frames.size_of(width, height)

    def time_text(self, first_s: float, last_s: float) -> str:
        minute, second = divmod(int(first_s), 60)
        return f"{minute:02d}:{second:02d}"
