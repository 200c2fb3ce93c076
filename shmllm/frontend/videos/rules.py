"""Which frames of a video are used, and their size: the rules of Qwen's video processors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from shmllm.errors import EngineStartError, RequestError, nearest
from shmllm.formats.image_settings import ImageSettings
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.qwen2_vl import LARGEST_RATIO, Qwen2VLRules

OVERRIDES = frozenset(
    {"do_resize", "size", "min_pixels", "max_pixels", "resample"}
    | {"do_sample_frames", "fps", "num_frames", "min_frames", "max_frames"}
)
"""The fields that a request may change."""
LOWEST_RATE, HIGHEST_RATE = 1e-6, 2.0**20
"""The bounds of the frames of a second. Times of frames are finite between them."""


def is_rate(value: Any) -> bool:
    """Whether a value is a supported number of frames of a second."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    return is_number and not isinstance(value, bool) and LOWEST_RATE <= value < HIGHEST_RATE


@dataclass(frozen=True)
class VideoRules(ABC):
    """The rules of a family with the values of a model and a request. Equal rules make equal frames
    of equal videos, and their `repr` is part of a video's identity.

    Attributes:
        of_frames: how frames are resized: the bounds are those of one frame, or of all.
        frames_at_once: how many frames become one of the grid.
        samples: whether frames are chosen of those that a user gives with their rate.
        rate: how many frames of a second are used, and what frames without a rate have.
        count: how many frames are used; None: as `rate` says.
        fewest, most: the bounds of that number.
    """

    of_frames: Qwen2VLRules
    frames_at_once: int
    samples: bool
    rate: float
    count: int | None
    fewest: int
    most: int

    @classmethod
    def of(cls, settings: ImageSettings, changes: Mapping[str, Any]) -> Self:
        """Reads the fields of a model and those that a request changes.

        Raises:
            RequestError: a name is unknown, or a value is wrong.
        """
        for name in changes:
            if name not in OVERRIDES:
                near = nearest(str(name), OVERRIDES)
                raise RequestError(
                    f"{name!r} is not supported for videos; did you mean {near!r}? Supported are "
                    f"{', '.join(sorted(OVERRIDES))}",
                    parameter="mm_processor_kwargs",
                    value=name,
                )
        if changes.get("fps") is not None and changes.get("num_frames") is not None:
            raise RequestError("'fps' and 'num_frames' exclude each other", parameter="fps")
        values = Qwen2VLRules.merged(dict(settings.options), dict(changes))
        options = Options(values)
        rate = options.number("fps")
        if not is_rate(rate):
            raise RequestError(
                f"'fps' must be from {LOWEST_RATE} to {HIGHEST_RATE:,.0f}, not {rate}",
                parameter="fps",
            )
        has_count = values.get("num_frames") is not None and changes.get("fps") is None
        return cls(
            of_frames=Qwen2VLRules.of(options),
            frames_at_once=options.count("temporal_patch_size"),
            samples=options.flag("do_sample_frames"),
            rate=rate,
            count=options.count("num_frames") if has_count else None,
            fewest=options.count("min_frames"),
            most=options.count("max_frames"),
        )

    @abstractmethod
    def choose(self, total: int, rate: float) -> list[int]:
        """The indices of the frames that are used of a video.

        Args:
            total: how many frames it has.
            rate: those of a second.
        """

    @abstractmethod
    def size_of(self, width: int, height: int, frames: int) -> tuple[int, int]:
        """Width and height of the resized frames.

        Args:
            width, height: of a frame.
            frames: how many are used.

        Raises:
            RequestError: one side is too long for the other.
        """


@dataclass(frozen=True)
class Qwen2VLVideoRules(VideoRules):
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


@dataclass(frozen=True)
class Qwen3VLVideoRules(VideoRules):
    """Those of transformers' `Qwen3VLVideoProcessor`: the bounds are those of all frames."""

    def choose(self, total: int, rate: float) -> list[int]:
        count = self.count if self.count is not None else int(total / rate * self.rate)
        if self.count is None:
            count = max(count, self.fewest)
        count = max(min(count, self.most, total), 1)
        return [int(index) for index in np.linspace(0, total - 1, count).round()]

    def size_of(self, width: int, height: int, frames: int) -> tuple[int, int]:
        rules = self.of_frames
        factor = rules.factor
        frames = max(frames, self.frames_at_once)  # the last one is repeated
        if min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) / min(width, height) > LARGEST_RATIO:
            raise RequestError(
                f"frames of {width}x{height} pixels are too narrow: one side may be at most "
                f"{LARGEST_RATIO} times the other; crop them"
            )
        sides = [round(side / factor) * factor for side in (width, height)]
        whole = round(frames / self.frames_at_once) * self.frames_at_once
        volume = whole * sides[0] * sides[1]
        if volume > rules.most:
            scale = math.sqrt(frames * height * width / rules.most)
            sides = [max(1, math.floor(s / scale / factor)) * factor for s in (width, height)]
        elif volume < rules.fewest:
            scale = math.sqrt(rules.fewest / (frames * height * width))
            sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
        return sides[0], sides[1]


FAMILIES: dict[str, type[VideoRules]] = {
    "Qwen2VLVideoProcessor": Qwen2VLVideoRules,
    "Qwen3VLVideoProcessor": Qwen3VLVideoRules,
}
"""By the names of transformers' classes."""


def rules_of_model(settings: ImageSettings) -> VideoRules:
    """The rules of a model.

    Raises:
        EngineStartError: a field is wrong.
    """
    try:
        return FAMILIES[settings.processor].of(settings, {})
    except RequestError as error:
        raise EngineStartError(f"{settings.where}: {error}") from None
