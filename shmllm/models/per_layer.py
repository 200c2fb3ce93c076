"""The inputs that each layer has of its own, as the owner of their weights: per-layer embeddings.

`ops.Ops` computes with them; `PerLayerSpec` says what.
"""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage, rounded
from shmllm.models.stream_specs import PerLayerSpec


class PerLayerInputs:
    """What makes the inputs of all layers.

    Attributes:
        spec: what it computes.
        num_layers: the number of layers.
        table: [vocab, layers * width].
        scale: the factor of the table's entries, a number of the weights' dtype.
        projection: the projection of a token's embedding to the inputs of all layers.
        projection_scale: its factor.
        norm: the norm of each layer's part of that.
    """

    def __init__(self, config: ModelConfig, spec: PerLayerSpec, storage: Storage) -> None:
        self.spec = spec
        self.num_layers = config.num_layers
        width = config.num_layers * spec.width
        self.table = storage.tensor(spec.vocab_size, width)
        self.scale = rounded(spec.width**0.5, storage.dtype)
        self.projection = Linear(config.hidden_size, [width], False, storage)
        self.projection_scale = config.hidden_size**-0.5
        self.norm = Norm(spec.width, config.norm, storage)

    def named_weights(self) -> NamedWeights:
        """Returns the destinations of the weights."""
        weights: NamedWeights = {"model.embed_tokens_per_layer.weight": (self.table,)}
        weights |= self.projection.named_weights("model.per_layer_model_projection")
        return weights | self.norm.named_weights("model.per_layer_projection_norm")


class LayerInput:
    """What adds its input to the residual stream of one layer.

    Attributes:
        spec: what it computes.
        layer: the index of the layer.
        gate: the projection of the stream, whose activation the input is multiplied by.
        projection: the projection of the product.
        norm: the norm of that.
    """

    def __init__(
        self, config: ModelConfig, layer: int, spec: PerLayerSpec, storage: Storage
    ) -> None:
        self.spec = spec
        self.layer = layer
        self.gate = Linear(config.hidden_size, [spec.width], False, storage)
        self.projection = Linear(spec.width, [config.hidden_size], False, storage)
        self.norm = Norm(config.hidden_size, config.norm, storage)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.0"."""
        weights = self.gate.named_weights(f"{prefix}.per_layer_input_gate")
        weights |= self.projection.named_weights(f"{prefix}.per_layer_projection")
        return weights | self.norm.named_weights(f"{prefix}.post_per_layer_input_norm")
