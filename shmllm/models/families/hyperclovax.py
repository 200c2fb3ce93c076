"""HyperCLOVA X SEED: Granite with further norms behind attention and MLP; a factor multiplies the
logits, where Granite's divides them."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.granite import with_factors
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms

_NORMS = LayerNorms(
    before_mixer="input_layernorm",
    after_mixer="post_norm1",
    before_mlp="post_attention_layernorm",
    after_mlp="post_norm2",
)


def configure(fields: Fields) -> ModelConfig:
    model = configure_llama(fields)
    scale = model.attentions[0].scale
    model = with_factors(fields.with_defaults({"attention_multiplier": scale}), model)
    if fields.flag("use_post_norm", True):
        layers = tuple(replace(layer, norms=_NORMS) for layer in model.layers)
        model = replace(model, layers=layers)
    return replace(model, logits_scale=fields.number("logits_scaling", 1.0))
