"""Gemma 4's features have the bits of transformers' extractor, without the frames that it masks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from shmllm.errors import EngineStartError
from shmllm.formats.audio_readers import read_audio_settings
from shmllm.formats.audio_settings import Gemma4AudioSettings
from shmllm.frontend.audio.gemma4_features import log_mel

OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "other frames": {"frame_length_ms": 25.0, "hop_length_ms": 8, "feature_size": 40},
    "another rate": {"sampling_rate": 22_050, "min_frequency": 100.0, "max_frequency": 7000},
    "floor": {"mel_floor": 0.1, "feature_size": 16},
}
LENGTHS = [161, 320, 321, 480, 481, 482, 5000, 15_999, 16_000, 16_001, 16_160]


def read(directory: Any, extractor: Any, **changes: Any) -> Any:
    fields = json.loads(extractor.to_json_string()) | changes
    (directory / "processor_config.json").write_text(json.dumps({"feature_extractor": fields}))
    return read_audio_settings(directory)


def fields_of(options: dict[str, Any]) -> dict[str, Any]:
    """What transformers reads and does not write."""
    return {name: value for name, value in options.items() if name.endswith("_ms")}


def noise(length: int) -> Any:
    rng = np.random.default_rng(length)
    return (rng.standard_normal(length) * np.exp(-np.arange(length) / 3000)).astype(np.float32)


@pytest.mark.parametrize("name", OPTIONS)
def test_features_have_the_bits_of_transformers(name: str, tmp_path: Any) -> None:
    extractor = Gemma4AudioFeatureExtractor(**OPTIONS[name])
    settings = read(tmp_path, extractor, **fields_of(OPTIONS[name]))
    for length in LENGTHS:
        found = extractor([noise(length)], return_tensors="np")
        count = int(found["input_features_mask"][0].sum())
        ours = log_mel(noise(length), settings)
        assert ours.shape == (count, settings.num_mels)
        assert settings.count_frames(length) == count
        assert np.array_equal(ours, found["input_features"][0][:count])
        assert ours.dtype == np.float32
        assert ours.flags.c_contiguous


def test_a_sound_that_is_too_short_has_no_frame(tmp_path: Any) -> None:
    settings = read(tmp_path, Gemma4AudioFeatureExtractor())
    assert settings.count_frames(160) == len(log_mel(noise(160), settings)) == 0
    assert settings.count_frames(161) == 1
    assert (settings.most_seconds, settings.most_frames) == (30, 2999)


def test_a_file_without_fields_has_the_defaults_of_the_class(tmp_path: Any) -> None:
    kind = {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": kind}))
    theirs = Gemma4AudioFeatureExtractor()
    assert read_audio_settings(tmp_path) == Gemma4AudioSettings(
        rate=theirs.sampling_rate,
        num_mels=theirs.feature_size,
        hop=theirs.hop_length,
        window=theirs.frame_length,
        lowest=theirs.min_frequency,
        highest=theirs.max_frequency,
        floor=float(theirs.mel_floor),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preemphasis": 0.97}, "preemphasis must be 0, not 0.97"),
        ({"fft_overdrive": True}, "fft_overdrive must be False, not True"),
        ({"input_scale_factor": 2.0}, "input_scale_factor must be 1, not 2.0"),
        ({"per_bin_mean": [0.0]}, r"per_bin_mean must be None, not \[0.0\]"),
        ({"max_frequency": 0}, r"max_frequency \(0.0\) must be above min_frequency \(0.0\)"),
        ({"frame_length": 400}, "frame_length must be 320 samples, those of frame_length_ms"),
        ({"hop_length_ms": 0}, "hop_length must be 0 samples, those of .* and at least 1"),
        ({"mel_floor": -1}, "'mel_floor' must be a number of at least 0, not -1"),
        ({"feature_size": None, "max_frequency": "8"}, "'max_frequency' must be a number"),
    ],
)
def test_what_is_not_supported_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Any
) -> None:
    with pytest.raises(EngineStartError, match=rf"processor_config\.json: {message}"):
        read(tmp_path, Gemma4AudioFeatureExtractor(), **changes)
