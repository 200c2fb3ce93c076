"""What users give becomes sounds of one channel; what cannot is one error with the sound's name."""

from __future__ import annotations

import io
import random
import struct
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from shmllm.errors import RequestError
from shmllm.frontend.audio import decoding, sound
from shmllm.frontend.audio.decoding import open_bytes
from shmllm.frontend.audio.opening import open_audio
from shmllm.frontend.audio.sound import Sound

NAME = "prompt 3: audio 1"
WAVE = np.sin(np.arange(700) * 0.2).astype(np.float32) / 2
OTHER = np.cos(np.arange(700) * 0.1).astype(np.float32) / 4


def encoded(samples: Any, rate: int = 8000, form: str = "WAV", **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, **options)
    return file.getvalue()


def refusal(value: Any) -> str:
    """The message of the one error that a value is refused with, without the sound's name."""
    with pytest.raises(RequestError) as info:
        open_audio(NAME, value, 16000)
    message = str(info.value)
    assert message.startswith(NAME)
    return message.removeprefix(NAME)


def assert_sound(found: Sound, samples: Any, rate: int, tolerance: float = 0.0) -> None:
    assert found.rate == rate
    assert found.samples.dtype == np.float32
    assert found.samples.flags.c_contiguous
    np.testing.assert_allclose(found.samples, samples, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "value",
    [
        WAVE,
        WAVE.astype(np.float64),
        np.repeat(WAVE, 2)[::2],
        torch.from_numpy(WAVE),
        torch.from_numpy(WAVE).requires_grad_(),
        WAVE.tolist(),
        (WAVE, 16000),
        (WAVE.tolist(), 16000.0),
        (torch.from_numpy(WAVE), np.int64(16000)),
        Sound(WAVE, 16000),
    ],
)
def test_floating_point_samples_stay_as_they_are(value: Any) -> None:
    assert_sound(open_audio(NAME, value, 16000), WAVE, 16000)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.array([-32768, 0, 16384], np.int16), [-1, 0, 0.5]),
        (np.array([-(2**31), 0, 2**30], np.int32), [-1, 0, 0.5]),
        (np.array([0, 128, 192], np.uint8), [-1, 0, 0.5]),
        (torch.tensor([-32768, 0, 16384], dtype=torch.int16), [-1, 0, 0.5]),
        (np.array([0.5, -2], np.float16), [0.5, -2]),
    ],
)
def test_the_largest_integer_of_a_type_stands_for_one(samples: Any, expected: Any) -> None:
    assert_sound(open_audio(NAME, samples, 16000), expected, 16000)


def test_a_rate_beside_samples_takes_the_place_of_the_models() -> None:
    assert open_audio(NAME, WAVE, 16000).rate == 16000
    assert open_audio(NAME, (WAVE, 8000), 16000).rate == 8000
    assert open_audio(NAME, (WAVE, 8000), 16000).seconds == 700 / 8000


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, lambda value: value.tolist()])
@pytest.mark.parametrize("first", [False, True])
def test_channels_are_averaged_wherever_they_are(kind: Any, first: bool) -> None:
    channels = np.stack([WAVE, OTHER], 0 if first else 1)
    expected = (WAVE.astype(np.float64) + OTHER) / 2
    assert_sound(open_audio(NAME, kind(channels), 16000), expected, 16000, 1e-7)


def test_channels_of_integers_are_averaged() -> None:
    channels = np.array([[0, 16384], [32767, 32767], [-32768, 32767]], np.int16)
    expected = [0.25, 32767 / 32768, -1 / 65536]
    assert_sound(open_audio(NAME, channels, 16000), expected, 16000, 1e-7)


def test_bfloat16_is_read() -> None:
    half = torch.tensor([0.5, -0.25], dtype=torch.bfloat16)
    assert_sound(open_audio(NAME, half, 16000), [0.5, -0.25], 16000)


def test_one_channel_is_itself() -> None:
    assert_sound(open_audio(NAME, WAVE[:, None], 16000), WAVE, 16000)
    assert_sound(open_audio(NAME, WAVE[None], 16000), WAVE, 16000)


@pytest.mark.parametrize(
    ("form", "subtype", "tolerance"),
    [
        ("WAV", "FLOAT", 0),
        ("WAV", "PCM_16", 2**-15),
        ("WAV", "PCM_24", 2**-23),
        ("WAV", "PCM_U8", 2**-7),
        ("FLAC", "PCM_16", 2**-15),
        ("OGG", "VORBIS", 0.06),
    ],
)
@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_encoded_sounds_are_decoded_with_their_rate(
    form: str, subtype: str, tolerance: float, buffer: Any
) -> None:
    data = encoded(np.stack([WAVE, OTHER], 1), 8000, form, subtype=subtype)
    assert_sound(open_audio(NAME, buffer(data), 16000), (WAVE + OTHER) / 2, 8000, tolerance)


