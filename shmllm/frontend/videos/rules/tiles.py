"""The rules of video processors that make each frame a tile: those of LLaVA-OneVision and
LLaVA-NeXT-Video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.rules.clip import ClipRules
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.siglip import SiglipRules
from shmllm.frontend.videos.rules.family import EvenVideoRules, checked_size

_OF_FRAMES = frozenset({"do_sample_frames", "fps", "num_frames"})


@dataclass(frozen=True, kw_only=True)
class TilesVideoRules(EvenVideoRules):
    """Those of transformers' `LlavaOnevisionVideoProcessor`: frames are resized."""

    FRAMES: ClassVar[type[Rules]] = SiglipRules
    OVERRIDES: ClassVar[frozenset[str]] = SiglipRules.OVERRIDES | _OF_FRAMES

    of_frames: SiglipRules | ClipRules

    def fitted(self, picture: Picture, frames: int) -> Picture:
        checked_size(*(self.of_frames.sides() or picture.size), frames)
        return self.of_frames.fitted(picture)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        return 1, 1

    def time_text(self, first_s: float, last_s: float) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class CutVideoRules(TilesVideoRules):
    """Those of transformers' `LlavaNextVideoVideoProcessor`: frames are resized and cut."""

    FRAMES: ClassVar[type[Rules]] = ClipRules
    OVERRIDES: ClassVar[frozenset[str]] = ClipRules.OVERRIDES | _OF_FRAMES
