"""The encoders of T5, mT5 and UMT5: norms before attention and MLP, scores without a scale, and a
bias of scores for the distance between two tokens (Raffel et al., 2020). All layers share the
biases but for those of UMT5."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shmllm.models.bias_specs import MOST_BIASED_POSITIONS, DistanceBiases
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import read_activation, read_attention, read_model, read_num_layers
from shmllm.models.specs import MLPSpec, NormSpec
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIELDS: dict[str, tuple[str, Any]] = {
    "hidden_size": ("d_model", None),
    "head_dim": ("d_kv", 64),
    "num_attention_heads": ("num_heads", None),
    "num_key_value_heads": ("num_heads", None),
    "num_hidden_layers": ("num_layers", None),
    "intermediate_size": ("d_ff", None),
}
"""T5's name of each field, and the value where it is absent."""

_POSITIONS = 512
"""The length of the texts of the training; the model itself knows no end."""

_LATER = ("MT5", "UMT5")
"""The beginnings of architectures whose MLPs have gates by default."""

_BIASES = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_NAMES = {
    "model.embed_tokens.": "shared.",
    "model.norm.": "encoder.final_layer_norm.",
    "model.layers.": "encoder.block.",
    ".input_layernorm.": ".layer.0.layer_norm.",
    ".post_attention_layernorm.": ".layer.1.layer_norm.",
    ".mlp.down_proj.": ".layer.1.DenseReluDense.wo.",
    ".mlp.gate_proj.": ".layer.1.DenseReluDense.wi_0.",
    ".self_attn.relative_": ".layer.0.SelfAttention.relative_",
    **{f".self_attn.{each}_proj.": f".layer.0.SelfAttention.{each}." for each in "qkvo"},
}
_UPS = {
    True: {".mlp.up_proj.": ".layer.1.DenseReluDense.wi_1."},
    False: {".mlp.up_proj.": ".layer.1.DenseReluDense.wi."},
}
"""The name of the projection beside a gate, and without one."""


def configure(fields: Fields) -> ModelConfig:
    fields = with_own_names(fields)
    biases = read_biases(fields)
    attention = replace(read_attention(fields), ahead=None, scale=1.0, biases=biases)
    layers = [LayerSpec(mixer=attention, mlp=read_mlp(fields))] * read_num_layers(fields)
    return replace(
        read_model(fields, layers, biases.num_positions, tied=True),
        norm=NormSpec(eps=read_eps(fields)),
        lm_head=False,
        pooling="MEAN",
        eos_token_ids=(),
        skipped_prefixes=("decoder.", "encoder.embed_tokens.", "lm_head."),
    )


def with_own_names(fields: Fields) -> Fields:
    """Returns the fields under the names that other families have."""
    return fields.under_names(_FIELDS)


def read_eps(fields: Fields) -> float:
    """Returns what norms add to the mean square."""
    return fields.number("layer_norm_epsilon", 1e-6)


def read_biases(fields: Fields) -> DistanceBiases:
    """Returns the biases of scores of an encoder, and with them the largest number of positions."""
    biases = DistanceBiases(
        fields.integer("n_positions", _POSITIONS, maximum=MOST_BIASED_POSITIONS),
        fields.integer("relative_attention_num_buckets", 32, minimum=4),
        fields.integer("relative_attention_max_distance", 128),
    )
    if biases.num_buckets % 4 or biases.max_distance <= biases.num_buckets // 4:
        raise fields.error(
            f"relative_attention_num_buckets {biases.num_buckets} with "
            f"relative_attention_max_distance {biases.max_distance} is not supported"
        )
    return biases


def read_mlp(fields: Fields) -> MLPSpec:
    """Returns the MLP of a layer."""
    default = "gated-gelu" if architecture_name(fields).startswith(_LATER) else "relu"
    kind = fields.text("feed_forward_proj", default)
    gate, _, name = kind.rpartition("-")
    if gate not in ("", "gated"):
        raise fields.error(f"feed_forward_proj {kind!r} is not supported")
    if kind == "gated-gelu":  # transformers takes the approximation
        name = "gelu_new"
    named = fields.with_values(fields.values | {"feed_forward_proj": name})
    return MLPSpec(
        inner=fields.integer("intermediate_size"),
        activation=read_activation(named, "feed_forward_proj"),
        gated=bool(gate),
    )


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    from shmllm.models.fused_names import with_shared

    (is_gated,) = {each.gated for each in config.dense_mlps}
    names = _NAMES | _UPS[is_gated]
    own = {renamed(name, names): views for name, views in weights.items()}
    if config.architecture.startswith("UMT5"):
        return own
    return with_shared(own, ".relative_attention_bias.", _BIASES)
