"""What users give becomes frames; what cannot is one error with the video's name."""

from __future__ import annotations

import builtins
import random
import wave
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shmllm.errors import RequestError
from shmllm.frontend.videos import opening
from shmllm.frontend.videos.opening import EncodedVideo, Frames, decode, open_bytes, open_video

NAME = "prompt 3: video 1"
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 10, 12, 3), dtype=np.uint8)


def every(total: int, rate: float) -> list[int]:
    return list(range(total))


def opened(value: Any) -> Frames:
    found = open_video(NAME, value)
    assert isinstance(found, Frames)
    return found


def decoded(data: bytes, choose: Any = every) -> Frames:
    return decode(NAME, open_bytes(NAME, data), choose, lambda picture, count: picture)


def values_of(frames: Frames) -> list[int]:
    """A value of the middle of each frame."""
    return [picture.getpixel((24, 16))[0] for picture in frames.pictures]  # type: ignore[index]


FORMS: dict[str, Any] = {
    "an array": PIXELS,
    "an array of channels first": np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2)),
    "a strided array": np.repeat(PIXELS, 2, axis=0)[::2],
    "a tensor": torch.from_numpy(PIXELS.copy()),
    "a tensor of channels first": torch.from_numpy(PIXELS.copy()).permute(0, 3, 1, 2),
    "images": [Image.fromarray(each) for each in PIXELS],
    "arrays": list(PIXELS),
    "tensors": [torch.from_numpy(each.copy()) for each in PIXELS],
    "a tuple of images": tuple(Image.fromarray(each) for each in PIXELS),
    "several": [PIXELS[0], Image.fromarray(PIXELS[1]), *PIXELS[2:]],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_rate", [False, True])
def test_frames_of_each_form_are_the_same(form: str, with_rate: bool) -> None:
    given = (FORMS[form], {"fps": 5}) if with_rate else FORMS[form]
    found = opened(given)
    assert [np.asarray(each).tolist() for each in found.pictures] == PIXELS.tolist()
    assert (found.indices, found.total) == ((0, 1, 2, 3), 4)
    assert (found.rate, found.is_chosen) == ((5, False) if with_rate else (None, True))
    assert open_video(NAME, found) is found


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, ((0, 1, 2, 3), 4, None, True)),
        ({"fps": None}, ((0, 1, 2, 3), 4, None, True)),
        ({"fps": 2.5, "duration": 3, "video_backend": "x"}, ((0, 1, 2, 3), 4, 2.5, False)),
        ({"fps": np.float32(2)}, ((0, 1, 2, 3), 4, 2.0, False)),
        ({"fps": 2, "do_sample_frames": False}, ((0, 1, 2, 3), 4, 2, True)),
        ({"fps": 2, "do_sample_frames": True}, ((0, 1, 2, 3), 4, 2, False)),
        (
            {"fps": 9, "frames_indices": [0, 3, 6, 9], "total_num_frames": 12},
            ((0, 3, 6, 9), 12, 9, True),
        ),
        ({"fps": 9, "frames_indices": np.array([0, 3, 3, 5])}, ((0, 3, 3, 5), 6, 9, True)),
        ({"fps": 9, "total_num_frames": 4}, ((0, 1, 2, 3), 4, 9, False)),
    ],
)
def test_metadata_say_which_frames_they_are(metadata: Any, expected: Any) -> None:
    found = opened((PIXELS, metadata))
    assert (found.indices, found.total, found.rate, found.is_chosen) == expected


