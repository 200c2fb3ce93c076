"""GPT-J (Wang and Komatsuzaki, 2021): attention and MLP side by side behind one LayerNorm; the
first elements of each head rotate, neighbours together; the LM head has a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import read_activation, read_attention, read_model, read_num_layers
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50_400),
    "hidden_size": ("n_embd", 4096),
    "num_attention_heads": ("n_head", 16),
    "num_hidden_layers": ("n_layer", 28),
    "max_position_embeddings": ("n_positions", 2048),
}
"""GPT-J's name and default of each field that `readers.py` reads."""

_NAMES = {
    "model.layers.": "transformer.h.",
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.o_proj.": ".attn.out_proj.",
    ".self_attn.": ".attn.",
    ".mlp.up_proj.": ".mlp.fc_in.",
    ".mlp.down_proj.": ".mlp.fc_out.",
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.under_names(_FIELDS)
    plain = {"num_key_value_heads": None, "head_dim": None}  # GPT-J has no such fields
    fields = fields.with_values(fields.values | plain)
    attention = read_attention(fields)
    mlp = MLPSpec(
        inner=fields.optional_integer("n_inner") or 4 * fields.integer("hidden_size"),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    layer = LayerSpec(
        mixer=replace(attention, rope=_read_rope(fields, attention.head_dim)),
        mlp=mlp,
        norms=LayerNorms(before_mixer="ln_1"),
        parallel=True,
    )
    positions = fields.integer("max_position_embeddings")
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_epsilon", 1e-5), bias=True)
    return replace(model, norm=norm, lm_head_bias=True)


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    if fields.values.get("rotary_dim", 64) is None:
        raise fields.error("rotary_dim null is not supported")
    rotary_dim = fields.integer("rotary_dim", 64)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise fields.error(f"rotary_dim ({rotary_dim}) must be even and at most {head_dim}")
    return RopeConfig(rotary_dim=rotary_dim, interleaved=True)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
