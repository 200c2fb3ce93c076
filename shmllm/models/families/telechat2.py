"""TeleChat 2: Llama with biases of the last projections of attention and MLP. Checkpoints have key
and value of each head side by side. The defaults are those of the models' own configuration class.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import check_choice
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import read_attention, read_model, read_norm, read_num_layers
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import MLPSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_SIZES = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
"""For each name of a size, the family's own."""
_ONLY = {"apply_residual_connection_post_layernorm": False, "embed_layernorm": False}
_NAMES = {
    "model.layers.": "transformer.h.",
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.q_proj.": ".self_attention.query.",
    ".self_attn.o_proj.": ".self_attention.dense.",
    ".self_attn.": ".self_attention.",
}
_KEY_VALUE = "key_value", ("k_proj", "v_proj")


def configure(fields: Fields) -> ModelConfig:
    for name, supported in _ONLY.items():
        check_choice(fields, name, supported)
    own = {name: fields.values.get(known) for name, known in _SIZES.items()}
    found = {name: value for name, value in own.items() if value is not None}
    fields = fields.with_values(fields.values | {"head_dim": None} | found)
    attention = read_attention(fields, output_bias=True)
    positions = fields.integer("training_seqlen", 8192)
    rope = RopeConfig(rotary_dim=attention.head_dim, theta=_theta(fields, attention.head_dim))
    mlp = MLPSpec(inner=fields.integer("ffn_hidden_size", 12_288), bias=True, up_bias=False)
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=mlp)
    model = read_model(fields, [layer] * read_num_layers(fields), positions, tied=True)
    return replace(model, norm=read_norm(fields, "layer_norm_epsilon", default=1e-5))


def _theta(fields: Fields, head_dim: int) -> float:
    """Returns the base of the wavelengths of texts of at most ``training_seqlen`` tokens: the
    models' code scales it as for one of that length."""
    trained, first = (fields.integer(f"{each}_seqlen", 8192) for each in ("training", "base"))
    alpha = max(2 ** math.ceil(math.log2(trained / first) + 1) - 1, 1)
    return 10_000.0 * math.pow(alpha, head_dim / (head_dim - 2))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_fused_groups

    found = with_fused_groups(weights, _KEY_VALUE, config.attentions[0].num_kv_heads)
    return {renamed(name, _NAMES): views for name, views in found.items()}
