"""GPT-Neo (Black et al., 2021): GPT-2 with matrices as [out, in], scores without a scale, and a
window in every other layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms, LayerSpec
from shmllm.models.readers import (
    MOST_LAYERS,
    read_activation,
    read_attention,
    read_model,
    read_num_layers,
    with_windows,
)
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50_257),
    "hidden_size": ("hidden_size", 2048),
    "num_attention_heads": ("num_heads", 16),
    "num_hidden_layers": ("num_layers", 24),
    "max_position_embeddings": ("max_position_embeddings", 2048),
}
"""GPT-Neo's name and default of each field that `readers.py` reads."""

_NAMES = {
    "model.layers.": "transformer.h.",
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.o_proj.": ".attn.attention.out_proj.",
    ".self_attn.": ".attn.attention.",
    ".mlp.up_proj.": ".mlp.c_fc.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}
_GLOBAL, _LOCAL = "global", "local"


def configure(fields: Fields) -> ModelConfig:
    fields = fields.under_names(_FIELDS)
    plain = {"num_key_value_heads": None, "head_dim": None}  # GPT-Neo has no such fields
    fields = fields.with_values(fields.values | plain)
    hidden, positions = fields.integer("hidden_size"), fields.integer("max_position_embeddings")
    mlp = MLPSpec(
        inner=fields.optional_integer("intermediate_size") or 4 * hidden,
        activation=read_activation(fields, "activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    layer = LayerSpec(
        mixer=replace(read_attention(fields, output_bias=True), scale=1.0),
        mlp=mlp,
        norms=LayerNorms(before_mixer="ln_1", before_mlp="ln_2"),
    )
    model = read_model(fields, with_windows(layer, _windows(fields)), positions, tied=True)
    return replace(
        model,
        norm=NormSpec(kind="layer", eps=fields.number("layer_norm_epsilon", 1e-5), bias=True),
        num_learned_positions=positions,
    )


def _windows(fields: Fields) -> list[int | None]:
    """Returns the window of each layer. ``attention_types`` lists pairs of types of layers and how
    often these follow each other."""
    types: list[str] = []
    for item in fields.values.get("attention_types") or [[[_GLOBAL, _LOCAL], 12]]:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], list):
            raise fields.error("'attention_types' must list pairs of a list of types and a number")
        count = Fields({"attention_types": item[1]}, fields.where)
        types += item[0] * count.integer("attention_types", maximum=MOST_LAYERS)
    unknown = [kind for kind in types if kind not in (_GLOBAL, _LOCAL)]
    if unknown:
        raise fields.error(f"'attention_types': {unknown[0]!r} is not supported")
    if len(types) != (num_layers := read_num_layers(fields)):
        raise fields.error(f"'attention_types' are those of {len(types)} layers, not {num_layers}")
    window = fields.integer("window_size", 256)
    return [window if kind == _LOCAL else None for kind in types]


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}
