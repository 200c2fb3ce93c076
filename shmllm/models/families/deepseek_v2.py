"""DeepSeek-V2: latent attention; experts chosen by a softmax, in groups or among all."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import (
    check_choice,
    read_latent_attention,
    read_routed_experts,
    with_dense_layers,
    with_groups,
)
from shmllm.models.fields import Fields
from shmllm.models.readers import read_model, read_positions
from shmllm.models.specs import MoESpec

IN_GROUPS = "group_limited_greedy"


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 2048)
    attention = read_latent_attention(fields, positions, interleaved=True)
    layers = with_dense_layers(fields, attention, read_experts(fields), default=0)
    return read_model(fields, layers, positions)


def read_experts(fields: Fields) -> MoESpec:
    """Returns experts chosen by a softmax, with the MLP that all tokens go to."""
    check_choice(fields, "scoring_func", "softmax")
    if fields.flag("norm_topk_prob", False):
        raise fields.error("norm_topk_prob true is not supported; transformers ignores it")
    experts = read_routed_experts(fields, inner=1407, num_experts=64, top_k=None, num_shared=2)
    experts = replace(experts, weight_scale=fields.number("routed_scaling_factor", 1.0))
    method = fields.text("topk_method", "greedy")
    if method == IN_GROUPS:
        groups = fields.integer("n_group"), fields.integer("topk_group")
        return with_groups(fields, experts, *groups, best_of_group=1)
    if method != "greedy":
        raise fields.error(
            f"topk_method {method!r} is not supported; supported: 'greedy', {IN_GROUPS!r}"
        )
    return experts
