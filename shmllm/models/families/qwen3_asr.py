"""Qwen 3 ASR, which writes what a sound says, and its forced aligner, which says when: the encoder
of Qwen 3 Omni for sounds, and Qwen 3.

Files of the model's authors have it as a ``thinker_config``, whose ``text_config`` has sections of
axes: all of them have one position, as there are no images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.formats.qwen3_aligner import ARCHITECTURE
from shmllm.models.audio.fields import read_convolved
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.families import qwen3
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.vision.fields import read_item_token

_TEXT_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
_AUDIO_DEFAULTS: dict[str, Any] = {
    "d_model": 1024,
    "encoder_layers": 24,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
}
_AUDIO_TOKEN = 151676
_TYPES = ("qwen3_asr_encoder", "qwen3_asr_audio_encoder")
"""What ``model_type`` is in files of transformers, and in those of the model's authors."""


def configure(fields: Fields) -> ModelConfig:
    config = qwen3.configure(fields.with_defaults(_TEXT_DEFAULTS))
    config = replace(config.with_mixers(_without_axes), audio=read_audio(fields, config))
    return _with_times(config, fields) if architecture_name(fields) == ARCHITECTURE else config


def _with_times(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Returns the configuration of a forced aligner of the authors' files, in which a classifier
    of times has the name of the LM head."""
    labels = fields.whole.integer("classify_num")
    dense = DenseSpec(name="lm_head", inputs=config.hidden_size, outputs=labels)
    head = HeadSpec(
        kind="classifier",
        steps=(dense,),
        labels=tuple(str(index) for index in range(labels)),
        activation="softmax",
    )
    return replace(config, head=head, tie_word_embeddings=False)


def read_audio(fields: Fields, config: ModelConfig) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    audio = fields.whole.section("audio_config", *_TYPES)
    if audio is None:
        return None
    of_authors = audio.values.get("model_type") == _TYPES[1]
    return AudioSpec(
        token=read_item_token(fields, ("audio_token_id",), _AUDIO_TOKEN, config.vocab_size),
        tower=read_convolved(
            audio.with_defaults(_AUDIO_DEFAULTS),
            config.hidden_size,
            fills=True,
            has_projector=not of_authors,
        ),
    )


def _without_axes(mixer: MixerSpec) -> MixerSpec:
    if not isinstance(mixer, AttentionSpec) or mixer.rope is None:
        return mixer
    return replace(mixer, rope=replace(mixer.rope, sections=(), mixes_axes=False))
