"""Sarvam 105B: DeepSeek-V3's latent attention, by default without a rank of queries, and its
experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.bailing_moe_v2 import further_layers
from shmllm.models.families.deepseek_v3 import read_latent_attention, with_dense_layers
from shmllm.models.families.sarvam_moe import read_sarvam_experts, under_deepseeks_names
from shmllm.models.fields import Fields
from shmllm.models.readers import read_model, read_positions

_YARN = "deepseek_yarn"
"""What Sarvam's own files call yarn."""


def configure(fields: Fields) -> ModelConfig:
    fields = under_deepseeks_names(fields).null_as_false("rope_interleave", "norm_topk_prob")
    fields = _with_plain_yarn(fields).with_absent({"q_lora_rank": None})
    positions = read_positions(fields, 4096)
    attention = read_latent_attention(
        fields, positions, interleaved=fields.flag("rope_interleave", True)
    )
    experts = read_sarvam_experts(fields, inner=2048, top_k=8)
    layers = with_dense_layers(fields, attention, experts, default=1)
    model = read_model(fields, layers, positions)
    return replace(model, skipped_prefixes=further_layers(fields, len(layers)))


def _with_plain_yarn(fields: Fields) -> Fields:
    scaling: Any = fields.values.get("rope_scaling")
    types = (scaling.get("type"), scaling.get("rope_type")) if isinstance(scaling, dict) else ()
    if _YARN not in types:
        return fields
    plain = {name: value for name, value in scaling.items() if name != "type"}
    return fields.with_values(fields.values | {"rope_scaling": plain | {"rope_type": "yarn"}})
