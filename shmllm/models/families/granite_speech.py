"""Granite Speech: a conformer for sounds, a Q-Former, and Granite.

An adapter (LoRA) in the model's directory is for prompts with sounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.audio.conformer_specs import GraniteSpeechTower, QFormer
from shmllm.models.audio.specs import AudioSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families import granite
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_item_token,
    read_num_heads,
    read_vision_activation,
)

_AUDIO_TOKEN = 49155
_NAMES = {
    "hidden_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "input_dim": "num_mel_bins",
}
"""Other names of fields of ``encoder_config``."""
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def configure(fields: Fields) -> ModelConfig:
    config = granite.configure(fields.with_defaults(_TEXT_DEFAULTS))
    tied = fields.whole.flag("tie_word_embeddings", True)
    return replace(
        config,
        audio=read_audio(fields, config.vocab_size),
        tie_word_embeddings=tied,
        skipped_prefixes=("model.encoder.", "encoder."),
    )


def read_audio(fields: Fields, vocab_size: int) -> AudioSpec | None:
    """Returns what the model computes of sounds; None: it has no ``encoder_config``."""
    whole = fields.whole
    encoder = whole.section(
        "encoder_config", "granite_speech_encoder", "granite_speech_plus_encoder"
    )
    if encoder is None:
        return None
    encoder = encoder.under_names(
        {name: (name, encoder.values.get(other)) for name, other in _NAMES.items()}
    )
    width = encoder.integer("hidden_dim", 1024)
    num_heads = read_num_heads(encoder, "num_heads", 8, width, "hidden_dim")
    block, distance = encoder.integer("context_size", 200), encoder.integer("max_pos_emb", 512)
    if block > distance:
        raise encoder.error(f"context_size ({block}) exceeds max_pos_emb ({distance})")
    num_layers = encoder.integer("num_layers", 10, maximum=MOST_LAYERS)
    tower = GraniteSpeechTower(
        hidden_size=width,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=encoder.integer("dim_head", width // num_heads),
        inner=width * encoder.integer("feedforward_mult", 4),
        num_mels=encoder.integer("input_dim", 160),
        num_classes=encoder.integer("output_dim", 42),
        block=block,
        most_distance=distance,
        kernel=encoder.integer("conv_kernel_size", 15),
        expansion=encoder.integer("conv_expansion_factor", 2),
        collected=_collected(encoder, num_layers),
        projector=_read_projector(whole),
    )
    projector = Fields(whole.table("projector_config"), f"{whole.where}: projector_config")
    if (found := projector.integer("encoder_hidden_size", 1408)) != tower.read_width:
        raise projector.error(
            f"encoder_hidden_size ({found}) differs from the {tower.read_width} numbers of a frame "
            "that the encoder makes"
        )
    names = "audio_token_index", "audio_token_id"
    return AudioSpec(
        token=read_item_token(fields, names, _AUDIO_TOKEN, vocab_size),
        tower=tower,
        has_adapter=whole.flag("has_lora_adapter", True),
    )


def _collected(encoder: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns ``cat_hidden_layers``, in the order in which they are computed."""
    found: Any = encoder.values.get("cat_hidden_layers") or []
    if not isinstance(found, list) or any(type(each) is not int for each in found):
        raise encoder.error(f"'cat_hidden_layers' must be a list of layers, not {found!r}")
    if any(not 0 <= each < num_layers for each in found) or len(set(found)) < len(found):
        raise encoder.error(
            f"'cat_hidden_layers' must list different layers below {num_layers}, not {found!r}"
        )
    return tuple(sorted(found))


def _read_projector(whole: Fields) -> QFormer:
    """Returns the projector, whose fields are transformers' ``Blip2QFormerConfig``."""
    projector = whole.section("projector_config", "blip_2_qformer")
    if projector is None:
        projector = Fields({}, f"{whole.where}: projector_config")
    if projector.flag("use_qformer_text_input", False):
        raise projector.error("use_qformer_text_input true is not supported; supported: false")
    window, rate = whole.integer("window_size", 15), whole.integer("downsample_rate", 5)
    if window % rate:
        raise whole.error(f"downsample_rate ({rate}) must divide window_size ({window})")
    hidden_size = projector.integer("hidden_size", 768)
    return QFormer(
        hidden_size=hidden_size,
        num_layers=projector.integer("num_hidden_layers", 12, maximum=MOST_LAYERS),
        num_heads=read_num_heads(projector, "num_attention_heads", 12, hidden_size),
        inner=projector.integer("intermediate_size", 3072),
        activation=read_vision_activation(projector, "hidden_act", "gelu"),
        eps=projector.number("layer_norm_eps", 1e-12),
        reads_every=projector.integer("cross_attention_frequency", 2),
        window=window,
        num_queries=window // rate,
    )
