"""The language model of Aria (Li et al., 2024): Llama with experts in place of each MLP, and shared
ones as one MLP. Its tower for images is not computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_experts,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIELDS = {"num_experts": ("moe_num_experts", 8), "num_experts_per_tok": ("moe_topk", 2)}
_MODULE_NAMES = {".mlp.gate.": ".mlp.router."}
_NAMES = _MODULE_NAMES | {
    ".experts.gate_up_proj": ".experts.fc1.weight",
    ".experts.down_proj": ".experts.fc2.weight",
}


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 2048)
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    layer = LayerSpec(mixer=with_rope(attention, fields, positions), mlp=_read_experts(fields))
    return read_model(fields, [layer] * read_num_layers(fields), positions)


def _read_experts(fields: Fields) -> MoESpec:
    inner = fields.integer("intermediate_size", 4096)
    num_shared = fields.integer("moe_num_shared_experts", 2)
    return replace(
        read_experts(fields.under_names(_FIELDS), inner, num_experts=8, top_k=2),
        scoring="softmax_of_top",
        whole=True,
        transposed=True,
        shared=MLPSpec(inner=inner * num_shared, bias=fields.flag("mlp_bias", False)),
        shared_name="shared_experts",
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


def module_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _MODULE_NAMES): views for name, views in weights.items()}
