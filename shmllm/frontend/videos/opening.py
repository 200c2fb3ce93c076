"""Makes videos of what users give: frames, perhaps with what is known of them, or encoded files.

An encoded file is decoded when it is known which of its frames are needed. An error of a video is
one RequestError with the video's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from shmllm.errors import RequestError
from shmllm.extras import install_command
from shmllm.frontend.images.opening import open_image
from shmllm.frontend.videos.rules.family import HIGHEST_RATE, LOWEST_RATE, is_rate

if TYPE_CHECKING:
    from shmllm.frontend.images.picture import Picture

MOST_FRAMES = 2**20
MOST_BYTES = 2**31
"""The most bytes of the frames that a user gives, as pixels."""
MOST_INDEX = 2**31 - 1
"""The largest index of a frame in the video that it is from."""

Choose = Callable[[int, float], Sequence[int]]
"""Returns the indices of the frames that are needed, by the number of all and of those in a second.
They ascend, and may repeat."""

Shrink = Callable[["Picture", int], "Picture"]
"""Returns a frame in the size that is needed; the number is that of all chosen frames."""


@dataclass(frozen=True, slots=True)
class Frames:
    """
    Attributes:
        pictures: RGB images of pillow of one size.
        indices: the index of each in the video that they are from.
        total: the number of frames of that video.
        rate: the frames of its second; None: unknown, and the frames are used as they are.
        is_chosen: whether somebody has chosen them: all are used.
    """

    pictures: Sequence[Picture]
    indices: tuple[int, ...]
    total: int
    rate: float | None
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class EncodedVideo:
    """A video as its file's bytes."""

    data: bytes


def open_video(name: str, value: Any) -> Frames | EncodedVideo:
    """Makes a video of what a user gives.

    Args:
        name: the video's name for messages, such as "prompt 3: video 1".
        value: encoded bytes; frames as a uint8 numpy array or torch tensor of shape [frames,
            height, width, 3] or [frames, 3, height, width], or as a list of images of PIL or
            arrays; or a tuple of frames and vLLM's metadata, a dict with "fps" and perhaps
            "frames_indices", "total_num_frames", "do_sample_frames".

    Raises:
        RequestError: `value` is something else, or cannot be used.
    """
    if isinstance(value, Frames | EncodedVideo):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return open_bytes(name, bytes(value))
    metadata: Any = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metadata = value
    is_array = hasattr(value, "ndim") and hasattr(value, "dtype")
    if not isinstance(value, list | tuple) and not (is_array and value.ndim == 4):
        raise RequestError(
            f"{name} must be frames (an array of shape [frames, height, width, 3], or a list of "
            "images), a tuple of frames and a dict with their 'fps', or encoded bytes, not "
            f"{type(value).__name__}{list(value.shape) if is_array else ''}"
        )
    if not 1 <= len(value) <= MOST_FRAMES:
        raise RequestError(f"{name} has {len(value)} frames; 1 to {MOST_FRAMES:,} are supported")
    pictures = [open_image(f"{name}: frame {i}", each) for i, each in enumerate(value)]
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        raise RequestError(f"{name} has frames of several sizes; make them alike")
    width, height = sizes.pop()
    if 3 * width * height * len(pictures) > MOST_BYTES:
        raise RequestError(f"{name} has more than {MOST_BYTES:,} bytes of pixels; choose frames")
    return _with_metadata(name, pictures, metadata)


def _with_metadata(name: str, pictures: Sequence[Picture], metadata: Mapping[str, Any]) -> Frames:
    rate, count = metadata.get("fps"), len(pictures)
    if rate is not None and not is_rate(rate):
        raise RequestError(
            f"{name}: 'fps' must be the frames of a second, not {_shown(rate)}; from {LOWEST_RATE} "
            f"to {HIGHEST_RATE:,.0f} are supported"
        )
    indices = _indices(metadata.get("frames_indices"), count)
    if indices is None:
        raise RequestError(
            f"{name}: 'frames_indices' must be {count} ascending indices up to {MOST_INDEX:,}"
        )
    total = metadata.get("total_num_frames")
    total = max(count, indices[-1] + 1) if total is None else total
    if not isinstance(total, int | np.integer) or not indices[-1] < total <= MOST_INDEX + 1:
        raise RequestError(
            f"{name}: 'total_num_frames' must be more than the last index, {indices[-1]}, and at "
            f"most {MOST_INDEX + 1:,}, not {_shown(total)}"
        )
    is_whole = total == count and indices == list(range(count))
    is_chosen = metadata.get("do_sample_frames") is False or not is_whole or rate is None
    rate = None if rate is None else float(rate)
    return Frames(pictures, tuple(indices), int(total), rate, is_chosen)


