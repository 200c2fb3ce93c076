"""LongCat-Flash (2025): layers of two latent attentions and two MLPs, with experts beside them that
read what the first MLP reads and are added behind the second one; some choices are no experts.

A layer of the checkpoint is two here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.combined_specs import ShortcutExpertsSpec
from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import (
    check_choice,
    read_latent_attention,
    read_routed_experts,
)
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import MOST_LAYERS, read_mlp, read_model, read_norm, read_positions
from shmllm.models.specs import MoESpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_OTHER_NAMES = {
    "intermediate_size": ("ffn_hidden_size", 12_288),
    "moe_intermediate_size": ("expert_ffn_hidden_size", 2048),
    "num_experts_per_tok": ("moe_topk", 12),
}
_DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "rope_theta": 10_000_000.0,
}
_ONLY: dict[str, str | float] = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
    "mlp_bias": False,
    "router_bias": False,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "n_shared_experts": 0,
    "n_group": 1,
}
"""Fields whose other values are not computed."""
_NAMES = {
    ".self_attn.": ".self_attn.{}.",
    "input_layernorm.": "input_layernorm.{}.",
    "post_attention_layernorm.": "post_attention_layernorm.{}.",
    ".mlp.gate_proj.": ".mlps.{}.gate_proj.",
    ".mlp.up_proj.": ".mlps.{}.up_proj.",
    ".mlp.down_proj.": ".mlps.{}.down_proj.",
    ".mlp.gate.weight": ".mlp.router.classifier.weight",
    ".mlp.gate.e_score": ".mlp.router.e_score",
}
"""Parts of names; the number is that of the half of a layer."""
_LAYER = "model.layers."


def configure(fields: Fields) -> ModelConfig:
    """Returns the configuration.

    Queries are multiplied by ``sqrt(hidden / query rank)``, and latents, but not the rotated part
    of keys, by ``sqrt(hidden / rank)`` (section 2.3.1). The same scores follow if these factors are
    those of scores, and the rotated parts are divided by the second one; that also multiplies
    values, so what attention adds.
    """
    for name, value in _ONLY.items():
        check_choice(fields, name, value)
    num_layers = _read_num_layers(fields)
    given = fields.values  # transformers takes the names of other families, too
    names = {ours: own for ours, own in _OTHER_NAMES.items() if given.get(ours) is None}
    fields = fields.under_names(names).with_absent(_DEFAULTS)
    if fields.values.get("q_lora_rank", 0) is None:
        raise fields.error("q_lora_rank null is not supported: queries have a factor of it")
    positions, hidden = read_positions(fields, 131_072), fields.integer("hidden_size")
    attention = read_latent_attention(fields, positions, interleaved=True)
    assert attention.query_rank is not None, "it is no null"
    width = attention.nope_dim + attention.rope_dim
    check_choice(fields, "qk_head_dim", width)
    check_choice(fields, "head_dim", attention.rope_dim)  # that of the rotation
    factor = (hidden / attention.rank) ** 0.5
    attention = replace(
        attention,
        scale=attention.scale * (hidden / attention.query_rank) ** 0.5 * factor,
        rope=replace(attention.rope, magnitude=factor**-0.5),
    )
    mlp, experts = read_mlp(fields), _read_experts(fields)
    first = ShortcutExpertsSpec(mlp=mlp, experts=experts)
    halves = [
        LayerSpec(mixer=attention, mlp=first, mixed_scale=factor),
        LayerSpec(mixer=attention, mlp=mlp, mixed_scale=factor, adds_shortcut=True),
    ]
    return replace(
        read_model(fields, halves * num_layers, positions),
        norm=read_norm(fields, default=1e-5),
        skipped_prefixes=("model.mtp.",),  # they predict further tokens
        # Files of transformers have gates and ups of choices that are no experts.
        skipped_experts=(range(num_layers), range(experts.num_experts, experts.num_choices)),
    )


def _read_num_layers(fields: Fields) -> int:
    halves = fields.optional_integer("num_hidden_layers")
    default = 28 if halves is None else halves // 2
    num_layers = fields.integer("num_layers", default, maximum=MOST_LAYERS // 2)
    if halves is not None and halves // 2 != num_layers:
        raise fields.error(
            f"num_hidden_layers ({halves}) is no pair of each of num_layers ({num_layers})"
        )
    return num_layers


def _read_experts(fields: Fields) -> MoESpec:
    given = fields.values.get("zero_expert_num", 256)
    identities = 0 if given is None else fields.integer("zero_expert_num", 256, minimum=0)
    choices = identities + fields.integer("n_routed_experts", 512)
    fields = fields.with_values(fields.values | {"n_routed_experts": choices})
    experts = read_routed_experts(fields, inner=2048, num_experts=None, top_k=12, num_shared=0)
    return replace(
        experts,
        num_experts=choices - identities,
        identities=identities,
        correction_bias=True,
        weight_scale=fields.number("routed_scaling_factor", 6.0),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {_own_name(name): views for name, views in weights.items()}


module_weights = named_weights


def _own_name(name: str) -> str:
    if not name.startswith(_LAYER):
        return name
    index, rest = name.removeprefix(_LAYER).split(".", 1)
    layer, half = divmod(int(index), 2)
    rest = renamed(f".{rest}", _NAMES).format(half)
    return f"{_LAYER}{layer}{rest}"
