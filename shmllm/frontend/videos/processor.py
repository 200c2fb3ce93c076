"""Videos of one model: what becomes of their frames.

`VideoProcessor` must not know where videos come from and how they reach the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from shmllm.errors import RequestError
from shmllm.formats.image_settings import ImageSettings
from shmllm.formats.processor_files import missing_settings
from shmllm.formats.video_settings import read_video_settings
from shmllm.frontend.images.picture import Picture, pixels_of
from shmllm.frontend.items.prepared import PreparedItem
from shmllm.frontend.items.processor import NO_OVERRIDES, ItemProcessor
from shmllm.frontend.placeholders.family import VideoPlaceholder
from shmllm.frontend.videos.chosen_frames import ChosenFrames
from shmllm.frontend.videos.opening import EncodedVideo, Frames, decode, open_video
from shmllm.frontend.videos.rules.family import VideoRules
from shmllm.frontend.videos.rules.registry import FAMILIES, rules_of_model

_SOUND = "use_audio_in_video"
"""Whether the sound of a video lies between its frames, in `mm_processor_kwargs` of vLLM."""


class VideoProcessor(ItemProcessor[Frames | EncodedVideo]):
    """
    Args:
        settings: those of the model's video processor.
        placeholder: what stands for a video in a prompt.

    Attributes:
        chosen: which frames of encoded videos are used; None: those of the model's rules.

    Raises:
        EngineStartError: the settings are not supported, or do not suit the model.
    """

    def __init__(self, settings: ImageSettings, placeholder: VideoPlaceholder) -> None:
        super().__init__(placeholder)
        self._settings = settings
        self._rules = rules_of_model(settings)
        placeholder.check_rules(self._rules)
        self._count = placeholder.count
        self.chosen: ChosenFrames | None = None

    @classmethod
    def of_model(cls, directory: Path, placeholder: VideoPlaceholder) -> Self:
        own = placeholder.own_settings
        settings = read_video_settings(directory, placeholder.processors, own)
        if settings is None:
            raise missing_settings("videos", directory)
        return cls(settings, placeholder)

    @property
    def known_overrides(self) -> frozenset[str]:
        return self._rules.OVERRIDES | {_SOUND}

    def open(self, name: str, value: Any) -> Frames | EncodedVideo:
        return open_video(name, value)

    def size(self, opened: Frames | EncodedVideo) -> tuple[int, ...]:
        if isinstance(opened, EncodedVideo):
            return (len(opened.data),)
        return (len(opened.pictures), *opened.pictures[0].size)

    def identity(
        self,
        opened: Frames | EncodedVideo,
        overrides: Mapping[str, Any] = NO_OVERRIDES,
        name: str = "the video",
    ) -> bytes:
        """Versions of the libraries are part of it, as others may make other bits."""
        import PIL

        rules, settings = self._rules_for(overrides, name), self._settings
        table = (settings.do_rescale, settings.rescale_factor, settings.do_normalize)
        kind = (rules, self.chosen, table, settings.mean, settings.std, PIL.__version__)
        digest = hashlib.sha256(hashlib.sha256(repr(kind).encode()).digest())
        if isinstance(opened, EncodedVideo):
            import av

            digest.update(av.__version__.encode() + b"\0")
            digest.update(opened.data)
            return digest.digest()
        facts = opened.indices, opened.total, opened.rate, opened.is_chosen
        digest.update(repr((facts, opened.pictures[0].size)).encode() + b"\0")
        for picture in opened.pictures:
            digest.update(picture.tobytes())
        return digest.digest()

    def prepare(
        self,
        opened: Frames | EncodedVideo,
        overrides: Mapping[str, Any] = NO_OVERRIDES,
        name: str = "the video",
    ) -> PreparedItem:
        rules = self._rules_for(overrides, name)
        shrink = partial(_shrunk, name, rules)
        if isinstance(opened, EncodedVideo):
            chosen = rules if self.chosen is None else self.chosen
            frames = decode(name, opened, chosen.choose, shrink)
            shrunk = [*frames.pictures]
        else:
            frames = _chosen(opened, rules)
            shrunk = [shrink(each, len(frames.pictures)) for each in frames.pictures]
        step = rules.frames_at_once
        behind = -len(shrunk) % step  # the last frame is repeated
        pictures = shrunk + [shrunk[-1]] * behind
        indices = [*frames.indices, *[frames.indices[-1]] * behind]
        pixels = np.stack([pixels_of(each) for each in pictures])
        pixels.flags.writeable = False
        grid = (len(pictures) // step, *rules.grid_of(*pixels.shape[1:3]))
        rate = frames.rate or rules.rate
        firsts, lasts = indices[::step], indices[step - 1 :: step]
        times = tuple(
            rules.time_text(a / rate, b / rate) for a, b in zip(firsts, lasts, strict=True)
        )
        used = len(frames.indices) / frames.total * rate  # frames of a second that are used
        return PreparedItem(pixels, grid, self._count(grid), step / used, times)

    def _rules_for(self, overrides: Mapping[str, Any], name: str) -> VideoRules:
        if overrides.get(_SOUND):
            raise RequestError(
                f"{name}: mm_processor_kwargs: {_SOUND!r} is not supported: pass the sound of a "
                "video as audio, with a mark of its own",
                parameter="mm_processor_kwargs",
                value=_SOUND,
            )
        overrides = {key: value for key, value in overrides.items() if key != _SOUND}
        if not overrides:
            return self._rules
        try:
            return FAMILIES[self._settings.processor].of(self._settings, overrides)
        except RequestError as error:
            message = f"{name}: mm_processor_kwargs: {error}"
            raise RequestError(message, parameter=error.parameter) from None


def _chosen(frames: Frames, rules: VideoRules) -> Frames:
    """The frames that are used of those that a user gives."""
    if frames.is_chosen or frames.rate is None or not rules.samples:
        return frames
    indices = tuple(rules.choose(frames.total, frames.rate))
    pictures = [frames.pictures[index] for index in indices]
    return Frames(pictures, indices, frames.total, frames.rate, True)


def _shrunk(name: str, rules: VideoRules, picture: Picture, count: int) -> Picture:
    """A frame in the model's size.

    Raises:
        RequestError: its size does not suit the settings, or so many become too many bytes.
    """

    try:
        return rules.fitted(picture, count)
    except RequestError as error:
        raise RequestError(f"{name}: {error}", parameter=error.parameter) from None
