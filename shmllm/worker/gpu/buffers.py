"""Device memory for what is computed within a step, at the addresses that graphs know."""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.layers import Allocator
from shmllm.worker.arena import CountingAllocator
from shmllm.worker.gpu.device import Device
from shmllm_kernels.gpu.attention import AttentionScratch
from shmllm_kernels.gpu.configs import num_splits


class GpuBuffers:
    """All in the model's dtype, but for the scratch memory.

    Args:
        config: of the model.
        dtype: of the model.
        max_tokens: of a step.
        max_requests: of a step, and so of rows that get logits.
        device: where they lie.
        deterministic: decodes have the same number of splits whatever their number.

    Attributes:
        arena: where they lie; a step leaves nothing in it that the next one needs.
        hidden: [max_tokens, hidden], the residual stream.
        normed: [max_tokens, hidden].
        attended: [max_tokens, num_heads * head_dim].
        activated: [max_tokens, inner].
        cos, sin: [max_tokens, head_dim], of the tokens' positions.
        sampled: [max_requests, hidden], rows that get logits.
        logits: [max_requests, vocab].
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        max_tokens: int,
        max_requests: int,
        device: Device,
        deterministic: bool = False,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device.torch_device
        self._deterministic = deterministic
        counter = CountingAllocator()
        self._take(counter.allocate, max_tokens, max_requests)
        self.arena = device.make_arena(counter.num_bytes, "the activations of a step")
        self._take(self.arena.allocate, max_tokens, max_requests)

    def _take(self, allocate: Allocator, max_tokens: int, max_requests: int) -> None:
        config = self._config
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads = config.num_heads

        def take(rows: int, width: int) -> Tensor:
            return allocate((rows, width), self._dtype)

        self.hidden, self.normed = take(max_tokens, hidden), take(max_tokens, hidden)
        self.attended, self.activated = take(max_tokens, heads * dim), take(max_tokens, inner)
        self.cos, self.sin = take(max_tokens, dim), take(max_tokens, dim)
        self.sampled, self.logits = (
            take(max_requests, hidden),
            take(max_requests, config.vocab_size),
        )
        qkv = (heads + 2 * config.num_kv_heads) * dim
        self._products = {
            width: take(max_tokens, width) for width in sorted({hidden, qkv, 2 * inner})
        }
        parts = max(count * self.num_splits(count) for count in range(1, max_requests + 1))
        self._part_sums = allocate((parts * heads * dim,), torch.float32)
        self._part_stats = allocate((parts * heads * 2,), torch.float32)

    def product(self, width: int) -> Tensor:
        """[max_tokens, width], for the product of a step's tokens and a matrix: a decoder is done
        with one before it has the next one of that width."""
        return self._products[width]

    def num_splits(self, num_decodes: int) -> int:
        """Into how many parts the context of each is cut."""
        return num_splits(self._device, num_decodes, self._config.num_kv_heads, self._deterministic)

    def scratch(self, num_decodes: int) -> AttentionScratch | None:
        """For decodes with as many splits as `num_splits` says; None if there is but one."""
        splits, heads = self.num_splits(num_decodes), self._config.num_heads
        if splits == 1:
            return None
        shape = num_decodes, heads, splits
        dim, count = self._config.head_dim, num_decodes * heads * splits
        return AttentionScratch(
            self._part_sums[: count * dim].view(*shape, dim),
            self._part_stats[: count * 2].view(*shape, 2),
        )
