"""The rules of GLM's video processors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shmllm.frontend.images.rules.glm4v import Glm4vRules
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.squares import SquaresRules
from shmllm.frontend.videos.rules.family import BoundedTogether

_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Of GLM-4.6V: the frames of the grid for a second of videos that last no longer than so many
seconds. The last one is that of longer videos, too."""
_MOST_FRAMES = 640
"""Of GLM-4.6V."""


@dataclass(frozen=True, kw_only=True)
class Glm4vVideoRules(BoundedTogether):
    """Those of transformers' `Glm4vVideoProcessor`.

    Attributes:
        longest_s: the seconds of which as many frames are used as of all of a longer video.
    """

    FRAMES: ClassVar[type[SquaresRules]] = Glm4vRules
    OVERRIDES: ClassVar[frozenset[str]] = Glm4vRules.OVERRIDES | {
        *("do_sample_frames", "fps", "max_duration")
    }

    longest_s: int

    @classmethod
    def _further(cls, options: Options, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {"longest_s": options.count("max_duration")}

    def choose(self, total: int, rate: float) -> list[int]:
        duration = total / rate
        if duration <= self.longest_s:
            if self.rate > rate:
                return [*range(total)]
            count = max(math.floor(duration * self.rate), 1)
            places = [index * rate / self.rate for index in range(count)]
        else:
            count = max(int(self.longest_s * self.rate), 1)
            if count >= total:
                return [*range(total)]
            places = [float(second) * rate for second in np.linspace(0, duration, count)]
        return [*dict.fromkeys(min(total - 1, math.ceil(place)) for place in places)]

    def time_text(self, first_s: float, last_s: float) -> str:
        return f"{int(first_s)}"


@dataclass(frozen=True, kw_only=True)
class Glm46VVideoRules(BoundedTogether):
    """Those of transformers' `Glm46VVideoProcessor`."""

    FRAMES: ClassVar[type[SquaresRules]] = Glm4vRules
    OVERRIDES: ClassVar[frozenset[str]] = Glm4vRules.OVERRIDES | {"do_sample_frames"}

    @classmethod
    def _further(cls, options: Options, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def choose(self, total: int, rate: float) -> list[int]:
        duration = min(total / rate, _RATES[-1][0])
        target = next(each for seconds, each in _RATES if duration <= seconds)
        count = min(int(duration * target * self.frames_at_once), _MOST_FRAMES)
        if count < 1:
            return [0]
        first, last = 0, total - 1
        if total >= count:
            found = self._at_intervals(total, rate, 1 / (self.frames_at_once * target))
            if len(found) == count:
                return found
            if len(found) < count:
                first, last = found[0], found[-1]
        return [*dict.fromkeys(int(index) for index in np.linspace(first, last, count))]

    @staticmethod
    def _at_intervals(total: int, rate: float, interval_s: float) -> list[int]:
        """The first frames of intervals, as far as these begin before the last whole second."""
        found = []
        behind, end, second_of_frame = 0.0, int(total / rate), 1 / rate
        for index in range(total):
            if index * second_of_frame >= behind:
                behind += interval_s
                found.append(index)
                if behind >= end:
                    break
        return found

    def time_text(self, first_s: float, last_s: float) -> str:
        return f"{first_s:.1f} seconds"
