"""XGLM (Lin et al., 2021): BioGPT with sinusoids in place of learned positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.biogpt import named_weights as biogpt_weights
from shmllm.models.families.bloom import with_own_sizes
from shmllm.models.families.opt import opt_model
from shmllm.models.fields import Fields
from shmllm.models.readers import read_activation, read_num_layers, read_positions
from shmllm.models.specs import MLPSpec

_SIZES = {
    "hidden_size": "d_model",
    "num_attention_heads": "attention_heads",
    "num_hidden_layers": "num_layers",
}
"""For each name of a size, XGLM's own."""
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_008,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
}


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("add_cross_attention", False):
        raise fields.error("add_cross_attention true is not supported")
    fields = with_own_sizes(fields, _SIZES).with_defaults(_DEFAULTS)
    mlp = MLPSpec(
        inner=fields.integer("ffn_dim", 4096),
        activation=read_activation(fields, "activation_function", "gelu"),
        gated=False,
        bias=True,
    )
    model = opt_model(fields, mlp, read_num_layers(fields), read_positions(fields, 2048))
    padding = fields.integer("pad_token_id", 1, minimum=0)
    if model.first_position <= padding < model.num_learned_positions:
        raise fields.error(f"pad_token_id {padding} is not supported: its position would be zeros")
    scales = fields.flag("scale_embedding", True)
    return replace(
        model,
        embedding_scale=math.sqrt(model.hidden_size) if scales else 1.0,
        sinusoids="fairseq",
        skipped_prefixes=("model.embed_positions.",),
    )


named_weights = biogpt_weights
