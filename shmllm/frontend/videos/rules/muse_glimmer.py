"""The rules of Muse Glimmer's video processor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shmllm.errors import RequestError
from shmllm.frontend.images.rules.muse_glimmer import MuseGlimmerFrameRules
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.squares import SquaresRules
from shmllm.frontend.videos.rules.family import SquaresVideoRules

_FORMAT = re.compile(r"[^{}]*\{timestamp:\.[0-9]f\}[^{}]*")
"""What a time is written in."""


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerVideoRules(SquaresVideoRules):
    """Those of transformers' `MuseGlimmerVideoProcessor`.

    Attributes:
        most: the largest number of frames that are used.
        form: how a time is written.
    """

    FRAMES: ClassVar[type[SquaresRules]] = MuseGlimmerFrameRules
    OVERRIDES: ClassVar[frozenset[str]] = MuseGlimmerFrameRules.OVERRIDES | {
        *("do_sample_frames", "fps", "num_frames")
    }

    most: int
    form: str

    @classmethod
    def _further(cls, options: Options, changes: Mapping[str, Any]) -> dict[str, Any]:
        name = "frame_timestamp_format"
        form = options.values.get(name)
        if not isinstance(form, str) or not _FORMAT.fullmatch(form):
            raise RequestError(
                f"{name!r} must be a text with '{{timestamp:.1f}}' or another number of digits, "
                f"not {form!r}",
                parameter=name,
            )
        return {"most": options.count("num_frames"), "form": form}

    def choose(self, total: int, rate: float) -> list[int]:
        step = self.frames_at_once
        count = min(int(total * self.rate / rate), self.most, total)
        count = min(max(step, count // step * step), total)
        if count < 2:
            return [0] * count
        return [index * (total - 1) // (count - 1) for index in range(count)]

    def size_of(self, width: int, height: int, frames: int) -> tuple[int, int]:
        return self.of_frames.size_of(width, height)

    def time_text(self, first_s: float, last_s: float) -> str:
        return self.form.format(timestamp=first_s)
