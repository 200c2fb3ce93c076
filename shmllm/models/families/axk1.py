"""A.X K1: DeepSeek-V3 with a norm behind the experts of each layer (SK Telecom, "A.X K1 Technical
Report", 2026)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.bailing_moe_v2 import further_layers
from shmllm.models.families.deepseek_v3 import read_latent_attention, read_sigmoid_experts
from shmllm.models.families.deepseek_v32 import with_mlps
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import PRE_NORMS
from shmllm.models.readers import read_model, read_num_layers, read_positions
from shmllm.models.specs import MLPSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_BEHIND = "post_mlp_layernorm"
_NORMS = replace(PRE_NORMS, after_mlp=_BEHIND)


def configure(fields: Fields) -> ModelConfig:
    """Returns the configuration. No ``topk_method`` decides anything, as in transformers: experts
    are chosen in groups, and the bias of the choice is 0 where a checkpoint has none."""
    fields = fields.null_as_false("rope_interleave", "norm_topk_prob")
    fields = fields.with_values(fields.values | {"topk_method": None})
    if fields.values.get("q_lora_rank", 1536) is None:
        raise fields.error("q_lora_rank null is not supported")
    positions = read_positions(fields, 32_768)
    attention = read_latent_attention(
        fields, positions, interleaved=fields.flag("rope_interleave", True)
    )
    experts = read_sigmoid_experts(
        fields, inner=2048, num_experts=192, num_groups=8, top_groups=4, weight_scale=2.5
    )
    mixers = [attention] * read_num_layers(fields)
    layers = [
        layer if isinstance(layer.mlp, MLPSpec) else replace(layer, norms=_NORMS)
        for layer in with_mlps(fields, mixers, experts, num_dense=1)
    ]
    dense = [index for index, layer in enumerate(layers) if isinstance(layer.mlp, MLPSpec)]
    unused = tuple(f"model.layers.{index}.{_BEHIND}." for index in dense)
    return replace(
        read_model(fields, layers, positions),
        skipped_prefixes=(*further_layers(fields, len(layers)), *unused),
        zeros_if_absent=("mlp.gate.e_score_correction_bias",),
    )


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the norms behind experts under the names of transformers'
    modules."""
    return {
        name.replace(_BEHIND, f"mlp.{_BEHIND}"): views
        for name, views in weights.items()
        if _BEHIND in name
    }
