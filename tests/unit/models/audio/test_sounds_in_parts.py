"""Audio Flamingo 3, GLM-ASR and MOSS-Transcribe-Diarize: their embeddings of sounds, compared with
transformers, and their fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.audio_families import AUDIO_FAMILIES
from support.audio_models import make_audio_model, processed_in_parts
from support.model_helpers import assert_logits_close, load, our_logits, reference_logits
from support.sound_checks import check_embeddings, embed, noise, prepared, read_config
from support.tower_checks import same_on_all_threads
from support.variants import slow

from shmllm.errors import EngineStartError, RequestError
from shmllm.frontend.items.registry import processors_of_model
from shmllm.models.audio.specs import (
    AudioFlamingoTower,
    AudioSpec,
    GlmAsrTower,
    MossTower,
    MusicFlamingoTower,
)
from shmllm.models.decoder import DecoderModel

MOSS = "moss_transcribe_diarize"
NAMES = {
    "audioflamingo3": "AudioFlamingo3",
    "musicflamingo": "MusicFlamingo",
    "glmasr": "GlmAsr",
    MOSS: "MossTranscribeDiarize",
}
"""Our modules, and the beginnings of transformers' classes."""
WHISPER: dict[str, Any] = {
    "hidden_size": 1280,
    "num_layers": 32,
    "num_heads": 20,
    "inner": 5120,
    "activation": "gelu",
    "num_mels": 128,
    "num_positions": 1500,
}
SPECS = {
    "audioflamingo3": AudioSpec(token=151669, tower=AudioFlamingoTower(**WHISPER)),
    "glmasr": AudioSpec(token=59260, tower=GlmAsrTower(**WHISPER, rotary_dim=32, theta=10_000.0)),
}
SPECS["musicflamingo"] = AudioSpec(
    token=151669,
    tower=MusicFlamingoTower(**WHISPER, rotary_dim=256, theta=1200.0, seconds=0.04),
    counts_parts=True,
)
SPECS[MOSS] = AudioSpec(
    token=151671,
    tower=MossTower(
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        inner=4096,
        activation="gelu",
        num_mels=80,
        num_positions=1500,
    ),
)
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "no biases": ("audioflamingo3", {}, {"projector_bias": False, "projector_hidden_act": "silu"}),
    "other angles": (
        "musicflamingo",
        {},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
            "audio_frame_step": 0.02,
        },
    ),
    "silu": ("audioflamingo3", {"activation_function": "silu"}, {}),
    "whole heads": (
        "glmasr",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"projector_hidden_act": "gelu_pytorch_tanh"},
    ),
    "tied": ("glmasr", {"hidden_act": "silu"}, {"tie_word_embeddings": True}),
    "pairs": (MOSS, {}, {"audio_merge_size": 2, "tie_word_embeddings": True}),
}
SECONDS = [0.1, 1.013, 2.99, 3.0, 4.0, 4.01, 8.3]
TOKENS = [int(token) for token in torch.randint(0, 440, (40,), generator=torch.manual_seed(3))]


@pytest.fixture(scope="module", params=NAMES)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, DecoderModel]:
    """Where a model is, transformers' and ours."""
    directory = tmp_path_factory.mktemp(request.param)
    return directory, make_audio_model(directory, request.param), load(directory)


@pytest.mark.parametrize("seconds", SECONDS)
def test_embeddings_equal_transformers(seconds: float, subject: Any) -> None:
    """From samples on. A part that is too short for an embedding is left out."""
    check_embeddings(*subject, seconds)


@pytest.mark.parametrize("seconds", [1.2, 3.99, 4.2, 13.0])
def test_prompts_have_what_processors_write(seconds: float, subject: Any) -> None:
    """MOSS-Transcribe-Diarize has each other second among its tokens."""
    directory, reference, _ = subject
    name, samples = reference.config.model_type, noise(seconds)
    family = AUDIO_FAMILIES[name]
    config = json.loads((directory / "config.json").read_text())
    audio = processors_of_model(directory, config)["audio"]
    _, (text,) = processed_in_parts([samples], name)
    ours = audio.expand_text("prompt", audio.mark, [prepared(directory, samples)])
    assert ours == f"{family.begin}{text}{family.end}"
    assert ("<|audio_pad|>2<|audio_pad|>" in ours) == (name == MOSS and seconds > 2)