WRONG: dict[str, tuple[Any, str]] = {
    "no frames": ([], r"has 0 frames; 1 to 1,048,576 are supported"),
    "an empty array": (PIXELS[:0], "has 0 frames"),
    "no pixels": (PIXELS[:, :0], "frame 0 has no pixels"),
    "several sizes": ([PIXELS[0], PIXELS[1, :9]], "has frames of several sizes; make them alike"),
    "an image": (PIXELS[0], r"must be frames .* not ndarray\[10, 12, 3\]"),
    "a picture": (Image.new("RGB", (4, 4)), "must be frames .* not Image"),
    "floats": (PIXELS.astype(np.float32), "frame 0: pixels must be uint8"),
    "four channels": (np.zeros((2, 5, 6, 4), np.uint8), "frame 0"),
    "a text": ("video.mp4", "must be frames .* not str"),
    "None": (None, "not NoneType"),
    "a list of texts": (["a.png"], "frame 0 must be an image of PIL"),
    "a dict": ({"fps": 2}, "not dict"),
    "no bytes": (b"", r"is empty \(0 bytes\)"),
    "other bytes": (b"this is no video at all" * 9, "cannot be decoded: .*damaged or cut off"),
}
METADATA: dict[str, tuple[Any, str]] = {
    **{
        f"fps {str(fps)[:5]}": ({"fps": fps}, "'fps' must be the frames of a second, not")
        for fps in (0, -1, float("nan"), float("inf"), True, "24", [24], 10**400, 1e-300)
    },
    "fewer": ({"frames_indices": [0, 1]}, "'frames_indices' must be 4 ascending indices"),
    "more": ({"frames_indices": [0, 1, 2, 3, 4]}, "must be 4 ascending indices"),
    "none": ({"frames_indices": []}, "must be 4 ascending indices"),
    "descending": ({"frames_indices": [0, 2, 1, 3]}, "must be 4 ascending indices"),
    "negative": ({"frames_indices": [-1, 0, 1, 2]}, "must be 4 ascending indices"),
    "huge": ({"frames_indices": [0, 1, 2, 10**400]}, "must be 4 ascending indices up to 2,147"),
    "a text": ({"frames_indices": "abcd"}, "'frames_indices' must be 4 ascending indices"),
    "Nones": ({"frames_indices": [None] * 4}, "'frames_indices' must be 4 ascending indices"),
    "a number": ({"frames_indices": 3}, "'frames_indices' must be 4 ascending indices"),
    "a total of text": ({"total_num_frames": "x"}, "'total_num_frames' must be"),
    "a huge total": ({"total_num_frames": 10**400, "fps": 2}, "'total_num_frames' must be"),
    "a negative total": ({"total_num_frames": -4}, "'total_num_frames' must be"),
    "a small total": ({"total_num_frames": 2, "fps": 2}, "'total_num_frames' must be"),
    "indices behind the total": (
        {"total_num_frames": 6, "frames_indices": [0, 1, 2, 6]},
        "'total_num_frames' must be",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_video_is_refused_with_its_name(case: str) -> None:
    value, message = WRONG[case]
    with pytest.raises(RequestError, match=message) as raised:
        open_video(NAME, value)
    assert str(raised.value).startswith(NAME)


@pytest.mark.parametrize("case", METADATA)
def test_wrong_metadata_are_refused(case: str) -> None:
    metadata, message = METADATA[case]
    with pytest.raises(RequestError, match=message) as raised:
        open_video(NAME, (PIXELS, metadata))
    assert str(raised.value).startswith(NAME)


def test_more_pixels_than_memory_should_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "MOST_BYTES", PIXELS.nbytes)
    opened(PIXELS)
    monkeypatch.setattr(opening, "MOST_BYTES", PIXELS.nbytes - 1)
    with pytest.raises(RequestError, match=f"{NAME} has more than 1,439 bytes of pixels"):
        open_video(NAME, PIXELS)


@pytest.mark.parametrize(
    ("form", "codec"), [("mp4", "mpeg4"), ("avi", "mpeg4"), ("matroska", "ffv1")]
)
def test_an_encoded_video_has_its_frames_in_order(
    form: str, codec: str, encoded: Callable[..., bytes]
) -> None:
    data = encoded(6, 8, form, codec)
    for given in (data, bytearray(data), memoryview(data)):
        assert open_video(NAME, given) == EncodedVideo(data)
    found = decoded(data)
    assert (found.total, found.rate, found.is_chosen) == (6, 8.0, True)
    assert found.indices == tuple(range(6))
    assert values_of(found) == pytest.approx([0, 40, 80, 120, 160, 200], abs=4)
    assert {(each.mode, each.size) for each in found.pictures} == {("RGB", (48, 32))}


def test_only_frames_that_are_chosen_are_kept(encoded: Callable[..., bytes]) -> None:
    asked = []

    def choose(total: int, rate: float) -> list[int]:
        asked.append((total, rate))
        return [1, 1, 4]

    found = decoded(encoded(6, 12), choose)
    assert asked == [(6, 12.0)]
    assert found.indices == (1, 1, 4)
    assert found.total == 6
    assert values_of(found) == pytest.approx([40, 40, 160], abs=4)


def test_a_frame_behind_the_last_is_one_error(encoded: Callable[..., bytes]) -> None:
    with pytest.raises(RequestError, match=f"^{NAME} is cut off: it has 1 of 2 frames"):
        decoded(encoded(3), lambda total, rate: [0, total])


def test_a_video_of_too_many_frames_is_refused(
    encoded: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "MOST_FRAMES", 5)
    with pytest.raises(RequestError, match=f"^{NAME} has more than 5 frames; cut it"):
        decoded(encoded(6))


def test_a_sound_is_no_video() -> None:
    file = BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(1600))
    with pytest.raises(RequestError, match=f"^{NAME} contains no video"):
        open_bytes(NAME, file.getvalue())


def test_a_file_that_is_cut_off_is_refused(encoded: Callable[..., bytes]) -> None:
    data = encoded(6)
    with pytest.raises(RequestError, match=f"^{NAME} .*is it damaged or cut off"):
        open_bytes(NAME, data[: len(data) // 2])


def test_without_pyav_it_says_how_to_install_it(
    encoded: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, known = encoded(2), builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "av":
            raise ImportError(name)
        return known(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(RequestError, match=rf"^{NAME} .* PyAV is missing: pip install "):
        open_bytes(NAME, data)
    opened(PIXELS)


@pytest.mark.parametrize("form", ["mp4", "avi"])
def test_damaged_files_are_frames_or_one_error_with_the_name(
    form: str, encoded: Callable[..., bytes]
) -> None:
    data = encoded(8, form=form)
    draw = random.Random(form)
    refused = []
    for case in range(60):
        if case % 6 == 0:
            damaged = bytearray(draw.randbytes(draw.randint(1, 900)))
        else:
            whole = case % 2
            damaged = bytearray(data if whole else data[: draw.randint(1, len(data))])
            for _ in range(draw.randint(0, 12)):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            found = decoded(bytes(damaged))
        except RequestError as error:
            refused.append(str(error))
        else:
            assert len(found.pictures) == len(found.indices) == found.total
    assert all(message.startswith(NAME) for message in refused)
    assert 15 < len(refused) < 60


def test_nothing_is_decoded_behind_the_last_frame(
    encoded: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond counting, which decodes all."""
    num_decoded, known = 0, opening._Container._decoded

    def counted(self: Any) -> Any:
        nonlocal num_decoded
        for frame in known(self):
            num_decoded += 1
            yield frame

    monkeypatch.setattr(opening._Container, "_decoded", counted)
    decoded(encoded(6), lambda total, rate: [0, 1])
    assert num_decoded == 6 + 2
