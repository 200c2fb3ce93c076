"""T5 (Raffel et al., 2020), mT5 and UMT5: an encoder of texts, and a decoder that attends to its
results. Norms are before attention and MLP, scores have no scale, and those within a text have a
bias for the distance between two tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.encoder_decoder import name_of_pair, pairs_of_layers, text_begins
from shmllm.models.families.t5_encoder import read_biases, read_eps, read_mlp, with_own_names
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms
from shmllm.models.readers import MOST_LAYERS, read_attention, read_model, read_num_layers
from shmllm.models.specs import NormSpec
from shmllm.models.text.specs import T5Tower, TextSpec, activation_of
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_NORMS = (
    LayerNorms(before_mixer="layer.0.layer_norm"),
    LayerNorms(before_mixer="layer.1.layer_norm", before_mlp="layer.2.layer_norm"),
)
_TIED = "tie_word_embeddings"
_BIASES = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_NAMES = {
    "model.embed_tokens.": "shared.",
    "model.norm.": "model.decoder.final_layer_norm.",
    "model.layers.": "decoder.block.",
    ".mlp.down_proj.": ".layer.2.DenseReluDense.wo.",
    ".mlp.gate_proj.": ".layer.2.DenseReluDense.wi_0.",
    ".self_attn.relative_": ".layer.0.SelfAttention.relative_",
    **{f".self_attn.{each}_proj.": f".layer.0.SelfAttention.{each}." for each in "qkvo"},
}
_OF_CROSS = ("layer.0.SelfAttention.", "layer.1.EncDecAttention.")
_UPS = {
    True: {".mlp.up_proj.": ".layer.2.DenseReluDense.wi_1."},
    False: {".mlp.up_proj.": ".layer.2.DenseReluDense.wi."},
}
"""The name of the projection beside a gate, and without one."""


def configure(fields: Fields) -> ModelConfig:
    fields, name = with_own_names(fields), architecture_name(fields)
    of_encoder, mlp = read_biases(fields), read_mlp(fields)
    positions, num_layers = of_encoder.num_positions, read_num_layers(fields)
    num_decoder_layers = fields.integer("num_decoder_layers", num_layers, maximum=MOST_LAYERS)
    begin = text_begins(positions)
    biases = replace(of_encoder, num_positions=begin + positions, both_ways=False)
    cross = replace(read_attention(fields), scale=1.0)
    own = replace(cross, biases=biases)
    layers = pairs_of_layers(own, cross, mlp, _NORMS, begin, num_decoder_layers)
    model = read_model(fields, layers, begin + positions, tied=True)
    is_first = not name.startswith("MT5") and fields.values.get(_TIED) is not False
    scales = fields.flag("scale_decoder_outputs", is_first)
    eps = read_eps(fields)
    tower = T5Tower(
        hidden_size=model.hidden_size,
        num_layers=num_layers,
        num_heads=cross.num_heads,
        head_dim=cross.head_dim,
        inner=mlp.inner,
        activation=activation_of(fields, mlp),
        most_tokens=positions,
        num_decoder_layers=num_decoder_layers,
        kv_width=cross.key_width,
        gated=mlp.gated,
        eps=eps,
        biases=of_encoder,
        shares_biases=not name.startswith("UMT5"),
    )
    return replace(
        model,
        norm=NormSpec(eps=eps),
        logits_scale=model.hidden_size**-0.5 if scales else 1.0,
        skipped_prefixes=("model.decoder.embed_tokens.", "encoder.embed_tokens."),
        text=TextSpec(tower, fields.integer("pad_token_id", 0, minimum=0)),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_shared

    (is_gated,) = {each.gated for each in config.dense_mlps}
    names = _NAMES | _UPS[is_gated]
    own = {
        name_of_pair(renamed(name, names), _OF_CROSS, "decoder.block."): views
        for name, views in weights.items()
    }
    if config.architecture.startswith("UMT5"):
        return own
    return with_shared(own, ".relative_attention_bias.", _BIASES)
