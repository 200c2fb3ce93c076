"""Settings of feature extractors: both files, the defaults of the class, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import WhisperFeatureExtractor
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from shmllm.errors import EngineStartError
from shmllm.formats.audio_readers import read_audio_settings
from shmllm.formats.audio_settings import AudioSettings, UnpaddedSettings

TYPE = {"feature_extractor_type": "WhisperFeatureExtractor"}


def read(directory: Path, fields: Any, name: str = "preprocessor_config.json") -> Any:
    (directory / name).write_text(json.dumps(fields))
    return read_audio_settings(directory)


def as_theirs(settings: AudioSettings) -> tuple[int, ...]:
    return (
        settings.num_mels,
        settings.rate,
        settings.hop,
        settings.most_seconds,
        settings.window,
        settings.most_samples,
        settings.most_frames,
    )


def fields_of(kind: Any) -> tuple[int, ...]:
    return (
        kind.feature_size,
        kind.sampling_rate,
        kind.hop_length,
        kind.chunk_length,
        kind.n_fft,
        kind.n_samples,
        kind.nb_max_frames,
    )


def test_a_file_without_fields_has_the_defaults_of_the_class(tmp_path: Path) -> None:
    expected = fields_of(WhisperFeatureExtractor())
    assert as_theirs(read(tmp_path, TYPE)) == expected
    nulls = dict.fromkeys(("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft"))
    assert as_theirs(read(tmp_path, TYPE | nulls)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"feature_size": 128, "chunk_length": 3},
        {"sampling_rate": 24000, "hop_length": 100, "n_fft": 512, "feature_size": 20},
        {"hop_length": 161},
    ],
)
def test_what_transformers_writes_is_read(options: dict[str, int], tmp_path: Path) -> None:
    kind = WhisperFeatureExtractor(**options)
    kind.save_pretrained(tmp_path)
    settings = read_audio_settings(tmp_path)
    assert settings is not None
    assert as_theirs(settings) == fields_of(kind)


def test_processor_config_comes_first(tmp_path: Path) -> None:
    read(tmp_path, TYPE | {"feature_size": 80})
    whole = {"feature_extractor": TYPE | {"feature_size": 128}}
    assert read(tmp_path, whole, "processor_config.json").num_mels == 128


def test_a_directory_without_files_has_no_settings(tmp_path: Path) -> None:
    assert read_audio_settings(tmp_path) is None


@pytest.mark.parametrize("options", [{}, {"feature_size": 80, "chunk_length": 3, "min_length": 9}])
def test_what_transformers_writes_of_qwen_3_asr_is_read(
    options: dict[str, int], tmp_path: Path
) -> None:
    kind = Qwen3ASRFeatureExtractor(**options)
    kind.save_pretrained(tmp_path)
    assert read_audio_settings(tmp_path) == UnpaddedSettings(
        rate=kind.sampling_rate,
        num_mels=kind.feature_size,
        hop=kind.hop_length,
        window=kind.n_fft,
        seconds=kind.chunk_length,
        fewest=kind.min_length,
    )


def test_a_wrong_length_of_the_shortest_sound_is_refused(tmp_path: Path) -> None:
    fields = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "min_length": -1}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(EngineStartError, match="'min_length' must be a number of samples, not -1"):
        read_audio_settings(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feature_extractor_type": None}, "feature_extractor_type None is not supported"),
        (
            {"feature_extractor_type": "ClapFeatureExtractor"},
            "'ClapFeatureExtractor' is not supported; supported is WhisperFeatureExtractor, Gemma4",
        ),
        ({"feature_extractor_type": []}, r"feature_extractor_type \[\] is not supported"),
        ({"dither": 0.1}, "dither must be 0, not 0.1"),
        ({"padding_value": -1.0}, "padding_value must be 0, not -1.0"),
        ({"feature_size": 0}, "'feature_size' must be a positive integer, not 0"),
        ({"feature_size": True}, "'feature_size' must be a positive integer, not True"),
        ({"sampling_rate": 16000.0}, "'sampling_rate' must be a positive integer, not 16000.0"),
        ({"chunk_length": -1}, "'chunk_length' must be a positive integer, not -1"),
        ({"chunk_length": 2**20}, "'chunk_length' must be a positive integer, not 1048576"),
        ({"hop_length": "160"}, "'hop_length' must be a positive integer, not '160'"),
        ({"n_fft": [400]}, r"'n_fft' must be a positive integer, not \[400\]"),
        ({"n_fft": 401}, "n_fft must be even, and at least hop_length"),
        ({"n_fft": 1_000_000}, "frames of 1,000,000 samples are longer than .* has 480,000"),
        ({"n_fft": 480_002}, "frames of 480,002 samples are longer"),
        ({"hop_length": 402}, "n_fft must be even, and at least hop_length"),
    ],
)
def test_what_is_not_supported_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=rf"preprocessor_config\.json: .*{message}"):
        read(tmp_path, TYPE | fields)


def test_no_dither_is_accepted(tmp_path: Path) -> None:
    assert read(tmp_path, TYPE | {"dither": 0.0, "padding_value": None}) is not None


def test_a_section_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="must be an object"):
        read(tmp_path, {"feature_extractor": [1]}, "processor_config.json")


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(EngineStartError, match="preprocessor_config"):
        read_audio_settings(tmp_path)
