"""MPT (MosaicML, 2023): attention falls with the distance in place of positions; there are no
biases, also none of LayerNorms."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.bias_specs import MOST_BIASED_POSITIONS, LinearBiases
from shmllm.models.config import ModelConfig
from shmllm.models.families.bloom import with_own_sizes
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.mixer_specs import AttentionSpec
from shmllm.models.readers import read_attention, read_model, read_num_layers
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_SIZES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}
"""For each name of a size, MPT's own."""
_ONLY: dict[str, Any] = {"expansion_ratio": 4, "no_bias": True}
_ONLY_OF_ATTENTION: dict[str, Any] = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
    "qk_gn": False,
    "rope": False,
}
_NORMS = LayerNorms(before_mixer="norm_1", before_mlp="norm_2")
_NAMES = {
    "model.layers.": "transformer.blocks.",
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.norm_f.",
    ".self_attn.o_proj.": ".attn.out_proj.",
    ".self_attn.": ".attn.",
    ".mlp.": ".ffn.",
}
_QKV = "Wqkv", ("q_proj", "k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    if (scale := fields.values.get("logit_scale")) is not None:
        raise fields.error(f"logit_scale {scale!r} is not supported; supported: null")
    fields = with_own_sizes(fields, _SIZES)
    positions = fields.integer("max_seq_len", 2048, maximum=MOST_BIASED_POSITIONS)
    mlp = MLPSpec(inner=4 * fields.integer("hidden_size"), activation="gelu", gated=False)
    layer = LayerSpec(mixer=_read_attention(fields, positions), mlp=mlp, norms=_NORMS)
    model = read_model(fields, [layer] * read_num_layers(fields), positions, tied=True)
    eps = fields.number("layer_norm_epsilon", 1e-5)
    return replace(model, norm=NormSpec(kind="layer", eps=eps))


def _read_attention(fields: Fields, positions: int) -> AttentionSpec:
    own = Fields(fields.table("attn_config"), f"{fields.where}: attn_config")
    for name, supported in _ONLY_OF_ATTENTION.items():
        check_choice(own, name, supported)
    attention = read_attention(fields)
    scale = own.optional_number("softmax_scale")
    return replace(
        attention,
        scale=attention.scale if scale is None else scale,
        clip=own.optional_number("clip_qkv") or None,
        biases=LinearBiases(
            positions, attention.num_heads, own.integer("alibi_bias_max", 8, minimum=1)
        ),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused

    fused = with_fused(weights, _QKV)
    return {renamed(name, _NAMES): views for name, views in fused.items()}
