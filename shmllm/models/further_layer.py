"""A layer behind the others of a decoder, which predicts one token further ahead."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.decoder_layer import DecoderLayer
from shmllm.models.layers import Linear, NamedWeights, Norm, Storage, TokenEmbedding
from shmllm.models.ops import Ops


class FurtherLayer:
    """A layer that predicts a token further ahead (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2).

    Embedding table and LM head are those of the model.

    Attributes:
        embedding_norm, hidden_norm: the norms of what is projected, side by side.
        projection: the projection to the residual stream.
        layer: the layer itself.
        norm: the norm of its output.
    """

    def __init__(self, config: ModelConfig, layer: int, storage: Storage) -> None:
        hidden = config.hidden_size
        self.embedding_norm = Norm(hidden, config.norm, storage)
        self.hidden_norm = Norm(hidden, config.norm, storage)
        self.projection = Linear(2 * hidden, [hidden], False, storage)
        self.layer = DecoderLayer(config, layer, storage)
        self.norm = Norm(hidden, config.norm, storage)
        self._residual_scale = config.residual_scale

    def __call__(self, ops: Ops, hidden: Tensor, embedding: TokenEmbedding) -> Tensor:
        """Runs one step's tokens, each of which follows the token of its hidden state.

        Args:
            ops: the operations of the device.
            hidden: [tokens, hidden], what `DecoderModel.forward`, or the layer before, returned for
                the tokens before these; may be overwritten.
            embedding: the model's table.

        Returns:
            [tokens, hidden], the input of `DecoderModel.logits` for the tokens after the next ones.
        """
        norms = self.embedding_norm, self.hidden_norm
        residual = ops.join(ops.embed(embedding), hidden, norms, self.projection)
        x = self.layer(ops, None, residual)
        return ops.add_norm(x, residual, self.norm, self._residual_scale)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Its own norms."""
        return self.embedding_norm, self.hidden_norm, self.norm

    def named_weights(self, prefix: str) -> NamedWeights:
        """Returns the destinations of names under ``prefix``, such as "model.layers.61"."""
        weights = self.layer.named_weights(prefix)
        weights |= self.projection.named_weights(f"{prefix}.eh_proj")
        for name, norm in zip(("enorm", "hnorm", "shared_head.norm"), self.norms, strict=True):
            weights |= norm.named_weights(f"{prefix}.{name}")
        return weights
