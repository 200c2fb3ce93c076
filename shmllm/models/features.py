"""What a model may need of a device, beyond what the first families need.

A device has a set of features that it cannot compute, and refuses a model that uses one before it
loads the weights. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.specs import AttentionSpec, LayerSpec, MLPSpec, MoESpec


class Feature(Enum):
    """A feature, with its name in messages."""

    LAYER_NORM = "LayerNorm"
    LAYER_QK_NORM = "LayerNorm of queries and keys"
    NORM_OFFSET = "an offset of the norms' weights"
    BARE_INPUT = "attention or an MLP without a norm before it"
    PARALLEL = "attention and MLP in parallel"
    RESIDUAL_SCALE = "a factor of the residual additions"
    EMBEDDING_SCALE = "a factor of the embeddings"
    POSITIONS = "learned position embeddings"
    LOGITS_SCALE = "a factor or a cap of the logits"
    ATTENTION_SCALE = "attention scaled by another factor than head_dim ** -0.5"
    ATTENTION_CAP = "a cap of the attention's scores"
    SINKS = "attention sinks"
    ROW_QK_NORM = "a norm over all heads of queries and keys"
    NO_ROPE = "attention without rotary embedding"
    PARTIAL_ROPE = "rotary embedding of a part of each head"
    INTERLEAVED_ROPE = "interleaved rotary embedding"
    GELU = "the activation gelu"
    GELU_TANH = "the activation gelu_tanh"
    PLAIN_MLP = "an MLP without a gate"
    EXPERTS = "a mixture of experts"
    TRANSPOSED = "matrices that checkpoints store transposed"


_OF_MODEL: dict[Feature, Callable[[ModelConfig], bool]] = {
    Feature.LAYER_NORM: lambda model: model.norm.kind == "layer",
    Feature.LAYER_QK_NORM: lambda model: (
        model.norm.kind == "layer" and any(layer.attention.qk_norm for layer in model.layers)
    ),
    Feature.NORM_OFFSET: lambda model: model.norm.offset != 0,
    Feature.RESIDUAL_SCALE: lambda model: model.residual_scale != 1,
    Feature.EMBEDDING_SCALE: lambda model: (model.embedding_scale, model.embeds_scale) != (1, 1),
    Feature.POSITIONS: lambda model: model.num_learned_positions > 0,
    Feature.TRANSPOSED: lambda model: (
        model.transposed
        or any(isinstance(layer.mlp, MoESpec) and layer.mlp.transposed for layer in model.layers)
    ),
    Feature.LOGITS_SCALE: lambda model: (model.logits_scale, model.logits_cap) != (1, None),
}
_OF_LAYER: dict[Feature, Callable[[LayerSpec], bool]] = {
    Feature.BARE_INPUT: lambda layer: (
        layer.norms.before_attention is None
        or (layer.norms.before_mlp is None and not layer.parallel)
    ),
    Feature.PARALLEL: lambda layer: layer.parallel,
    Feature.EXPERTS: lambda layer: isinstance(layer.mlp, MoESpec),
}
_OF_ATTENTION: dict[Feature, Callable[[AttentionSpec], bool]] = {
    Feature.ATTENTION_SCALE: lambda attention: attention.scale != attention.head_dim**-0.5,
    Feature.ATTENTION_CAP: lambda attention: attention.soft_cap is not None,
    Feature.SINKS: lambda attention: attention.sinks,
    Feature.ROW_QK_NORM: lambda attention: attention.qk_norm == "row",
    Feature.NO_ROPE: lambda attention: attention.rope is None,
    Feature.PARTIAL_ROPE: lambda attention: (
        attention.rope is not None and attention.rope.rotary_dim != attention.head_dim
    ),
    Feature.INTERLEAVED_ROPE: lambda attention: (
        attention.rope is not None and attention.rope.interleaved
    ),
}
_OF_MLP: dict[Feature, Callable[[MLPSpec], bool]] = {
    Feature.GELU: lambda mlp: mlp.activation == "gelu",
    Feature.GELU_TANH: lambda mlp: mlp.activation == "gelu_tanh",
    Feature.PLAIN_MLP: lambda mlp: not mlp.gated,
}


def features_of(config: ModelConfig) -> list[Feature]:
    """Returns the features that a model uses, in the order of `Feature`."""
    layers = set(config.layers)
    found = {feature for feature, uses in _OF_MODEL.items() if uses(config)}
    found |= {feature for feature, uses in _OF_LAYER.items() if any(map(uses, layers))}
    attentions = {layer.attention for layer in layers}
    found |= {feature for feature, uses in _OF_ATTENTION.items() if any(map(uses, attentions))}
    found |= {feature for feature, uses in _OF_MLP.items() if any(map(uses, config.dense_mlps))}
    return [feature for feature in Feature if feature in found]


def check_features(config: ModelConfig, device: str, unsupported: Collection[Feature]) -> None:
    """Raises EngineStartError if a model uses a feature that a device cannot compute.

    Args:
        config: the model's configuration.
        device: who computes: "the CPU", "the GPU" or a kind of quantization.
        unsupported: what it cannot compute.
    """
    lacking = [feature.value for feature in features_of(config) if feature in unsupported]
    if lacking:
        raise EngineStartError(
            f"{config.architecture} needs what {device} cannot compute yet: {'; '.join(lacking)}"
        )
