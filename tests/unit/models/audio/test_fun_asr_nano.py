"""Fun-ASR-Nano: features and embeddings of sounds, compared with transformers, and its fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.audio_families import FUN_ASR_SETTINGS
from support.audio_models import RATE, make_audio_model
from support.model_helpers import assert_logits_close, load, our_logits, reference_logits
from support.sound_checks import check_embeddings, embed, noise, prepared, read_config
from support.sounds_alone import fun_asr_features
from support.tower_checks import same_on_all_threads
from support.variants import slow
from transformers import FunAsrNanoConfig

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.models.audio.conformer_specs import FunAsrTower, SanmLayers
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.decoder import DecoderModel

ARCHITECTURE = {"architectures": ["FunAsrNanoForConditionalGeneration"]}
SPEC = AudioSpec(
    token=151646,
    tower=FunAsrTower(
        encoder=SanmLayers(
            hidden_size=512, num_layers=70, num_heads=4, inner=2048, activation="relu", eps=1e-5
        ),
        kernel=11,
        normed=(49, 69),
        adaptor=SanmLayers(
            hidden_size=1024, num_layers=2, num_heads=8, inner=256, activation="relu", eps=1e-5
        ),
        projector_activation="relu",
        projector_width=2048,
        num_mels=560,
        most_frames=2048,
    ),
)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no layers for times": (
        {"num_timestamp_prediction_layers": 0, "fsmn_kernel_size": 5},
        {"tie_word_embeddings": True},
    ),
    "features as wide as the stream": (
        {"hidden_size": 24, "hidden_act": "gelu", "num_timestamp_prediction_layers": 4},
        {},
    ),
}
SECONDS = [0.025, 0.1, 0.77, 2.3, 6.0]
TOKENS = [int(token) for token in torch.randint(0, 440, (40,), generator=torch.manual_seed(3))]
Models = tuple[Path, Any, DecoderModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Where a model is, transformers' and ours."""
    directory = tmp_path_factory.mktemp("fun_asr_nano")
    return directory, make_audio_model(directory, "fun_asr_nano"), load(directory)


@pytest.mark.parametrize("seconds", SECONDS)
def test_features_and_embeddings_equal_transformers(seconds: float, models: Models) -> None:
    """From the shortest sound to the longest."""
    item, features = prepared(models[0], noise(seconds)), fun_asr_features(noise(seconds))
    assert item.grid == (len(features), 1, 1)
    np.testing.assert_allclose(item.data, features, rtol=0, atol=2e-5)
    check_embeddings(*models, seconds)


@pytest.mark.slow
def test_features_equal_torchaudio(tmp_path: Path) -> None:
    """What the extractor of transformers makes with torchaudio, whose own features of float32 and
    of float64 differ as much."""
    pytest.importorskip("torchaudio")
    extractor = transformers.FunAsrNanoFeatureExtractor()
    (tmp_path / "preprocessor_config.json").write_text(extractor.to_json_string())
    audio = processors_of_model(tmp_path, ARCHITECTURE)["audio"]
    for seconds in (0.025, *np.arange(1, 200) / 37):
        samples = noise(float(seconds))
        wanted = extractor([samples])["input_features"][0]
        item = audio.prepare(audio.open("a sound", (samples, RATE)))
        np.testing.assert_allclose(item.data, wanted, rtol=0, atol=2e-3)


def test_logits_of_text_equal_transformers(models: Models) -> None:
    _, reference, model = models
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


@pytest.mark.parametrize("variant", [*map(slow, VARIANTS)])
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    audio, outer = VARIANTS[variant]
    reference = make_audio_model(tmp_path, "fun_asr_nano", outer=outer, **audio)
    model = load(tmp_path)
    check_embeddings(tmp_path, reference, model, 0.7)
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


def test_the_number_of_threads_changes_no_bit(models: Models) -> None:
    directory, _, model = models
    item = prepared(directory, noise(1.1))
    same_on_all_threads(model.towers["audio"], lambda: embed(model, item))


def test_sounds_of_other_lengths_are_refused(models: Models) -> None:
    with pytest.raises(RequestError, match="too short: it has 399 samples"):
        prepared(models[0], np.ones(399, np.float32))
    most = 400 + 150 * 4 * 160 - 1
    assert prepared(models[0], np.ones(most, np.float32)).num_tokens == 150
    with pytest.raises(RequestError, match="the model hears 6 at once"):
        prepared(models[0], np.ones(most + 1, np.float32))


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = FunAsrNanoConfig()
    some = {"text_config": {"a": 1}, "audio_config": {"a": 1}}
    found = read_config(tmp_path, some | ARCHITECTURE)
    own = read_config(tmp_path, theirs.to_dict() | ARCHITECTURE)
    assert found.audio == own.audio == SPEC
    assert found.layers == own.layers
    assert (found.vocab_size, found.hidden_size) == (own.vocab_size, own.hidden_size)
    assert found.max_position_embeddings == own.max_position_embeddings == 40960
    assert (found.tie_word_embeddings, own.tie_word_embeddings) == (True, True)


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("audio_config", {"model_type": "whisper"}, "supported: fun_asr_nano_encoder"),
        ("audio_config", {"hidden_act": "tanh"}, "'tanh' is not supported; supported: .*, relu"),
        ("audio_config", {"num_attention_heads": 3}, r"num_attention_heads \(3\) must divide"),
        ("audio_config", {"num_timestamp_prediction_layers": 71}, "integer of at most 70"),
        ("audio_config", {"num_mel_bins": 81}, "frames of 567 features have no sines and cosines"),
        ("adaptor_config", {"hidden_size": 512}, r"hidden_size \(512\) differs from the language"),
        ("adaptor_config", {"projector_hidden_act": "tanh"}, "projector_hidden_act 'tanh' is not"),
        ("text_config", {"model_type": "qwen2"}, "supported: qwen3"),
    ],
)
def test_what_is_not_computed_is_refused(
    part: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    found = FunAsrNanoConfig().to_dict() | ARCHITECTURE
    found[part].update(fields)
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        read_config(tmp_path, found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_size": 9}, "takes 24 features of up to 150 frames, the feature extractor mak"),
        ({"window": "povey"}, "window must be 'hamming', not 'povey'"),
        ({"frame_shift": 0}, "'frame_shift' must be a positive integer, not 0"),
        ({"feature_extractor_type": "WhisperFeatureExtractor"}, "needs Fun-ASR-Nano's feature"),
    ],
)
def test_settings_that_do_not_suit_are_refused(
    settings: dict[str, Any], message: str, models: Models, tmp_path: Path
) -> None:
    config = json.loads((models[0] / "config.json").read_text())
    given = json.dumps(FUN_ASR_SETTINGS | settings)
    (tmp_path / "preprocessor_config.json").write_text(given)
    with pytest.raises(EngineStartError, match=message):
        processors_of_model(tmp_path, config)
