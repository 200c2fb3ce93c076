"""Fun-ASR-Nano, which writes what a sound says: the encoder of SenseVoice, and Qwen 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.audio.conformer_specs import FunAsrTower, SanmLayers
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen3
from shmllm.models.fields import Fields
from shmllm.models.vision.encoder_spec import VisionActivation
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_item_token,
    read_num_heads,
    read_vision_activation,
)

_AUDIO_TOKEN = 151646
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def configure(fields: Fields) -> ModelConfig:
    config = qwen3.configure(fields.with_defaults(_TEXT_DEFAULTS))
    tied = fields.whole.flag("tie_word_embeddings", True)
    return replace(config, audio=read_audio(fields, config), tie_word_embeddings=tied)


def read_audio(fields: Fields, config: ModelConfig) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    whole = fields.whole
    audio = whole.section("audio_config", "fun_asr_nano_encoder")
    if audio is None:
        return None
    adaptor = Fields(whole.table("adaptor_config"), f"{whole.where}: adaptor_config")
    if (width := adaptor.integer("hidden_size", 1024)) != config.hidden_size:
        raise adaptor.error(
            f"hidden_size ({width}) differs from the language model's ({config.hidden_size})"
        )
    encoder = _read_layers(audio, hidden_size=512, num_layers=70, num_heads=4, inner=2048)
    count = encoder.num_layers
    of_times = audio.integer("num_timestamp_prediction_layers", 20, minimum=0, maximum=count)
    num_mels = audio.integer("num_mel_bins", 80) * audio.integer("num_stacked_frames", 7)
    if num_mels % 2 or num_mels == 2:
        raise audio.error(f"frames of {num_mels} features have no sines and cosines of positions")
    tower = FunAsrTower(
        encoder=encoder,
        kernel=audio.integer("fsmn_kernel_size", 11),
        normed=tuple(sorted({count - of_times - 1, count - 1} - {-1})),
        adaptor=_read_layers(adaptor, hidden_size=1024, num_layers=2, num_heads=8, inner=256),
        projector_activation=_activation(adaptor, "projector_hidden_act"),
        projector_width=adaptor.integer("projector_hidden_size", 2048),
        num_mels=num_mels,
        most_frames=audio.integer("max_position_embeddings", 2049, minimum=2) - 1,
    )
    token = read_item_token(fields, ("audio_token_id",), _AUDIO_TOKEN, config.vocab_size)
    return AudioSpec(token=token, tower=tower)


def _read_layers(
    fields: Fields, *, hidden_size: int, num_layers: int, num_heads: int, inner: int
) -> SanmLayers:
    """Returns layers; the arguments are what absent fields stand for."""
    width = fields.integer("hidden_size", hidden_size)
    return SanmLayers(
        hidden_size=width,
        num_layers=fields.integer("num_hidden_layers", num_layers, maximum=MOST_LAYERS),
        num_heads=read_num_heads(fields, "num_attention_heads", num_heads, width),
        inner=fields.integer("intermediate_size", inner),
        activation=_activation(fields, "hidden_act"),
        eps=fields.number("layer_norm_eps", 1e-5),
    )


def _activation(fields: Fields, name: str) -> VisionActivation:
    return read_vision_activation(fields, name, "relu", ("relu",))
