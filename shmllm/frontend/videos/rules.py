"""Which frames of a video are used, and their size: the rules of video processors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from shmllm.errors import EngineStartError, RequestError, nearest
from shmllm.formats.image_settings import ImageSettings
from shmllm.frontend.images.rules.gemma4 import Gemma4Rules
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.qwen2_vl import LARGEST_RATIO, Qwen2VLRules
from shmllm.frontend.images.rules.squares import SquaresRules

LOWEST_RATE, HIGHEST_RATE = 1e-6, 2.0**20
"""The bounds of the frames of a second. Times of frames are finite between them."""


def is_rate(value: Any) -> bool:
    """Whether a value is a supported number of frames of a second."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    return is_number and not isinstance(value, bool) and LOWEST_RATE <= value < HIGHEST_RATE


@dataclass(frozen=True, kw_only=True)
class VideoRules(ABC):
    """The rules of a family with the values of a model and a request. Equal rules make equal frames
    of equal videos, and their `repr` is part of a video's identity.

    Attributes:
        OVERRIDES: the fields that a request may change.
        of_frames: how frames are resized.
        frames_at_once: how many frames become one of the grid.
        samples: whether frames are chosen of those that a user gives with their rate.
        rate: how many frames of a second are used, and what frames without a rate have.
        count: how many frames are used; None: as `rate` says.
    """

    OVERRIDES: ClassVar[frozenset[str]]

    of_frames: SquaresRules
    frames_at_once: int
    samples: bool
    rate: float
    count: int | None

    @classmethod
    def of(cls, settings: ImageSettings, changes: Mapping[str, Any]) -> Self:
        """Reads the fields of a model and those that a request changes.

        Raises:
            RequestError: a name is unknown, or a value is wrong.
        """
        for name in changes:
            if name not in cls.OVERRIDES:
                near = nearest(str(name), cls.OVERRIDES)
                raise RequestError(
                    f"{name!r} is not supported for videos; did you mean {near!r}? Supported are "
                    f"{', '.join(sorted(cls.OVERRIDES))}",
                    parameter="mm_processor_kwargs",
                    value=name,
                )
        if changes.get("fps") is not None and changes.get("num_frames") is not None:
            raise RequestError("'fps' and 'num_frames' exclude each other", parameter="fps")
        values = cls.merged(dict(settings.options), dict(changes))
        options = Options(values)
        rate = options.number("fps")
        if not is_rate(rate):
            raise RequestError(
                f"'fps' must be from {LOWEST_RATE} to {HIGHEST_RATE:,.0f}, not {rate}",
                parameter="fps",
            )
        has_count = values.get("num_frames") is not None and changes.get("fps") is None
        return cls(
            samples=options.flag("do_sample_frames"),
            rate=rate,
            count=options.count("num_frames") if has_count else None,
            **cls._of_family(options),
        )

    @classmethod
    def merged(cls, values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        """The fields of a model with those that a request changes."""
        return values | changes

    @classmethod
    @abstractmethod
    def _of_family(cls, options: Options) -> dict[str, Any]:
        """Reads the attributes that differ by family."""

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


_OF_FRAMES = frozenset({"do_sample_frames", "fps", "num_frames"})


@dataclass(frozen=True, kw_only=True)
class QwenVideoRules(VideoRules):
    """
    Attributes:
        of_frames: its bounds are those of one frame, or of all.
        fewest, most: the bounds of the number of frames.
    """

    OVERRIDES: ClassVar[frozenset[str]] = (
        Qwen2VLRules.OVERRIDES | _OF_FRAMES | {"min_frames", "max_frames"}
    )

    of_frames: Qwen2VLRules
    fewest: int
    most: int

    @classmethod
    def merged(cls, values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        return Qwen2VLRules.merged(values, changes)

    @classmethod
    def _of_family(cls, options: Options) -> dict[str, Any]:
        return {
            "of_frames": Qwen2VLRules.of(options),
            "frames_at_once": options.count("temporal_patch_size"),
            "fewest": options.count("min_frames"),
            "most": options.count("max_frames"),
        }


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
class Qwen3VLVideoRules(QwenVideoRules):
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


@dataclass(frozen=True, kw_only=True)
class Gemma4VideoRules(VideoRules):
    """Those of transformers' `Gemma4VideoProcessor`: each frame has the size of an image, and a
    video that is shorter than `count` says has all of its frames."""

    OVERRIDES: ClassVar[frozenset[str]] = Gemma4Rules.OVERRIDES | _OF_FRAMES

    of_frames: Gemma4Rules

    @classmethod
    def _of_family(cls, options: Options) -> dict[str, Any]:
        return {"of_frames": Gemma4Rules.of(options), "frames_at_once": 1}

    def choose(self, total: int, rate: float) -> list[int]:
        count = self.count if self.count is not None else int(total / rate * self.rate)
        count = max(min(count, total), 1)
        return [index * total // count for index in range(count)]

    def size_of(self, width: int, height: int, frames: int) -> tuple[int, int]:
        return self.of_frames.size_of(width, height)


FAMILIES: dict[str, type[VideoRules]] = {
    "Gemma4VideoProcessor": Gemma4VideoRules,
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
