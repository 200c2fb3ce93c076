"""Nomic BERT: BERT with rotations in place of learned positions, gated MLPs and no biases
(Nussbaum et al., 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.bert import read_head, tanh_dense
from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.readers import read_activation
from shmllm.models.rotary_encoder import other_names, published_weights, read_rotary_encoder
from shmllm.models.specs import MLPSpec

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
    "qkv_proj_bias": (False, True),
    "mlp_fc1_bias": (False, True),
    "mlp_fc2_bias": (False, True),
    "rotary_emb_fraction": (1.0, 0.0),
    "rotary_emb_interleaved": (False, False),
    "rotary_emb_scale_base": (None, None),
    "scale_attn_weights": (True, True),
    "scale_attn_by_inverse_layer_idx": (False, False),
    "num_experts": (0, 0),
}
"""What is computed of the authors' other fields, and their meaning where they are absent."""

_GATES = {"swiglu": "silu", "geglu": "gelu"}

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
_QKV = "Wqkv", ("q_proj", "k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    if fields.values.get("n_embd") is not None:
        fields = _published(fields)
    activation = read_activation(fields, "hidden_act", "silu")
    mlp = MLPSpec(inner=fields.integer("intermediate_size"), activation=activation)
    positions = fields.integer("max_position_embeddings", 2048)
    head = read_head(fields, tanh_dense(fields, "pooler.dense"))
    return replace(
        read_rotary_encoder(fields, mlp, positions, theta=_THETA, bias=False),
        head=head,
        num_token_types=fields.integer("type_vocab_size", 2),
        skipped_prefixes=("pooler.", "cls.") if head is None else ("cls.",),
    )


def _published(fields: Fields) -> Fields:
    """Returns the fields of the authors' files under transformers' names."""
    for name, (computed, absent) in _COMPUTED.items():
        found = fields.values.get(name, absent)
        if found != computed:
            raise fields.error(f"{name} {found!r} is not supported; supported: {computed!r}")
    own = fields.under_names(_FIELDS)
    values = own.values | {"hidden_act": fields.meaning("activation_function", _GATES)}
    if fields.values.get("rotary_scaling_factor"):  # angles of longer texts depend on their length
        values["max_position_embeddings"] = fields.integer("max_trained_positions", 2048)
    return own.with_values(values)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return published_weights(weights, _NAMES, _QKV)
