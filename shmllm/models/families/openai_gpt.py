"""GPT (Radford et al., 2018): GPT-2 with norms behind the additions, and none at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families import gpt2
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
_NORMS = LayerNorms(after_mixer="ln_1", after_mlp="ln_2", of_sums=True)
_NAMES = {
    "transformer.wte.": "transformer.tokens_embed.",
    "transformer.wpe.": "transformer.positions_embed.",
}


def configure(fields: Fields) -> ModelConfig:
    activation = fields.meaning("afn", _ACTIVATIONS, "gelu")
    fields = fields.with_defaults({"vocab_size": 40_478, "n_positions": 512})
    own = {"activation_function": activation, "n_inner": None}
    model = gpt2.configure_with(fields.with_values(fields.values | own), num_kv_heads=None)
    layers = tuple(replace(layer, norms=_NORMS) for layer in model.layers)
    return replace(model, layers=layers, final_norm=False, transposed=True)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    found = gpt2.named_weights(weights, config)
    return {renamed(name, _NAMES): views for name, views in found.items()}