def test_mp3_is_decoded() -> None:
    wave = np.sin(np.arange(8000) * 0.2).astype(np.float32) / 2
    found = open_bytes(NAME, encoded(wave, 16000, "MP3"))
    assert found.rate == 16000
    assert abs(len(found.samples) - len(wave)) < 2400
    spectrum = np.abs(np.fft.rfft(found.samples, 8000))
    assert abs(int(spectrum.argmax()) - 0.2 * 8000 / (2 * np.pi)) < 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", " is empty (0 bytes)"),
        (b"no sound", " has an unknown format or a damaged header; known are WAV, FLAC"),
        (None, " must be samples as a numpy array, torch tensor or list"),
        ("sound.wav", " must be samples as a numpy array, torch tensor or list"),
        ((WAVE, 8000, 1), " must be a pair (samples, rate), not 3 values"),
        ((b"RIFF", 8000), " must be samples as a numpy array, torch tensor or list"),
        ([], " has no samples"),
        (np.zeros(0, np.float32), " has no samples"),
        (["a"], " does not consist of samples: "),
        ([[1.0], [1.0, 2.0]], " does not consist of samples: "),
        (np.array([True]), ": samples must be floats, or PCM"),
        (np.array([1j]), ": samples must be floats, or PCM"),
        (np.zeros(3, np.int8), ": samples must be floats, or PCM"),
        (np.float32(1), ": samples must have the shape [time], "),
        (np.zeros((2, 2, 2)), ": samples must have the shape [time], "),
        (np.zeros((40, 33)), ": samples of shape [40, 33] have 33 channels, more than 32"),
        (np.zeros((5, 0)), " has no samples: its shape is [5, 0]"),
        (torch.zeros(9, device="meta"), ": the samples cannot be read: "),
        ([0.0, float("nan")], ": samples must be finite numbers"),
        ([0.0, float("-inf")], ": samples must be finite numbers"),
        (np.array([1e39]), ": samples must be finite numbers"),
    ],
)
def test_what_is_no_sound_is_refused(value: Any, message: str) -> None:
    assert refusal(value).startswith(message)


@pytest.mark.parametrize(
    "rate", [0, -8000, 1_000_001, 8000.5, float("nan"), float("inf"), "8000", None, True, [8000]]
)
def test_what_is_no_rate_is_refused(rate: Any) -> None:
    assert refusal((WAVE, rate)).startswith(": the sampling rate must be a whole number of Hz")


def test_samples_beyond_the_most_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both = np.stack([WAVE, OTHER], 1)
    for module in (sound, decoding):
        monkeypatch.setattr(module, "MOST_SAMPLES", 699)
    for value in (both, encoded(both)):
        assert refusal(value).startswith(" has 700 samples (")
        assert refusal(value).endswith("more than 699; cut it")
    for module in (sound, decoding):
        monkeypatch.setattr(module, "MOST_SAMPLES", 700)
    assert len(open_audio(NAME, both, 16000).samples) == 700


def test_a_files_rate_and_samples_are_checked() -> None:
    assert refusal(encoded(np.zeros((0, 1)))) == " has no samples"
    assert refusal(encoded(WAVE, 2**21)).startswith(": the sampling rate must be")
    assert "are not finite" in refusal(encoded([0.0, float("nan")], subtype="FLOAT"))


def test_files_that_are_cut_off_are_refused() -> None:
    for form, subtype in (("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16")):
        data = encoded(WAVE, form=form, subtype=subtype)
        for part in (0.2, 0.5, 0.9):
            assert "cut off" in refusal(data[: int(len(data) * part)])


def test_a_header_that_claims_more_than_there_is_takes_no_memory() -> None:
    data = bytearray(encoded(WAVE, subtype="PCM_16"))
    place = data.index(b"data") + 4
    data[place : place + 4] = struct.pack("<I", 2**31)
    found = open_bytes(NAME, bytes(data))
    assert_sound(found, WAVE, 8000, 2**-15)


def opened(data: bytes) -> Sound | None:
    """The sound; None if it is refused, with its name. Any other error fails the test."""
    try:
        return open_bytes(NAME, data)
    except RequestError as error:
        return None if str(error).startswith(NAME) else pytest.fail(f"no name: {error}")


def test_damaged_files_are_refused_or_finite() -> None:
    rng = random.Random(3)
    both = np.stack([WAVE, OTHER], 1)
    sources = [
        encoded(WAVE[:300], subtype="PCM_16"),
        encoded(both[:200], subtype="FLOAT"),
        encoded(both[:100], form="FLAC"),
    ]
    num_refused = 0
    for case in range(300):
        data = bytearray(sources[case % 3])
        if case % 4 == 0:
            data = data[: rng.randrange(len(data))]
        elif case % 4 == 1:
            data = bytearray(rng.randbytes(rng.randrange(1, 200)))
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(min(len(data), 100))] ^= 1 << rng.randrange(8)
        found = opened(bytes(data))
        if found is None:
            num_refused += 1
            continue
        assert len(found.samples) > 0, f"case {case}"
        assert np.isfinite(found.samples).all(), f"case {case}"
        assert found.samples.dtype == np.float32, f"case {case}"
    assert 75 < num_refused < 290
