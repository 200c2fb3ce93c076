"""Features are those of transformers' extractor, without the frames that only contain zeros."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from shmllm.formats.audio_settings import FRAMES_BEHIND, WhisperSettings
from shmllm.frontend.audio.features import log_mel

SETTINGS = {
    name: WhisperSettings(rate=16000, num_mels=mels, hop=160, window=400, seconds=seconds)
    for name, mels, seconds in (("small", 16, 3), ("whisper", 80, 3), ("large", 128, 3))
} | {
    "other frames": WhisperSettings(rate=16000, num_mels=20, hop=128, window=512, seconds=2),
}
LENGTHS = [1, 159, 160, 161, 399, 401, 16000, 31999, 47520, 47839, 47999, 48000]


@cache
def extractor(settings: WhisperSettings) -> Any:
    return WhisperFeatureExtractor(
        feature_size=settings.num_mels,
        sampling_rate=settings.rate,
        hop_length=settings.hop,
        chunk_length=settings.most_seconds,
        n_fft=settings.window,
    )


def noise(length: int) -> Any:
    """A tone with noise, louder at its begin: some features reach the lower limit."""
    rng = np.random.default_rng(length)
    samples = rng.standard_normal(length) * np.exp(-np.arange(length) / 2000)
    return (samples / 3 + np.sin(np.arange(length) * 0.3) / 4).astype(np.float32)


def theirs(samples: Any, settings: WhisperSettings, with_torch: bool) -> tuple[Any, int]:
    """The features of all frames, [frames, mels], and how many are not masked."""
    found = extractor(settings)(
        samples, sampling_rate=settings.rate, return_attention_mask=True, return_tensors="np"
    )
    kind = extractor(settings)
    whole = np.zeros(settings.most_samples, np.float32)
    whole[: len(samples)] = samples
    extract = kind._torch_extract_fbank_features if with_torch else kind._np_extract_fbank_features
    features = extract(whole[None], "cpu")[0].T
    np.testing.assert_allclose(found["input_features"][0].T, features, rtol=0, atol=1e-4)
    return features, int(found["attention_mask"].sum())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["small", "large"])
def test_features_equal_transformers(name: str, length: int) -> None:
    settings = SETTINGS[name]
    samples = noise(length)
    ours = log_mel(samples, settings)
    for with_torch, tolerance in ((False, 1e-6), (True, 1e-4)):
        expected, count = theirs(samples, settings, with_torch)
        assert settings.count_frames(length) == count
        assert ours.shape == (min(count + FRAMES_BEHIND, settings.most_frames), settings.num_mels)
        np.testing.assert_allclose(ours, expected[: len(ours)], rtol=0, atol=tolerance)
    assert ours.dtype == np.float32
    assert ours.flags.c_contiguous


@pytest.mark.parametrize("length", [1, 100, 8000, 15899, 15999, 16000])
@pytest.mark.parametrize("name", ["whisper", "other frames"])
def test_other_settings_equal_transformers(name: str, length: int) -> None:
    settings = SETTINGS[name]
    samples = noise(length)
    expected, count = theirs(samples, settings, False)
    ours = log_mel(samples, settings)
    assert settings.count_frames(length) == count
    assert len(ours) == min(count + FRAMES_BEHIND, settings.most_frames)
    np.testing.assert_allclose(ours, expected[: len(ours)], rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [24001, 479_999, 480_000])
def test_the_sizes_of_real_models_equal_transformers(length: int) -> None:
    settings = WhisperSettings(rate=16000, num_mels=128, hop=160, window=400, seconds=30)
    samples = noise(length)
    expected, count = theirs(samples, settings, False)
    ours = log_mel(samples, settings)
    assert len(ours) == min(count + FRAMES_BEHIND, 3000)
    np.testing.assert_allclose(ours, expected[: len(ours)], rtol=0, atol=1e-6)


@pytest.mark.parametrize("samples", [np.zeros(1000), np.ones(1000), np.full(1000, 1e-9)])
def test_silence_and_constants_equal_transformers(samples: Any) -> None:
    settings = SETTINGS["small"]
    samples = samples.astype(np.float32)
    expected, _ = theirs(samples, settings, False)
    ours = log_mel(samples, settings)
    np.testing.assert_allclose(ours, expected[: len(ours)], rtol=0, atol=1e-6)


def test_frames_left_out_hold_only_the_lowest_feature() -> None:
    settings = SETTINGS["small"]
    samples = noise(1000)
    expected, count = theirs(samples, settings, False)
    behind = expected[count + FRAMES_BEHIND :]
    assert (behind == behind.min()).all()
    assert log_mel(samples, settings).min() == pytest.approx(behind.min(), abs=1e-6)
