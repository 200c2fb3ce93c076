"""InternLM 2 and 2.5 (Cai et al., 2024): Llama under other names. Checkpoints have the projections
of a group of queries, of its key and of its value side by side, group by group. The defaults are
those of the models' own configuration class."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
    with_rope,
)
from shmllm.models.registry import Purpose, purpose_of
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

NORMS = LayerNorms(before_mixer="attention_norm", before_mlp="ffn_norm")
_NAMES = {
    "model.embed_tokens.": "model.tok_embeddings.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".self_attn.": ".attention.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
}
_QKV = "wqkv", ("q_proj", "k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    positions = read_positions(fields, 2048)
    bias = fields.flag("bias", True)
    attention = read_attention(fields, bias=bias, output_bias=bias)
    layer = LayerSpec(
        mixer=with_rope(attention, fields, positions), mlp=read_mlp(fields), norms=NORMS
    )
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    if purpose_of(architecture_name(fields)) is Purpose.REWARD:
        steps = (DenseSpec(name="v_head", inputs=model.hidden_size, outputs=1),)
        model = replace(model, head=HeadSpec(kind="classifier", steps=steps, labels=("LABEL_0",)))
    return model


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused_groups

    found = with_fused_groups(weights, _QKV, config.attentions[0].num_kv_heads)
    return {renamed(name, _NAMES): views for name, views in found.items()}