def test_logits_of_text_equal_transformers(subject: Any) -> None:
    _, reference, model = subject
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


@pytest.mark.parametrize(
    "variant", ["whole heads", *map(slow, ("other angles", "no biases", "silu", "tied"))]
)
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    name, audio, outer = VARIANTS[variant]
    reference = make_audio_model(tmp_path, name, outer=outer, **audio)
    model = load(tmp_path)
    check_embeddings(tmp_path, reference, model, 1.3)
    assert_logits_close(our_logits(model, TOKENS), reference_logits(reference, TOKENS), 1e-4)


def test_the_number_of_threads_changes_no_bit(subject: Any) -> None:
    directory, _, model = subject
    item = prepared(directory, noise(2.1))
    same_on_all_threads(model.towers["audio"], lambda: embed(model, item))


def test_a_sound_without_embeddings_is_refused(subject: Any) -> None:
    if subject[1].config.model_type == MOSS:  # which rounds up
        assert prepared(subject[0], np.ones(3, np.float32)).num_tokens == 1
        return
    with pytest.raises(RequestError, match="too short: it has 3 samples"):
        prepared(subject[0], np.ones(3, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, f"{NAMES[name]}Config")().to_dict()
    architecture = {"architectures": [f"{NAMES[name]}ForConditionalGeneration"]}
    some = {"text_config": {"a": 1}, "audio_config": {"a": 1}}
    found = read_config(tmp_path, architecture | some)
    own = read_config(tmp_path, theirs | architecture)
    assert found.audio == own.audio == SPECS[name]
    assert found.layers == own.layers
    assert (found.vocab_size, found.hidden_size) == (own.vocab_size, own.hidden_size)
    assert found.max_position_embeddings == own.max_position_embeddings
    assert (found.norm, found.tie_word_embeddings) == (own.norm, own.tie_word_embeddings)
    assert found.tie_word_embeddings == (name not in ("audioflamingo3", "musicflamingo"))


@pytest.mark.parametrize(
    ("name", "part", "fields", "message"),
    [
        ("glmasr", "audio_config", {"num_key_value_heads": 4}, "num_key_value_heads 4 is not supp"),
        ("glmasr", "audio_config", {"head_dim": 32}, "head_dim 32 is not supported; supported: 64"),
        ("glmasr", "audio_config", {"intermediate_size": 640}, r"\(640\) must be 4 times hidden"),
        ("glmasr", "audio_config", {"max_position_embeddings": 1502}, r"\(1502\) a multiple of 4"),
        (
            "glmasr",
            "audio_config",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope type 'yarn' is not supported; supported: 'default'",
        ),
        ("glmasr", "text_config", {"model_type": "qwen2"}, "supported: llama"),
        ("audioflamingo3", "audio_config", {"model_type": "whisper"}, "audioflamingo3_encoder"),
        ("audioflamingo3", "audio_config", {"activation_function": "relu"}, "'relu' is not supp"),
        ("audioflamingo3", "text_config", {"model_type": "llama"}, "supported: qwen2"),
        ("musicflamingo", "audio_config", {"model_type": "whisper"}, "musicflamingo_encoder"),
        ("musicflamingo", "rope_parameters", {"rope_type": "yarn"}, "rope type 'yarn'|factor"),
        ("musicflamingo", "rope_parameters", {"rope_theta": 600.0}, "have no room for 750"),
        ("musicflamingo", "rope_parameters", {"partial_rotary_factor": 0.6}, "have no room for"),
        (MOSS, "audio_config", {"max_source_positions": 1502}, "must divide max_source_positions"),
        (MOSS, "audio_config", {"model_type": "whisper"}, "moss_transcribe_diarize_audio"),
    ],
)
def test_what_is_not_computed_is_refused(
    name: str, part: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = getattr(transformers, f"{NAMES[name]}Config")().to_dict()
    whole[part] |= fields
    whole["architectures"] = [f"{NAMES[name]}ForConditionalGeneration"]
    with pytest.raises(EngineStartError, match=rf"config\.json: .*{message}"):
        read_config(tmp_path, whole)
