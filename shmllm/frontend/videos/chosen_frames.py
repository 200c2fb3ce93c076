"""The option `media_io_kwargs`: which frames of encoded videos are used, whatever the model's video
processor would choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Any

from shmllm.errors import EngineStartError

OPTION = "media_io_kwargs"
_DEFAULT_FRAMES = 32
_ONLY_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "image": {
        "image_mode": ("RGB",),
        "rgba_background_color": ((255, 255, 255), [255, 255, 255]),
    },
    "audio": {},
}
"""The values of what has no effect, by modality: images are RGB before white."""


@dataclass(frozen=True, slots=True)
class ChosenFrames:
    """Frames at equal distances, as vLLM chooses them.

    Attributes:
        most: the most frames; -1: all.
        rate: the most frames of a second; -1: all.
    """

    most: int = -1
    rate: float = -1

    def choose(self, total: int, rate: float) -> Sequence[int]:
        """The indices of the frames.

        Args:
            total: the number of frames of the video.
            rate: those of a second.
        """
        bounds = (
            self.most if self.most > 0 else inf,
            floor(total / rate * self.rate) if self.rate > 0 else inf,
        )
        count = int(max(1, min(total, *bounds)))
        import numpy as np

        found: list[int] = np.linspace(0, total - 1, count, dtype=int).tolist()
        return found


def read_media_options(given: Mapping[str, Any] | None) -> ChosenFrames | None:
    """The frames that the option chooses; None: the model's video processor chooses them.

    Raises:
        EngineStartError: the option has something that is not supported, or a wrong value.
    """
    video = None
    for modality, table in (given or {}).items():
        if modality not in ("video", *_ONLY_VALUES) or not isinstance(table, Mapping):
            raise EngineStartError(
                f'{OPTION} must be a dict such as {{"video": {{"num_frames": 32}}}}, with the keys '
                f"video, image and audio; got {given!r}"
            )
        if modality == "video":
            video = _chosen(table)
            continue
        known = _ONLY_VALUES[modality]
        for name, value in table.items():
            if name not in known:
                raise EngineStartError(f"{OPTION}: {modality} has {name!r}, which is not supported")
            if value not in known[name]:
                raise EngineStartError(
                    f"{OPTION}: {name} can only be {known[name][0]!r}, got {value!r}"
                )
    return video


def _chosen(table: Mapping[str, Any]) -> ChosenFrames | None:
    if unknown := sorted(set(table) - {"num_frames", "fps"}):
        raise EngineStartError(
            f"{OPTION}: video has {unknown}; num_frames and fps are supported, and PyAV decodes"
        )
    if not table:
        return None
    most, rate = table.get("num_frames", _DEFAULT_FRAMES), table.get("fps", -1)
    if type(most) is not int or not (most >= 1 or most == -1):
        raise EngineStartError(f"{OPTION}: num_frames must be -1 or at least 1, got {most!r}")
    if type(rate) not in (int, float) or not (0 < rate < inf or rate == -1):
        raise EngineStartError(f"{OPTION}: fps must be -1 or above 0, got {rate!r}")
    return ChosenFrames(most, rate)