def _indices(given: Any, count: int) -> list[int] | None:
    """The indices of `count` frames, ascending; None: `given` has others."""
    if given is None:
        return list(range(count))
    try:
        found = [index(each) for each in given]
    except TypeError:
        return None
    is_ascending = len(found) == count and sorted(found) == found
    return found if is_ascending and found[0] >= 0 and found[-1] <= MOST_INDEX else None


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "a huge number"
    return text if len(text) < 100 else type(value).__name__


def open_bytes(name: str, data: bytes) -> EncodedVideo:
    """Checks that an encoded video can be read; frames are decoded later.

    Raises:
        RequestError: it has no video, or PyAV is missing.
    """
    if not data:
        raise RequestError(f"{name} is empty (0 bytes)")
    with _Container(name, data):
        return EncodedVideo(data)


def decode(name: str, video: EncodedVideo, choose: Choose, shrink: Shrink) -> Frames:
    """Decodes some frames.

    Args:
        name: what errors call it.
        video: the video.
        choose: see `Choose`.
        shrink: see `Shrink`; large frames are not kept.

    Raises:
        RequestError: it is damaged.
    """
    with _Container(name, video.data) as container:
        total, rate = container.count(), container.rate
    if not total:
        raise RequestError(f"{name} has no frames")
    indices = tuple(choose(total, rate))
    wanted, found = set(indices), {}
    with _Container(name, video.data) as container:
        for place, picture in enumerate(container.pictures(wanted)):
            if picture is not None:
                found[place] = shrink(picture, len(indices))
    pictures = [found[place] for place in indices if place in found]
    if len(pictures) < len(indices):
        raise RequestError(f"{name} is cut off: it has {len(pictures)} of {len(indices)} frames")
    return Frames(pictures, indices, total, rate, True)


class _Container:
    """The first video of a file, whose errors are RequestErrors."""

    def __init__(self, name: str, data: bytes) -> None:
        try:
            import av
        except ImportError:
            raise RequestError(
                f"{name} is an encoded video, for which PyAV is missing: "
                f"{install_command('video')}, or pass its frames"
            ) from None
        self._name = name
        try:
            self._container: Any = av.open(BytesIO(data))
        except Exception as error:
            raise self._error(error) from None
        if not self._container.streams.video:
            self._container.close()
            raise RequestError(f"{name} contains no video; is it damaged or cut off?")
        self._stream = self._container.streams.video[0]
        self._stream.thread_type = "NONE"

    def __enter__(self) -> _Container:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    @property
    def rate(self) -> float:
        """The frames of a second."""
        rate = self._stream.average_rate or self._stream.guessed_rate or 24
        return float(rate) if is_rate(float(rate)) else 24.0

    def count(self) -> int:
        """The number of frames, which few files say reliably."""
        return sum(1 for _ in self._decoded())

    def pictures(self, wanted: set[int]) -> Iterator[Picture | None]:
        """All frames, but None for those that are not wanted."""
        last = max(wanted)
        for place, frame in enumerate(self._decoded()):
            yield self._picture(frame) if place in wanted else None
            if place == last:
                return

    def _picture(self, frame: Any) -> Picture:
        try:
            picture: Picture = frame.to_image()
        except Exception as error:
            raise self._error(error) from None
        return picture

    def _decoded(self) -> Iterator[Any]:
        try:
            for number, frame in enumerate(self._container.decode(self._stream)):
                if number == MOST_FRAMES:
                    raise RequestError(f"{self._name} has more than {MOST_FRAMES:,} frames; cut it")
                yield frame
        except RequestError:
            raise
        except Exception as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> RequestError:
        return RequestError(f"{self._name} cannot be decoded: {error}; is it damaged or cut off?")
