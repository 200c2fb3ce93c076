"""Falcon 7B, 11B, 40B and 180B (Almazrouei et al., 2023): attention and MLP side by side. Heads of
queries share keys and values, all of them in the first models, groups of them in the later ones;
checkpoints have the projections of each group side by side in one matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import PRE_NORMS, LayerNorms, LayerSpec
from shmllm.models.readers import (
    read_activation,
    read_attention,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NAMES = {
    "model.layers.": "transformer.h.",
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.o_proj.": ".self_attention.dense.",
    ".self_attn.": ".self_attention.",
    ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
}
_QKV = "query_key_value", ("q_proj", "k_proj", "v_proj")

_ONE_NORM = LayerNorms(before_mixer="input_layernorm")
_TWO_NORMS = LayerNorms(before_mixer="ln_attn", before_mlp="ln_mlp")


_OLD_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
}
"""The fields of the first files (RWForCausalLM), and what they are now. Those with a number of key
heads are of the new architecture."""


def configure(fields: Fields) -> ModelConfig:
    fields = _with_new_names(fields)
    if fields.flag("alibi", False):
        raise fields.error("alibi true is not supported: positions are rotations")
    fields = fields.null_as_false("multi_query", "parallel_attn")
    fields = fields.with_values(fields.values | _sizes(fields))
    positions = read_positions(fields, 2048)
    bias = fields.flag("bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    mlp = MLPSpec(
        inner=fields.optional_integer("ffn_hidden_size") or 4 * fields.integer("hidden_size"),
        activation=read_activation(fields, "activation", "gelu"),
        gated=False,
        bias=bias,
    )
    layer = LayerSpec(
        mixer=with_rope(attention, fields, positions),
        mlp=mlp,
        norms=_norms(fields),
        parallel=fields.flag("parallel_attn", True),
    )
    model = read_model(fields, [layer] * read_num_layers(fields), positions, tied=True)
    eps = fields.number("layer_norm_epsilon", 1e-5)
    return replace(model, norm=NormSpec(kind="layer", eps=eps, bias=True))


def _with_new_names(fields: Fields) -> Fields:
    old = {now: fields.values.get(then) for then, now in _OLD_NAMES.items()}
    found = {name: value for name, value in old.items() if value is not None}
    if "num_kv_heads" in found:
        found["new_decoder_architecture"] = True
    return fields.with_defaults(found)


def _sizes(fields: Fields) -> dict[str, int | None]:
    """Returns the hidden size and the heads under the names that `readers.py` reads."""
    num_kv_heads = fields.optional_integer("num_kv_heads")
    if not fields.flag("new_decoder_architecture", False) and fields.flag("multi_query", True):
        num_kv_heads = 1
    hidden_size = fields.optional_integer("n_embed") or fields.integer("hidden_size", 4544)
    return {"num_key_value_heads": num_kv_heads, "head_dim": None, "hidden_size": hidden_size}


def _norms(fields: Fields) -> LayerNorms:
    """Returns the norms of a layer. Fields that transformers' module cannot run are refused."""
    is_new = fields.flag("new_decoder_architecture", False)
    is_parallel = fields.flag("parallel_attn", True)
    if not is_parallel:
        if is_new:
            raise fields.error(
                "parallel_attn false and new_decoder_architecture exclude each other"
            )
        return PRE_NORMS
    count = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if count not in ((1, 2) if is_new else (1,)):
        raise fields.error(
            f"num_ln_in_parallel_attn {count} is not supported; supported: 1, and 2 with "
            "new_decoder_architecture"
        )
    return _TWO_NORMS if count == 2 else _ONE_NORM


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused_groups

    found = with_fused_groups(weights, _QKV, config.attentions[0].num_kv_heads)
    return {renamed(name, _NAMES): views for name, views in found.items()}
