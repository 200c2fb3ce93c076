"""The attention of one step, which can be launched repeatedly with any configuration.

Each launch of a case has its own keys and values, like each layer of a model, so that no launch
finds them in the device's cache. Decodes have the kernel that writes their keys and values, too.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu.clock import seconds_each
from gpu.settings import Settings
from shmllm_kernels.gpu.attention import AttentionScratch, paged_attention
from shmllm_kernels.gpu.configs import (
    AttentionConfig,
    attention_config,
    has_dependent_launches,
    has_heads_first,
    num_splits,
)
from shmllm_kernels.gpu.decode_attention import decode_attention

BLOCK_SIZE = 16
MOST_LAUNCHES = 64


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of the attention of one step.

    Attributes:
        heads: the number of query heads.
        kv_heads: the number of key-value heads.
        head_dim: the size of a head.
        requests: the number of requests in the step.
        query: the number of tokens of each request in the step; 1 for decodes.
        context: the number of tokens that each request attends to, those of the step included.
    """

    heads: int
    kv_heads: int
    head_dim: int
    requests: int
    query: int
    context: int

    @property
    def kv_bytes(self) -> int:
        """The bytes of keys and values that a launch must read, with two bytes per element."""
        return 4 * self.requests * self.context * self.kv_heads * self.head_dim


def in_order(cache: Tensor, heads_first: bool) -> Tensor:
    """Returns keys or values, [blocks, block_size, kv heads, head_dim], with the tokens of a head
    side by side in memory, or the heads of a token."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else cache.contiguous()


class AttentionCase:
    """Random tensors of one step's attention, with several sets of keys and values.

    Args:
        sizes: the sizes of the step.
        settings: the device, the dtype, and the number of bytes that all sets of keys and values
            together have at least.
    """

    def __init__(self, sizes: AttentionSizes, settings: Settings) -> None:
        self.sizes, self._rounds = sizes, settings.rounds
        self._device = torch.device(settings.device)
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._count = max(2, min(MOST_LAUNCHES, -(-settings.rotated_bytes // sizes.kv_bytes)))
        blocks = -(-sizes.context // BLOCK_SIZE)
        num_blocks = self._count * sizes.requests * blocks
        shape = (num_blocks, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim)
        heads_first = has_heads_first(self._device, sizes.head_dim)
        caches = (self._random(*shape) for _ in range(2))
        self._keys, self._values = (in_order(cache, heads_first) for cache in caches)
        order = torch.randperm(num_blocks, device=self._device, dtype=torch.int32)
        self._tables = order.view(self._count, sizes.requests, blocks)
        tokens = sizes.requests * sizes.query
        self._rows = self._random(tokens, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
        self._query = self._rows[:, : sizes.heads].contiguous()
        self.out = torch.empty_like(self._query)
        last = self._tables[..., -1].long() * BLOCK_SIZE
        self._slots = last + (sizes.context - 1) % BLOCK_SIZE
        starts = torch.arange(sizes.requests + 1, device=self._device, dtype=torch.int32)
        self._starts = starts * sizes.query
        self._contexts = torch.full_like(starts[1:], sizes.context)

    def with_order(self, heads_first: bool) -> AttentionCase:
        """Returns the case with keys and values in another order in their blocks; see `in_order`.
        Without, they have that of an engine."""
        case = copy(self)
        case._keys, case._values = (
            in_order(cache, heads_first) for cache in (self._keys, self._values)
        )
        return case

    def current(self) -> tuple[AttentionConfig, int]:
        """Returns the config and the number of splits that `configs` has for the step."""
        sizes, heads = self.sizes, (self.sizes.heads, self.sizes.kv_heads)
        tokens = sizes.requests * sizes.query
        splits = num_splits(self._device, self.config(1), tokens, sizes.requests, *heads)
        return self.config(splits), splits

    def config(self, splits: int) -> AttentionConfig:
        """Returns the config that `configs` has for the step with so many splits."""
        sizes = self.sizes
        shape = sizes.head_dim, sizes.heads // sizes.kv_heads, sizes.query, self._dtype
        return attention_config(self._device, *shape, is_split=splits > 1)

    def seconds(self, config: AttentionConfig, splits: int) -> float:
        """Measures one launch."""
        return seconds_each(self.launches(config, splits), self._device, self._rounds)

    def launches(self, config: AttentionConfig, splits: int) -> list[Callable[[], object]]:
        """Returns one launch for each set of keys and values; each writes `out`."""
        sizes = self.sizes
        scratch = None
        if splits > 1:
            tokens = sizes.requests * sizes.query
            scratch = AttentionScratch.allocate(
                tokens, sizes.heads, splits, sizes.head_dim, self._device
            )

        if sizes.query == 1:
            is_dependent = sizes.requests == 1 and has_dependent_launches(self._device)

            def decode(table: Tensor, slots: Tensor) -> None:
                decode_attention(
                    self.out,
                    self._rows,
                    self._keys,
                    self._values,
                    table,
                    self._starts,
                    self._contexts,
                    slots,
                    config,
                    sizes.head_dim**-0.5,
                    num_splits=splits,
                    scratch=scratch,
                    loads_first=is_dependent,
                    is_dependent=is_dependent,
                )

            pairs = zip(self._tables, self._slots, strict=True)
            return [partial(decode, table, slots) for table, slots in pairs]

        def launch(table: Tensor) -> None:
            paged_attention(
                self.out,
                self._query,
                self._keys,
                self._values,
                table,
                self._starts,
                self._contexts,
                config,
                sizes.head_dim**-0.5,
                num_splits=splits,
                scratch=scratch,
            )

        return [partial(launch, table) for table in self._tables]

    def expected(self, number: int) -> Tensor:
        """Returns what launch `number` has to give, in float32, computed by torch. A decode must
        have been launched: it writes its key and value."""
        sizes, blocks = self.sizes, self._tables[number].long()
        per_kv = sizes.heads // sizes.kv_heads

        def heads_first(cache: Tensor) -> Tensor:
            tokens = cache[blocks].flatten(1, 2)[:, : sizes.context].float()
            return tokens.repeat_interleave(per_kv, dim=2).transpose(1, 2)

        query = self._query.view(sizes.requests, sizes.query, sizes.heads, sizes.head_dim)
        seen = torch.ones(sizes.query, sizes.context, device=self._device).bool()
        out = torch.nn.functional.scaled_dot_product_attention(
            query.float().transpose(1, 2),
            heads_first(self._keys),
            heads_first(self._values),
            attn_mask=seen.tril(sizes.context - sizes.query),
        )
        return out.transpose(1, 2).reshape(self.out.shape)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(self._dtype)
