"""The facade: rates, identities of sounds, their lengths, and errors with names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from support.programs import run_source

from shmllm.errors import EngineStartError, RequestError
from shmllm.formats.audio_readers import read_audio_settings
from shmllm.frontend.audio.features import log_mel
from shmllm.frontend.audio.opening import Sound
from shmllm.frontend.audio.processor import AudioProcessor
from shmllm.frontend.items.registry import processors_of_model

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_config": {"num_mel_bins": 16, "max_source_positions": 150},
}
FIELDS: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 16,
    "chunk_length": 3,
}
NAME = "prompt 3: audio 1"
RANDOM = np.random.default_rng(2)
NOISE = (RANDOM.standard_normal(5000) * 0.1).astype(np.float32)
MOST = 48_000


def model(directory: Path, config: dict[str, Any] = CONFIG, **settings: Any) -> AudioProcessor:
    (directory / "preprocessor_config.json").write_text(json.dumps(FIELDS | settings))
    processor = processors_of_model(directory, config)["audio"]
    assert isinstance(processor, AudioProcessor)
    return processor


@pytest.fixture
def processor(tmp_path: Path) -> AudioProcessor:
    return model(tmp_path)


def test_other_rates_are_converted_by_soxr(processor: AudioProcessor) -> None:
    for rate in (8000, 11025, 44100, 48000):
        opened = processor.open(NAME, (NOISE, rate))
        assert opened.rate == 16000
        assert opened.samples.dtype == np.float32
        expected = soxr.resample(NOISE, rate, 16000, quality="HQ")
        assert np.array_equal(opened.samples, expected)
        assert abs(len(expected) - len(NOISE) * 16000 / rate) <= 1
    assert np.array_equal(processor.open(NAME, (NOISE, 16000)).samples, NOISE)
    assert np.array_equal(processor.open(NAME, NOISE).samples, NOISE)


def test_a_tone_has_the_same_pitch_at_another_rate(processor: AudioProcessor) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(44100) / 44100)
    opened = processor.open(NAME, (tone, 44100)).samples
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert len(opened) == 16000
    np.testing.assert_allclose(opened[500:-500], expected[500:-500], rtol=0, atol=1e-3)


def test_features_are_those_of_the_samples(processor: AudioProcessor, tmp_path: Path) -> None:
    settings = read_audio_settings(tmp_path)
    assert settings is not None
    opened = processor.open(NAME, (NOISE, 8000))
    prepared = processor.prepare(opened)
    assert np.array_equal(prepared.data, log_mel(opened.samples, settings))
    assert (prepared.grid, prepared.num_tokens) == ((63, 1, 1), 16)
    assert prepared.data.shape == (65, 16)
    assert processor.size(opened) == (10000,)


def test_features_are_contiguous_and_read_only(processor: AudioProcessor) -> None:
    data = processor.prepare(processor.open(NAME, NOISE)).data
    assert data.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        data[0, 0] = 1


def test_an_identity_is_that_of_the_samples(processor: AudioProcessor) -> None:
    changed = NOISE.copy()
    changed[-1] += 1e-3
    sounds = [NOISE, changed, NOISE[:-1], (NOISE, 8000), np.append(NOISE, np.float32(0))]
    identities = [processor.identity(processor.open(NAME, each)) for each in sounds]
    assert len(set(identities)) == len(sounds)
    assert {len(each) for each in identities} == {32}


def test_forms_of_the_same_samples_have_one_identity(processor: AudioProcessor) -> None:
    forms = [
        NOISE,
        NOISE.tolist(),
        NOISE.astype(np.float64),
        (NOISE, 16000),
        np.stack([NOISE, NOISE], 1),
        np.stack([NOISE, NOISE]),
        Sound(NOISE, 16000),
    ]
    assert len({processor.identity(processor.open(NAME, each)) for each in forms}) == 1


def test_an_identity_is_that_of_everything_that_decides_the_features(tmp_path: Path) -> None:
    opened = Sound(NOISE, 16000)
    audio: list[dict[str, Any]] = [{}, {"num_mel_bins": 20}, {"max_source_positions": 200}, {}, {}]
    changes: list[dict[str, Any]] = [
        {},
        {"feature_size": 20},
        {"chunk_length": 4},
        {"n_fft": 512},
        {"hop_length": 80, "sampling_rate": 8000},
    ]
    identities = {
        model(tmp_path, CONFIG | {"audio_config": CONFIG["audio_config"] | other}, **each).identity(
            opened
        )
        for other, each in zip(audio, changes, strict=True)
    }
    assert len(identities) == len(changes)


def test_a_long_sound_is_refused_or_cut_as_asked(processor: AudioProcessor) -> None:
    rng = np.random.default_rng(1)
    long = (rng.standard_normal(MOST + 1600) * 0.1).astype(np.float32)
    opened = processor.open(NAME, long)
    message = (
        rf"^{NAME} has 3.1 seconds, and the model hears 3 at once: cut it, or pass "
        r"mm_processor_kwargs=\{'truncation': True\} for the first 3"
    )
    calls: list[Callable[..., Any]] = [processor.prepare, processor.identity]
    for call in calls:
        for overrides in ({}, {"truncation": False}):
            with pytest.raises(RequestError, match=message):
                call(opened, overrides, NAME)
    cut = Sound(long[:MOST], 16000)
    prepared = processor.prepare(opened, {"truncation": True})
    assert np.array_equal(prepared.data, processor.prepare(cut).data)
    assert (prepared.grid, prepared.num_tokens) == ((300, 1, 1), 75)
    assert processor.identity(opened, {"truncation": True}) == processor.identity(cut)
    assert processor.identity(cut, {"truncation": True}) == processor.identity(cut)


def test_a_short_sound_is_refused(processor: AudioProcessor) -> None:
    with pytest.raises(RequestError, match=rf"^{NAME} is too short: it has 320 samples at 16000"):
        processor.prepare(Sound(NOISE[:320], 16000), {}, NAME)
    assert processor.prepare(Sound(NOISE[:321], 16000)).num_tokens == 1


@pytest.mark.parametrize(
    "overrides", [{"max_pixels": 3}, {"truncation": 1}, {"truncation": None}, {"padding": True}]
)
def test_unknown_overrides_are_refused(
    overrides: dict[str, Any], processor: AudioProcessor
) -> None:
    ((key, value),) = overrides.items()
    message = rf"^{NAME}: mm_processor_kwargs may have 'truncation' .*, not {key!r} with {value!r}"
    calls: list[Callable[..., Any]] = [processor.prepare, processor.identity]
    for call in calls:
        with pytest.raises(RequestError, match=message) as info:
            call(Sound(NOISE, 16000), overrides, NAME)
        assert info.value.parameter == "mm_processor_kwargs"
    assert processor.known_overrides == {"truncation"}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"feature_size": 80}, "80 of 300"),
        ({"chunk_length": 30}, "16 of 3000"),
        ({"hop_length": 80}, "16 of 600"),
    ],
)
def test_settings_that_do_not_suit_the_tower_are_refused(
    fields: dict[str, Any], found: str, tmp_path: Path
) -> None:
    message = f"takes 16 features of up to 300 frames, the feature extractor makes {found}$"
    with pytest.raises(EngineStartError, match=message):
        model(tmp_path, **fields)


def test_a_model_without_settings_is_refused(tmp_path: Path) -> None:
    advice = "has no settings for sounds; copy processor_config.json or preprocessor_config.json of"
    with pytest.raises(EngineStartError, match=f"{advice} .* or pass language_model_only=True$"):
        processors_of_model(tmp_path, CONFIG)
    whisper = {"architectures": ["WhisperForConditionalGeneration"]}
    with pytest.raises(EngineStartError, match=f"{advice} the model into it$"):
        processors_of_model(tmp_path, whisper)


def test_nothing_for_sounds_is_imported_before_the_first_one(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(FIELDS))
    source = f"""
import sys
from pathlib import Path
import shmllm.frontend.audio.opening, shmllm.frontend.items.files
from shmllm.frontend.items.registry import processors_of_model
processor = processors_of_model(Path({str(tmp_path)!r}), {CONFIG!r})["audio"]
assert processor.expand_text("prompt", "no sound", []) == "no sound"
late = {{"soundfile", "soxr", "torch", "transformers"}}
assert late.isdisjoint(sys.modules), "imported"
import numpy
opened = processor.open("audio", (numpy.ones(4000, numpy.int16), 8000))
assert processor.prepare(opened).num_tokens == 12
assert "soxr" in sys.modules and {{"soundfile", "torch", "transformers"}}.isdisjoint(sys.modules)
"""
    done = run_source(source)
    assert done.returncode == 0, done.stderr.decode()
