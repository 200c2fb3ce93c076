"""What a decoder computes with: the operations that each kind of device brings."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shmllm.models.layers import Attention, Linear


class Ops(Protocol):
    """The operations of one forward pass, on [tokens, ...] of any number of tokens.

    Which tokens a step has, where they are in their sequences and where their keys and values are
    kept is known to whoever implements this, not to the model. A result may be a buffer that the
    next call of the same kind overwrites.
    """

    def embed(self, table: Tensor) -> Tensor:
        """The step's tokens, looked up in [vocab, hidden] -> [tokens, hidden]."""

    def add_rms_norm(
        self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """Adds x, if there is one, to the residual stream in place, and normalises the sum.

        ``y = weight * (x / sqrt(mean(x**2) + eps))`` over the last dimension (Zhang and
        Sennrich, 2019). All [tokens, hidden]; weight [hidden].
        """

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """[tokens, in] -> [tokens, out]: ``x @ weight.T + bias``."""

    def attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        """Attention of one layer, over the step's tokens and those before them.

        Heads of queries and keys are normalised where the layer has weights for that, and
        rotated; keys and values are stored. Scores are scaled by ``head_dim ** -0.5``.

        Args:
            qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], side by side; may be
                overwritten.
            attention: the layer.

        Returns:
            [tokens, num_heads * head_dim].
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """SwiGLU's product, ``silu(gate) * up``: [tokens, 2 * inner] -> [tokens, inner]."""
