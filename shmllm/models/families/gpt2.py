"""GPT-2: learned positions, LayerNorms with biases, an MLP without a gate. Its checkpoints have
matrices as [in, out], and queries, keys and values in one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import read_activation, read_attention, read_model, read_num_layers
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights
    from shmllm.models.matrices import Destination

_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50257),
    "hidden_size": ("n_embd", 768),
    "num_attention_heads": ("n_head", 12),
    "num_hidden_layers": ("n_layer", 12),
    "max_position_embeddings": ("n_positions", 1024),
}
"""GPT-2's name and default of each field that `readers.py` reads."""

_REFUSED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""The only supported value of each flag, which is its default."""

NAMES = {
    "model.layers.": "transformer.h.",
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.o_proj.": ".attn.c_proj.",
    ".self_attn.": ".attn.",
    ".mlp.up_proj.": ".mlp.c_fc.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}
"""The parts of names that differ from the default ones."""
_TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
QKV = "c_attn", ("q_proj", "k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    for name, supported in _REFUSED.items():
        if fields.flag(name, supported) != supported:
            raise fields.error(f"{name} {not supported} is not supported")
    return replace(configure_with(fields, num_kv_heads=None), transposed=True)


def configure_with(fields: Fields, num_kv_heads: int | None) -> ModelConfig:
    """Returns GPT-2 with so many heads of keys and values; None: as many as those of queries."""
    fields = fields.under_names(_FIELDS)
    heads = {"num_key_value_heads": num_kv_heads, "head_dim": None}  # GPT-2 has no such fields
    fields = fields.with_values(fields.values | heads)
    attention = read_attention(fields, bias=True, output_bias=True)
    mlp = MLPSpec(
        inner=fields.optional_integer("n_inner") or 4 * fields.integer("hidden_size"),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    norms = LayerNorms(before_mixer="ln_1", before_mlp="ln_2")
    layer = LayerSpec(mixer=attention, mlp=mlp, norms=norms)
    positions = fields.integer("max_position_embeddings")
    model = read_model(fields, [layer] * read_num_layers(fields), positions, tied=True)
    return replace(
        model,
        norm=NormSpec(kind="layer", eps=fields.number("layer_norm_epsilon", 1e-5), bias=True),
        num_learned_positions=positions,
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from torch import Tensor

    from shmllm.models.fused_names import with_fused
    from shmllm.models.matrices import TransposedMatrix
    from shmllm.models.quantized import QuantizedMatrix

    def transposed(view: Destination) -> Destination:
        if isinstance(view, Tensor):
            return view.t()
        assert isinstance(view, QuantizedMatrix), "a tensor of a file has one format"
        return TransposedMatrix(view)

    found: NamedWeights = {}
    for name, views in with_fused(weights, QKV).items():
        name = renamed(name, NAMES)
        is_transposed = name.endswith(_TRANSPOSED)
        found[name] = tuple(map(transposed, views)) if is_transposed else views
    return found
