"""Gemma 4: full layers have wider heads and rotate a part of them; values have a norm, too.

Some models have per-layer inputs, layers that read the keys and values of an earlier layer, one
projection for the keys and values of full layers, or experts beside the MLP. In some, the tokens of
an image attend to all of it, but not in full layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.combined_specs import DenseAndExpertsSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families.gemma3 import NORMS, gemma_model, read_gemma_mlp
from shmllm.models.families.gemma4_towers import read_audio, read_vision
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import WITHIN_ITEMS, Ahead, AttentionSpec
from shmllm.models.readers import (
    FULL,
    SLIDING,
    read_activation,
    read_attention,
    read_layer_types,
    read_num_layers,
    read_own_fields,
    read_positions,
    read_rope_of_type,
    windows_by_type,
)
from shmllm.models.specs import ExpertActivation, MLPSpec, MoESpec
from shmllm.models.stream_specs import PerLayerSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.audio.specs import AudioSpec
    from shmllm.models.layers import NamedWeights
    from shmllm.models.vision.specs import VisionSpec

_EXPERT_ACTIVATIONS: dict[str, ExpertActivation] = {"silu": "silu", "gelu_tanh": "gelu_tanh"}


def configure(fields: Fields) -> ModelConfig:
    vocab_size = fields.integer("vocab_size", 262_144)
    return configure_with(fields, read_vision(fields, vocab_size), read_audio(fields, vocab_size))


def configure_with(
    fields: Fields, vision: VisionSpec | None, audio: AudioSpec | None
) -> ModelConfig:
    """Returns a Gemma 4 with these towers."""
    if (both_ways := fields.values.get("use_bidirectional_attention")) not in (None, "vision"):
        raise fields.error(f"use_bidirectional_attention {both_ways!r} is not supported")
    positions = read_positions(fields, 131_072)
    types = _read_types(fields)
    attentions = _read_attentions(fields, types, positions)
    if vision is not None and vision.both_ways:
        attentions = [replace(each, ahead=_ahead(each)) for each in attentions]
    sources = read_kv_sources(fields, types, 0)
    layers = [
        LayerSpec(
            mixer=replace(attention, source=source),
            mlp=_read_feed_forward(fields, is_shared=source is not None),
            norms=NORMS,
        )
        for attention, source in zip(attentions, sources, strict=True)
    ]
    model = gemma_model(fields, layers, positions)
    return replace(
        model,
        norm=replace(model.norm, offset=0.0),
        per_layer=_read_per_layer(fields, model.vocab_size),
        scales_layers=True,
        skipped_prefixes=unread_keys(sources),
        vision=vision,
        audio=audio,
    )


def _ahead(attention: AttentionSpec) -> Ahead:
    """Returns how far behind its own position a token of an image attends: in full layers, not at
    all."""
    return 0 if attention.window is None else WITHIN_ITEMS


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of experts and of their norms under this family's names."""
    return {renamed(name, _NAMES): views for name, views in weights.items()}


module_weights = named_weights

_NAMES = {
    ".mlp.gate.": ".router.proj.",
    ".mlp.router.": ".router.",
    ".mlp.experts.": ".experts.",
    ".mlp.before_experts.": ".pre_feedforward_layernorm_2.",
    ".mlp.after_mlp.": ".post_feedforward_layernorm_1.",
    ".mlp.after_experts.": ".post_feedforward_layernorm_2.",
}


def _read_types(fields: Fields) -> tuple[str, ...]:
    """Returns the type of each layer. The last one is full, whatever the fields say."""
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        types = tuple(SLIDING if (index + 1) % 6 else FULL for index in range(num_layers))
    return (*types[:-1], FULL)


def _read_attentions(fields: Fields, types: tuple[str, ...], positions: int) -> list[AttentionSpec]:
    """Returns the attention of each layer, as if each had its own keys and values."""
    bias = fields.flag("attention_bias", False)
    plain = replace(
        read_attention(fields, num_kv_heads=4, head_dim=256, bias=bias, output_bias=bias),
        scale=1.0,
        qk_norm="head",
        value_norm=True,
    )
    windows = windows_by_type(fields, types, fields.integer("sliding_window", 512))
    is_joint = fields.flag("attention_k_eq_v", False)
    attentions = []
    for index, (kind, window) in enumerate(zip(types, windows, strict=True)):
        heads = _heads_of_layer(fields, index, kind, plain)
        rope = read_rope_of_type(fields, positions, heads.head_dim, kind, _DEFAULT_ROPES)
        joint = is_joint and kind == FULL
        attentions.append(replace(heads, window=window, rope=rope, keys_are_values=joint))
    return attentions


