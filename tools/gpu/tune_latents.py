"""Searches for tile sizes of latent attention, by the rows of a program.

The models are DeepSeek-V2-Lite (16 heads), GLM-4.7-Flash (20) and DeepSeek-V3 (128), with latents
of 512 elements and key parts of 64. Prompts of all of them have the tiles of the most rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu.clock import seconds_each
from gpu.search import Search
from gpu.settings import Settings
from shmllm_kernels.gpu.attention import AttentionScratch
from shmllm_kernels.gpu.configs import LATENT, AttentionConfig, num_splits
from shmllm_kernels.gpu.latent_attention import heads_per_program, paged_latent_attention

BLOCK_SIZE = 16
RANK, ROPE = 512, 64
SCALE = (128 + ROPE) ** -0.5
STEPS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    # rows of a program: heads, requests, query, context
    16: ((16, 1, 1, 4096), (16, 64, 1, 1024), (16, 256, 1, 1024)),
    32: ((20, 1, 1, 4096), (20, 64, 1, 1024), (20, 256, 1, 1024)),
    64: ((128, 1, 1, 4096), (128, 64, 1, 1024), (16, 1, 2048, 2048), (128, 1, 512, 4096)),
}
REHEARSED = {16: ((4, 2, 1, 40),)}
MOST_COPIES = 64


@dataclass(frozen=True)
class LatentCase:
    """The latent attention of one step, with several caches that are read in turn.

    Attributes:
        query: [tokens, heads, RANK]; rope_query: [tokens, heads, ROPE]; out: as query.
        cache: [blocks, BLOCK_SIZE, RANK + ROPE].
        tables: [copies, requests, blocks of a request] int32.
        starts, contexts: see `attention.paged_attention`.
        rounds: how often a measurement is repeated.
    """

    name: str
    query: Tensor
    rope_query: Tensor
    out: Tensor
    cache: Tensor
    tables: Tensor
    starts: Tensor
    contexts: Tensor
    rounds: int
    calls: float = 0.0

    @classmethod
    def make(cls, settings: Settings, step: tuple[int, int, int, int]) -> LatentCase:
        """Returns a case with random numbers, and with so many caches that no launch finds its own
        in the device's cache."""
        heads, requests, query, context = step
        device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        blocks = -(-context // BLOCK_SIZE)
        num_bytes = requests * context * (RANK + ROPE) * settings.itemsize
        copies = max(2, min(MOST_COPIES, -(-settings.rotated_bytes // num_bytes)))
        count = copies * requests * blocks
        order = torch.randperm(count, device=device, dtype=torch.int32)
        starts = torch.arange(requests + 1, device=device, dtype=torch.int32) * query
        tokens = requests * query
        rows = random(tokens, heads, RANK)
        return cls(
            f"{heads} heads, {requests} requests, {query} tokens at {context}",
            rows,
            random(tokens, heads, ROPE),
            torch.empty_like(rows),
            random(count, BLOCK_SIZE, RANK + ROPE),
            order.view(copies, requests, blocks),
            starts,
            torch.full_like(starts[1:], context),
            settings.rounds,
        )

    def result(self, config: AttentionConfig) -> Tensor:
        self.out.fill_(math.nan)
        self._works(config)[0]()
        return self.out.float()

    def seconds(self, config: AttentionConfig) -> float:
        return seconds_each(self._works(config), self.out.device, self.rounds)

    def _works(self, config: AttentionConfig) -> list[Callable[[], object]]:
        """Returns a launch for each cache, with the splits that the engine would choose."""
        tokens, heads, _ = self.query.shape
        device, requests = self.out.device, len(self.contexts)
        own = heads_per_program(heads, config)
        groups = -(-heads // own)  # each has programs of its own
        splits = num_splits(device, config, tokens, requests, groups * own, groups)
        scratch = AttentionScratch.allocate(tokens, heads, splits, RANK, device)
        return [
            partial(
                paged_latent_attention, self.out, self.query, self.rope_query, self.cache, table,
                self.starts, self.contexts, config, SCALE, splits, scratch,
            )
            for table in self.tables
        ]  # fmt: skip


def searches(settings: Settings) -> Iterator[Search]:
    for rows in REHEARSED if settings.rehearsal else STEPS:
        yield Search(LATENT, rows, partial(cases, rows=rows), candidates(settings, rows))


def candidates(settings: Settings, rows: int) -> list[AttentionConfig]:
    """Returns the tile sizes to measure for programs of so many rows."""
    if settings.rehearsal:
        return [AttentionConfig(16, tile, 4, 1) for tile in (16, 32)]
    found = itertools.product((16, 32, 64), (4, 8), (3, 5))
    return [AttentionConfig(rows, *each) for each in found]


def cases(settings: Settings, rows: int) -> list[LatentCase]:
    steps = REHEARSED if settings.rehearsal else STEPS
    return [LatentCase.make(settings, step) for step in steps[rows]]
