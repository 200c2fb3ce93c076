"""ChatGLM2, ChatGLM3 and the first GLM-4-9B: GLM with the authors' names of weights, of which
queries, keys and values are one. `formats/chatglm.py` reads their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.glm import configure

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

__all__ = ["configure", "named_weights"]

_MODULES = {
    "model.embed_tokens.": "transformer.embedding.word_embeddings.",
    "model.norm.": "transformer.encoder.final_layernorm.",
    "model.layers.": "transformer.encoder.layers.",
    "lm_head.": "transformer.output_layer.",
    ".self_attn.qkv_proj.": ".self_attention.query_key_value.",
    ".self_attn.o_proj.": ".self_attention.dense.",
    ".mlp.gate_up_proj.": ".mlp.dense_h_to_4h.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
}


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import GATE_UP, QKV, with_fused

    found: NamedWeights = {}
    for name, views in with_fused(weights, QKV, GATE_UP).items():
        for module, own in _MODULES.items():
            name = name.replace(module, own)
        found[name] = views
    return found