def _heads_of_layer(fields: Fields, index: int, kind: str, plain: AttentionSpec) -> AttentionSpec:
    """Returns the attention with a layer's own heads: those that ``per_layer_config`` has for its
    index, or that older files have for all full layers."""
    if "per_layer_config" in fields.values:
        known = read_own_fields(fields, index, {"head_dim", "num_key_value_heads"})
        head_dim = known.integer("head_dim", plain.head_dim)
        num_kv_heads = known.integer("num_key_value_heads", plain.num_kv_heads)
    elif kind == FULL:
        known, head_dim = fields, fields.integer("global_head_dim", 512)
        is_joint = fields.flag("attention_k_eq_v", False)
        of_full = fields.optional_integer("num_global_key_value_heads") if is_joint else None
        num_kv_heads = of_full or plain.num_kv_heads
    else:
        return plain
    if head_dim % 2 or plain.num_heads % num_kv_heads:
        raise known.error(
            f"layer {index}: {num_kv_heads} key-value heads with a head_dim of {head_dim} do not "
            f"fit to {plain.num_heads} heads"
        )
    return replace(plain, num_kv_heads=num_kv_heads, head_dim=head_dim)


_DEFAULT_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def read_kv_sources(fields: Fields, types: tuple[str, ...], num_shared: int) -> list[int | None]:
    """Returns for each layer the one whose keys and values it reads: of the last
    ``num_kv_shared_layers``, by default `num_shared`, the last layer of its type before these."""
    first = len(types) - fields.integer("num_kv_shared_layers", num_shared, minimum=0)
    last = {kind: index for index, kind in enumerate(types[: max(first, 0)])}
    lacking = [kind for kind in types[max(first, 0) :] if kind not in last]
    if lacking:
        raise fields.error(
            f"num_kv_shared_layers ({len(types) - first}) leaves no layer of type {lacking[0]!r} "
            "that has keys and values"
        )
    return [None if index < first else last[kind] for index, kind in enumerate(types)]


def unread_keys(sources: list[int | None]) -> tuple[str, ...]:
    """Returns the prefixes of the tensors that layers have in checkpoints, although they read the
    keys and values of another one."""
    return tuple(
        f"model.layers.{index}.self_attn.{name}."
        for index, source in enumerate(sources)
        if source is not None
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


def _read_feed_forward(fields: Fields, is_shared: bool) -> MLPSpec | DenseAndExpertsSpec:
    mlp = read_gemma_mlp(fields)
    if is_shared and fields.flag("use_double_wide_mlp", False):
        mlp = replace(mlp, inner=2 * mlp.inner)
    if not fields.flag("enable_moe_block", False):
        return mlp
    if mlp.activation not in _EXPERT_ACTIVATIONS:
        raise fields.error(f"experts with hidden_activation {mlp.activation!r} are not supported")
    num_experts, top_k = fields.integer("num_experts"), fields.integer("top_k_experts")
    if top_k > num_experts:
        raise fields.error(f"top_k_experts ({top_k}) is more than num_experts ({num_experts})")
    experts = MoESpec(
        num_experts=num_experts,
        top_k=top_k,
        inner=fields.integer("moe_intermediate_size"),
        activation=_EXPERT_ACTIVATIONS[mlp.activation],
        renormalize=True,
        scaled=True,
    )
    scale = fields.integer("hidden_size") ** -0.5
    return DenseAndExpertsSpec(mlp=mlp, experts=experts, router_scale=scale)


def _read_per_layer(fields: Fields, vocab_size: int) -> PerLayerSpec | None:
    width = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    if not width:
        return None
    padding = fields.integer("pad_token_id", 0, minimum=0)
    rows = fields.integer("vocab_size_per_layer_input", 262_144)
    if rows < vocab_size or padding >= rows:
        raise fields.error(f"vocab_size_per_layer_input ({rows}) has no row for some tokens")
    activation = read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    return PerLayerSpec(vocab_size=rows, width=width, activation=activation, padding=padding)
