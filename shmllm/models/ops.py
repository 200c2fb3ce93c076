"""The operations that a decoder calls. Each kind of device implements them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shmllm.models.layers import Attention, Linear, Norm, TokenEmbedding
from shmllm.models.specs import MLPSpec


class LinearOps(Protocol):
    """The operation that layers and LM head share, for any number of rows."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Returns ``x @ weight.T + bias``: [rows, in] -> [rows, out]."""


class LogitsOps(LinearOps, Protocol):
    """The operations from hidden states to logits, for any number of rows."""

    def scale_and_cap(self, x: Tensor, scale: float, cap: float | None) -> Tensor:
        """Multiplies ``x`` by the scale, in place, and, if there is a cap, replaces each product by
        ``cap * tanh(product / cap)``. Returns ``x``."""


class Ops(LinearOps, Protocol):
    """The operations of one forward pass. Activations are [tokens, ...], for any number of tokens.

    The implementation knows the step's tokens, their positions and the cache slots of their keys
    and values; the model does not. A result may be a buffer that the next call of the same
    operation overwrites.
    """

    def embed(self, embedding: TokenEmbedding) -> Tensor:
        """Looks up the step's tokens in the table; returns [tokens, hidden].

        It multiplies tokens' embeddings by ``embedding.scale``, those that a prompt gave itself by
        ``embedding.embeds_scale``, and adds the embeddings of the tokens' positions if the model
        has them.
        """

    def add_norm(
        self, x: Tensor | None, residual: Tensor, norm: Norm | None, scale: float
    ) -> Tensor:
        """Adds ``scale * x``, unless it is None, to the residual stream in place, and normalises
        the sum.

        RMSNorm is ``(weight + offset) * (r / sqrt(mean(r**2) + eps))``, LayerNorm
        ``weight * (r - mean(r)) / sqrt(var(r) + eps) + bias``, over the last dimension.

        Args:
            x: [tokens, hidden] or None.
            residual: [tokens, hidden].
            norm: the norm; None: the result is ``residual`` itself, and the results of earlier
                calls stay.
            scale: the factor of ``x``.

        Returns:
            [tokens, hidden].
        """

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalises ``x`` [tokens, hidden], in place, and returns it."""

    def attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        """Computes the attention of one layer, over the step's tokens and those before them.

        It normalises queries and keys if the layer has norms for that, rotates them (rotary
        embedding), and stores the keys and values in the cache. `AttentionSpec` says what it does
        with the scores.

        Args:
            qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys and values
                side by side; may be overwritten.
            attention: the layer.

        Returns:
            [tokens, num_heads * head_dim].
        """

    def activate(self, x: Tensor, mlp: MLPSpec) -> Tensor:
        """Applies the MLP's activation: [tokens, up_width] -> [tokens, inner]. If it is gated, the
        first half of ``x`` is the gate, and the result is ``act(gate) * up``."""
