"""What the rules of all families have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from shmllm.errors import RequestError, nearest
from shmllm.formats.image_settings import ImageSettings
from shmllm.frontend.images.picture import Picture
from shmllm.frontend.images.rules.family import Rules
from shmllm.frontend.images.rules.options import Options
from shmllm.frontend.images.rules.qwen2_vl import LARGEST_RATIO
from shmllm.frontend.images.rules.squares import BoundedRules, SquaresRules
from shmllm.params.items import MOST_ITEM_BYTES

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
        FRAMES: the class of `of_frames`.
        OVERRIDES: the fields that a request may change.
        of_frames: how frames are resized.
        frames_at_once: how many frames become one of the grid.
        samples: whether frames are chosen of those that a user gives with their rate.
        rate: how many frames of a second are used, and what frames without a rate have.
    """

    FRAMES: ClassVar[type[Rules]]
    OVERRIDES: ClassVar[frozenset[str]]

    of_frames: Rules
    frames_at_once: int
    samples: bool
    rate: float

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
        options = Options(cls.FRAMES.merged(dict(settings.options), dict(changes)))
        rate = options.number("fps")
        if not is_rate(rate):
            raise RequestError(
                f"'fps' must be from {LOWEST_RATE} to {HIGHEST_RATE:,.0f}, not {rate}",
                parameter="fps",
            )
        return cls(
            of_frames=cls.FRAMES.of(options),
            frames_at_once=options.count("temporal_patch_size"),
            samples=options.flag("do_sample_frames"),
            rate=rate,
            **cls._further(options, changes),
        )

    @classmethod
    @abstractmethod
    def _further(cls, options: Options, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the fields of a family. Arguments and errors are those of `of`, but `options` has
        what a request changes."""

    @abstractmethod
    def choose(self, total: int, rate: float) -> list[int]:
        """The indices of the frames that are used of a video.

        Args:
            total: how many frames it has.
            rate: those of a second.
        """

    @abstractmethod
    def fitted(self, picture: Picture, frames: int) -> Picture:
        """A frame in the model's size.

        Args:
            picture: the frame.
            frames: how many are used.

        Raises:
            RequestError: its size does not suit the settings, or so many become too many bytes.
        """

    @abstractmethod
    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of a frame of the grid, by the sides of a frame in pixels."""

    @abstractmethod
    def time_text(self, first_s: float, last_s: float) -> str:
        """What a prompt says of the time of a frame of the grid.

        Args:
            first_s: the second of the first frame that becomes one of the grid.
            last_s: the second of the last one.
        """


def checked_size(width: int, height: int, frames: int) -> tuple[int, int]:
    """Returns width and height of so many frames.

    Raises:
        RequestError: they are too many bytes.
    """
    if (num_bytes := 3 * width * height * frames) > MOST_ITEM_BYTES:
        raise RequestError(
            f"{frames:,} frames of {width}x{height} pixels are {num_bytes:,} bytes, more than "
            f"{MOST_ITEM_BYTES:,}: use fewer, or make them smaller by mm_processor_kwargs"
        )
    return width, height


@dataclass(frozen=True, kw_only=True)
class SquaresVideoRules(VideoRules):
    """Frames have any size, as images of the model."""

    FRAMES: ClassVar[type[SquaresRules]]

    of_frames: SquaresRules

    @abstractmethod
    def size_of(self, width: int, height: int, frames: int) -> tuple[int, int]:
        """Width and height of the resized frames.

        Args:
            width, height: of a frame.
            frames: how many are used.

        Raises:
            RequestError: one side is too long for the other.
        """

    def fitted(self, picture: Picture, frames: int) -> Picture:
        def size_of(width: int, height: int) -> tuple[int, int]:
            return checked_size(*self.size_of(width, height, frames), frames)

        return self.of_frames.fitted(picture, size_of)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        patch = self.of_frames.patch_size
        return height // patch, width // patch


@dataclass(frozen=True, kw_only=True)
class EvenVideoRules(VideoRules):
    """Frames lie evenly in a video, as those of transformers' `BaseVideoProcessor`. A video that is
    shorter than `count` says has all of its frames.

    Attributes:
        count: how many frames are used; None: as `rate` says.
    """

    count: int | None

    @classmethod
    def _further(cls, options: Options, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {"count": read_count(options, changes)}

    def choose(self, total: int, rate: float) -> list[int]:
        count = self.count if self.count is not None else int(total / rate * self.rate)
        count = max(min(count, total), 1)
        return [index * total // count for index in range(count)]


def read_count(options: Options, changes: Mapping[str, Any]) -> int | None:
    """How many frames are used; None: as a rate says.

    Raises:
        RequestError: a request says both.
    """
    has_rate = changes.get("fps") is not None
    if has_rate and changes.get("num_frames") is not None:
        raise RequestError("'fps' and 'num_frames' exclude each other", parameter="fps")
    has_count = options.values.get("num_frames") is not None and not has_rate
    return options.count("num_frames") if has_count else None


class BoundedTogether(SquaresVideoRules):
    """The bounds of pixels are those of all frames."""

    of_frames: BoundedRules

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
