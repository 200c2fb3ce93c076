"""Omnilingual ASR, which writes what a sound says: the encoder of wav2vec 2.0, and Llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.audio.omniasr_specs import OmniAsrTower
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families import llama
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_item_token,
    read_num_heads,
    read_vision_activation,
)

_AUDIO_TOKEN = 10289
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 11984,
    "hidden_size": 4096,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
_SIZES = {
    "conv_dim": (512,) * 7,
    "conv_kernel": (10, 3, 3, 3, 3, 2, 2),
    "conv_stride": (5, 2, 2, 2, 2, 2, 2),
}
"""The lists of the sizes of convolutions over samples."""
_MOST_SIZE = 2**16


def configure(fields: Fields) -> ModelConfig:
    config = llama.configure(fields.with_defaults(_TEXT_DEFAULTS))
    audio = read_audio(fields, config.vocab_size)
    return replace(config, audio=audio, tie_word_embeddings=False)


def read_audio(fields: Fields, vocab_size: int) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``audio_config``."""
    audio = fields.whole.section("audio_config", "omniasr_audio")
    if audio is None:
        return None
    width, groups = (
        audio.integer(name, default)
        for name, default in (("hidden_size", 1024), ("num_conv_pos_embedding_groups", 16))
    )
    kernel = audio.integer("num_conv_pos_embeddings", 128)
    if kernel % 2 or width % groups:
        raise audio.error(
            f"num_conv_pos_embeddings ({kernel}) must be even, and "
            f"num_conv_pos_embedding_groups ({groups}) divide hidden_size ({width})"
        )
    if (eps := audio.number("layer_norm_eps", 1e-5)) != 1e-5:
        raise audio.error(f"layer_norm_eps {eps} is not supported; supported: 1e-05")
    channels, lengths, strides = (_read_sizes(audio, name) for name in _SIZES)
    if not len(channels) == len(lengths) == len(strides):
        raise audio.error(f"{', '.join(_SIZES)} must be lists of equal length")
    tower = OmniAsrTower(
        hidden_size=width,
        num_layers=audio.integer("num_hidden_layers", 24, maximum=MOST_LAYERS),
        num_heads=read_num_heads(audio, "num_attention_heads", 16, width),
        inner=audio.integer("intermediate_size", 4096),
        activation=read_vision_activation(audio, "hidden_act", "gelu"),
        channels=channels,
        convolutions=tuple(zip(lengths, strides, strict=True)),
        convolution_bias=audio.flag("conv_bias", True),
        kernel=kernel,
        groups=groups,
    )
    token = read_item_token(fields, ("audio_token_id",), _AUDIO_TOKEN, vocab_size)
    return AudioSpec(token=token, tower=tower)


def _read_sizes(audio: Fields, name: str) -> tuple[int, ...]:
    """Returns the positive integers that a field lists."""
    found: Any = audio.values.get(name)
    sizes = list(_SIZES[name]) if found is None else found
    if not isinstance(sizes, list) or not 0 < len(sizes) <= MOST_LAYERS:
        raise audio.error(f"{name!r} must be a list of sizes, not {sizes!r}")
    if any(type(each) is not int or not 0 < each < _MOST_SIZE for each in sizes):
        raise audio.error(f"{name!r} must be a list of sizes, not {sizes!r}")
    return tuple(sizes)
