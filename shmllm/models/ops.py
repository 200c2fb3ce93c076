"""The operations that a decoder calls. Each kind of device implements them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shmllm.models.layers import Attention, Linear


class Ops(Protocol):
    """The operations of one forward pass. Activations are [tokens, ...], for any number of tokens.

    The implementation knows the step's tokens, their positions and the cache slots of their keys
    and values; the model does not. A result may be a buffer that the next call of the same
    operation overwrites.
    """

    def embed(self, table: Tensor) -> Tensor:
        """Looks up the step's tokens in ``table`` [vocab, hidden]; returns [tokens, hidden]."""

    def add_rms_norm(
        self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """Adds ``x``, unless it is None, to the residual stream in place and normalises the sum.

        ``y = weight * (x / sqrt(mean(x**2) + eps))`` over the last dimension (Zhang and
        Sennrich, 2019). ``x``, ``residual`` and the result are [tokens, hidden], ``weight`` is
        [hidden].
        """

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Returns ``x @ weight.T + bias``: [tokens, in] -> [tokens, out]."""

    def attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        """Computes the attention of one layer, over the step's tokens and those before them.

        It normalises the query and key heads if the layer has weights for that, rotates them
        (rotary embedding), and stores the keys and values in the cache. It scales the scores by
        ``head_dim ** -0.5``.

        Args:
            qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys and values
                side by side; may be overwritten.
            attention: the layer.

        Returns:
            [tokens, num_heads * head_dim].
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Returns SwiGLU's product ``silu(gate) * up``: [tokens, 2 * inner] -> [tokens, inner]."""
