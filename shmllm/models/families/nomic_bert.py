"""Nomic BERT: BERT with rotations in place of learned positions. Version 1 has gated MLPs and no
biases (Nussbaum et al., 2024), version 2 has experts in every second layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.bert import read_head, tanh_dense
from shmllm.models.families.rotary_encoder import (
    other_names,
    published_weights,
    read_rotary_encoder,
)
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import read_activation
from shmllm.models.specs import MLPSpec, MoESpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

__all__ = ["configure", "named_weights", "other_names"]

_THETA = 1000.0

_FIELDS: dict[str, tuple[str, Any]] = {
    "hidden_size": ("n_embd", None),
    "num_attention_heads": ("n_head", None),
    "num_hidden_layers": ("n_layer", None),
    "intermediate_size": ("n_inner", None),
    "layer_norm_eps": ("layer_norm_epsilon", None),
    "rope_theta": ("rotary_emb_base", None),
    "max_position_embeddings": ("n_positions", None),
}
"""The names that the authors' files have for fields, which are GPT-2's. They may have both."""

_COMPUTED: dict[str, tuple[Any, Any]] = {
    "prenorm": (False, False),
    "parallel_block": (False, False),
    "causal": (False, False),
    "use_rms_norm": (False, False),
    "rotary_emb_fraction": (1.0, 0.0),
    "rotary_emb_interleaved": (False, False),
    "rotary_emb_scale_base": (None, None),
    "scale_attn_weights": (True, True),
    "scale_attn_by_inverse_layer_idx": (False, False),
    "moe_normalize_expert_weights": (False, False),
    "expert_choice_router": (False, False),
    "num_shared_experts": (0, 0),
    "ffn_div": (1, 1),
}
"""What is computed of the authors' other fields, and their meaning where they are absent."""

_GATES = {"swiglu": "silu", "geglu": "gelu"}
_ACTIVATIONS = _GATES | {"gelu": "gelu"}

_NAMES = {
    "model.layers.": "encoder.layers.",
    "embeddings.LayerNorm.": "emb_ln.",
    ".self_attn.o_proj.": ".attn.out_proj.",
    ".self_attn.": ".attn.",
    ".mlp.up_proj.": ".mlp.fc11.",
    ".mlp.gate_proj.": ".mlp.fc12.",
    ".mlp.down_proj.": ".mlp.fc2.",
    ".post_attention_layernorm.": ".norm1.",
    ".post_mlp_layernorm.": ".norm2.",
}
_UNGATED = {".mlp.up_proj.": ".mlp.fc1."}
_EXPERTS = {
    ".mlp.gate.": ".mlp.router.layer.",
    ".mlp.experts.up_proj": ".mlp.experts.mlp.w1",
    ".mlp.experts.down_proj": ".mlp.experts.mlp.w2",
}
_QKV = "Wqkv", ("q_proj", "k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    is_published = fields.values.get("n_embd") is not None
    if is_published:
        fields = _published(fields)
    mlp = MLPSpec(
        inner=fields.integer("intermediate_size"),
        activation=read_activation(fields, "hidden_act", "silu"),
        gated=not is_published or fields.text("activation_function") in _GATES,
        bias=is_published and _has_biases(fields),
    )
    positions = fields.integer("max_position_embeddings", 2048)
    bias = is_published and fields.flag("qkv_proj_bias", True)
    model = read_rotary_encoder(fields, mlp, positions, theta=_THETA, bias=bias)
    head = read_head(fields, tanh_dense(fields, "pooler.dense"))
    return replace(
        model,
        layers=_with_experts(fields, model.layers, mlp) if is_published else model.layers,
        head=head,
        num_token_types=fields.integer("type_vocab_size", 2),
        skipped_prefixes=("pooler.", "cls.") if head is None else ("cls.",),
    )


def _published(fields: Fields) -> Fields:
    """Returns the fields of the authors' files under transformers' names."""
    for name, (computed, absent) in _COMPUTED.items():
        found = fields.values.get(name)
        found = absent if found is None else found
        if found != computed:
            raise fields.error(f"{name} {found!r} is not supported; supported: {computed!r}")
    own = fields.under_names(_FIELDS)
    values = own.values | {"hidden_act": fields.meaning("activation_function", _ACTIVATIONS)}
    if fields.values.get("rotary_scaling_factor"):  # angles of longer texts depend on their length
        values["max_position_embeddings"] = fields.integer("max_trained_positions", 2048)
    return own.with_values(values)


def _has_biases(fields: Fields) -> bool:
    """Returns whether the projections of MLPs have a bias: all of them, or none."""
    first, last = (fields.flag(name, True) for name in ("mlp_fc1_bias", "mlp_fc2_bias"))
    if first != last:
        raise fields.error(f"mlp_fc1_bias {first} is not supported with mlp_fc2_bias {last}")
    return first


def _with_experts(
    fields: Fields, layers: tuple[LayerSpec, ...], mlp: MLPSpec
) -> tuple[LayerSpec, ...]:
    """Returns layers of which every nth one has experts, from the second one on."""
    every = fields.integer("moe_every_n_layers", 0, minimum=0)
    if every < 2:
        return layers
    if mlp.gated:
        raise fields.error("experts with gates are not supported; supported: 'gelu' without")
    experts = MoESpec(
        num_experts=fields.integer("num_experts"),
        top_k=fields.integer("moe_top_k"),
        inner=mlp.inner,
        activation="gelu",
        output_bias=True,
        whole=True,
    )
    if experts.top_k > experts.num_experts:
        raise fields.error(f"moe_top_k must be at most num_experts ({experts.num_experts})")
    return tuple(
        replace(layer, mlp=experts) if index % every == 1 else layer
        for index, layer in enumerate(layers)
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.matrices import stacked

    is_gated = any(isinstance(each, MLPSpec) and each.gated for each in config.feed_forwards)
    names = {**_EXPERTS, **_NAMES, **({} if is_gated else _UNGATED)}
    found = published_weights(weights, names, _QKV)
    for name, (view, *_) in found.items():
        if ".experts.mlp." in name:
            found[name] = (stacked(view, transposed=name.endswith("w2")),)
    return found
