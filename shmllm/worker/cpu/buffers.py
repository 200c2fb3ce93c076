"""Memory for what is computed within a step, at fixed addresses.

Pages come when they are first written, so that a large step's buffers cost what the largest step
so far has used of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Allocator
from shmllm.worker.arena import CountingAllocator
from shmllm.worker.cpu.arena import HostArena

SCORED_ROWS = 64
"""Rows whose logits are computed at a time for the log-probabilities of prompts."""


class CpuBuffers:
    """All float32.

    Args:
        config: of the model.
        max_tokens: of a step.
        max_samples: of a step.

    Attributes:
        hidden: [max_tokens, hidden], the residual stream.
        normed: [max_tokens, hidden].
        attended: [max_tokens, num_heads * head_dim].
        activated: [max_tokens, inner].
        cos, sin: [max_tokens, head_dim / 2], of the tokens' positions.
        sampled: [max_samples, hidden], rows that get logits.
        logits: [max_samples, vocab].
        scored: [SCORED_ROWS, hidden], rows of prompts that get logits, and these:
        scored_logits: [SCORED_ROWS, vocab].
    """

    def __init__(self, config: ModelConfig, max_tokens: int, max_samples: int) -> None:
        counter = CountingAllocator()
        self._take(counter.allocate, config, max_tokens, max_samples)
        self._arena = HostArena(counter.num_bytes, "the activations of a step")
        self._take(self._arena.allocate, config, max_tokens, max_samples)

    def _take(
        self, allocate: Allocator, config: ModelConfig, max_tokens: int, max_samples: int
    ) -> None:
        def take(rows: int, width: int) -> Tensor:
            return allocate((rows, width), torch.float32)

        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads = config.num_heads
        self.hidden, self.normed = take(max_tokens, hidden), take(max_tokens, hidden)
        self.attended, self.activated = take(max_tokens, heads * dim), take(max_tokens, inner)
        self.cos, self.sin = take(max_tokens, dim // 2), take(max_tokens, dim // 2)
        self.sampled, self.scored = take(max_samples, hidden), take(SCORED_ROWS, hidden)
        self.logits = take(max_samples, config.vocab_size)
        self.scored_logits = take(SCORED_ROWS, config.vocab_size)
        qkv = (heads + 2 * config.num_kv_heads) * dim
        self._products = {
            width: take(max_tokens, width) for width in sorted({hidden, qkv, 2 * inner})
        }

    def product(self, width: int) -> Tensor:
        """[max_tokens, width], for the product of a step's tokens and a matrix: a decoder is done
        with one before it has the next one of that width."""
        return self._products[width]

    @property
    def workspace_bytes(self) -> int:
        """Memory that they hold now."""
        return self._arena.resident_bytes

    def drop_workspace(self) -> None:
        """Give it back; not during a step."""
        self._arena.release()
        self._arena.restore()
