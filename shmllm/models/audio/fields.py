"""Reads what configurations say of encoders of sounds. It must not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from shmllm.models.audio.omni_specs import Qwen3OmniAudioTower
from shmllm.models.audio.parakeet_specs import ParakeetEncoder
from shmllm.models.audio.specs import WhisperTower, num_convolved
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import MOST_LAYERS, read_num_heads, read_vision_activation

Tower = TypeVar("Tower", bound=WhisperTower)
Encoder = TypeVar("Encoder", bound=ParakeetEncoder)
NAMES_OF_WHISPER = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
"""Other names of fields of ``audio_config``, for those of Whisper."""
_POSITIONS = 13
"""Those of a chunk of a sound, which transformers' counts of embeddings assume."""
_OF_PARAKEET = {"subsampling_conv_kernel_size": 3, "subsampling_conv_stride": 2}
"""Fields of Parakeet's encoder that have one supported value."""


def read_omni_encoder(audio: Fields, kind: type[Tower], hidden_size: int) -> Tower:
    """Returns the encoder of an omni model of Qwen, whose positions are sines.

    Args:
        audio: the fields of ``audio_config``.
        kind: what its results are for.
        hidden_size: the width of the language model's embeddings.
    """
    if (output := audio.integer("output_dim", 3584)) != hidden_size:
        raise audio.error(
            f"output_dim ({output}) differs from the language model's hidden_size ({hidden_size})"
        )
    tower = read_whisper(audio, kind, num_layers=32, num_heads=20, inner=5120, num_mels=128)
    if tower.hidden_size % 2 or tower.hidden_size == 2:
        raise audio.error(f"d_model ({tower.hidden_size}) must be an even number above 2")
    return tower


def read_convolved(
    audio: Fields, hidden_size: int, *, fills: bool = False, has_projector: bool = False
) -> Qwen3OmniAudioTower:
    """Returns an encoder of chunks behind convolutions.

    Args:
        audio: the fields of ``audio_config``.
        hidden_size: the width of the language model's embeddings.
        fills, has_projector: see `Qwen3OmniAudioTower`.
    """
    tower = read_omni_encoder(audio, Qwen3OmniAudioTower, hidden_size)
    window = audio.integer("n_window", 50)
    if num_convolved(2 * window) != _POSITIONS:
        raise audio.error(f"n_window {window} is not supported; supported: 49 to 52")
    together = audio.integer("n_window_infer", 800, minimum=2 * window) // (2 * window)
    return replace(
        tower,
        window=window,
        chunks_together=together,
        channels=audio.integer("downsample_hidden_size", 480),
        fills=fills,
        has_projector=has_projector,
    )


def in_names_of_whisper(audio: Fields) -> Fields:
    """Returns fields under the names that Whisper has for them; those that are there win."""
    renamed = {NAMES_OF_WHISPER.get(name, name): value for name, value in audio.values.items()}
    return audio.with_values(renamed | audio.values)


def read_whisper(
    audio: Fields, kind: type[Tower], *, num_layers: int, num_heads: int, inner: int, num_mels: int
) -> Tower:
    """Returns Whisper's encoder.

    Args:
        audio: the fields with the names of transformers' ``WhisperConfig``.
        kind: what its results are for.
        num_layers, num_heads, inner, num_mels: what absent fields stand for.
    """
    hidden_size = audio.integer("d_model", 1280)
    return kind(
        hidden_size=hidden_size,
        num_layers=audio.integer("encoder_layers", num_layers, maximum=MOST_LAYERS),
        num_heads=read_num_heads(
            audio, "encoder_attention_heads", num_heads, hidden_size, "d_model"
        ),
        inner=audio.integer("encoder_ffn_dim", inner),
        activation=read_vision_activation(audio, "activation_function", "gelu"),
        num_mels=audio.integer("num_mel_bins", num_mels),
        num_positions=audio.integer("max_source_positions", 1500),
    )


def read_parakeet(encoder: Fields, kind: type[Encoder], **own: Any) -> Encoder:
    """Returns Parakeet's encoder.

    Args:
        encoder: the fields with the names of transformers' ``ParakeetEncoderConfig``.
        kind: what its results are for.
        own: further attributes of `kind`.
    """
    width, num_mels = encoder.integer("hidden_size", 1024), encoder.integer("num_mel_bins", 80)
    num_heads = read_num_heads(encoder, "num_attention_heads", 8, width)
    for name, supported in (_OF_PARAKEET | {"head_dim": width // num_heads}).items():
        if (found := encoder.integer(name, supported)) != supported:
            raise encoder.error(f"{name} {found} is not supported; supported: {supported}")
    factor = encoder.integer("subsampling_factor", 8, minimum=2, maximum=64)
    if factor & (factor - 1) or num_mels % factor:
        raise encoder.error(
            f"subsampling_factor ({factor}) must be a power of two that divides num_mel_bins "
            f"({num_mels})"
        )
    kernel = encoder.integer("conv_kernel_size", 9)
    if kernel % 2 == 0 or width % 2:
        raise encoder.error(
            f"conv_kernel_size ({kernel}) must be odd, and hidden_size ({width}) even"
        )
    return kind(
        hidden_size=width,
        num_layers=encoder.integer("num_hidden_layers", 24, maximum=MOST_LAYERS),
        num_heads=num_heads,
        inner=encoder.integer("intermediate_size", 4096),
        activation=read_vision_activation(encoder, "hidden_act", "silu"),
        num_mels=num_mels,
        num_halvings=factor.bit_length() - 1,
        channels=encoder.integer("subsampling_conv_channels", 256),
        kernel=kernel,
        bias=encoder.flag("attention_bias", True),
        convolution_bias=encoder.flag("convolution_bias", True),
        scale=width**0.5 if encoder.flag("scale_input", True) else 1.0,
        **own,
    )
