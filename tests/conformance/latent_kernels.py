"""The tests of the kernels of latent attention: they equal the references, and unused slots are
NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from conformance.attention_kernels import product_of_single_rows, tolerances
from support.kernel_helpers import assert_close, poisoned

from shmllm_kernels.gpu.attention import AttentionScratch
from shmllm_kernels.gpu.configs import AttentionConfig
from shmllm_kernels.gpu.latent_attention import paged_latent_attention
from shmllm_kernels.gpu.latent_write import write_latents
from shmllm_kernels.reference.latent_attention import paged_latent_attention as plain_attention
from shmllm_kernels.reference.latent_write import write_latents as plain_write
from shmllm_kernels.reference.rope_write import QueryGrowth, query_factors, to_float8

SMALL = AttentionConfig(16, 16, 4, 2)
LONG = AttentionConfig(16, 64, 4, 2)
MIXED = ((1, 21), (5, 5), (1, 1), (19, 30), (1, 16))


@dataclass(frozen=True)
class Case:
    """The shapes of a batch and of a model; lengths: for each request, (tokens in this step,
    context length); has_float8: whether latents are in FP8; growth: the factor of queries;
    has_sinks: whether heads have sinks."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    rank: int = 32
    rope_dim: int = 16
    block_size: int = 8
    num_splits: int = 1
    config: AttentionConfig = SMALL
    padding: int = 0
    in_place: bool = False
    has_float8: bool = False
    growth: QueryGrowth | None = None
    has_sinks: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for count, _ in self.lengths)


class Launch:
    """The tensors of a case, with shuffled blocks, and NaN in slots without a token."""

    def __init__(self, draw, dtype, case: Case) -> None:
        self.case, device = case, draw.device
        blocks = [-(-context // case.block_size) for _, context in case.lengths]
        size, num_requests = case.tokens + case.padding, len(case.lengths) + case.padding
        self.query = draw.normal(size, case.heads, case.rank, dtype=dtype)
        wide = draw.normal(size, case.heads, case.rope_dim + 8, dtype=dtype)
        self.rope_query = wide[..., 8:]
        self.query[case.tokens :] = torch.nan
        order = draw.permutation(sum(blocks) + 3).int().cpu()
        width = case.rank + case.rope_dim
        cache = poisoned(len(order), case.block_size + 1, width, dtype=dtype, device="cpu")
        cache = cache[:, : case.block_size]  # blocks of other layers lie between those of this one
        self.table = torch.full((num_requests, max([*blocks, 1]) + 2), 2**30, dtype=torch.int32)
        taken = 0
        for row, (count, (_, context)) in enumerate(zip(blocks, case.lengths, strict=True)):
            ids = order[taken : taken + count]
            taken += count
            self.table[row, :count] = ids
            positions = torch.arange(context)
            places = ids.long()[positions // case.block_size], positions % case.block_size
            cache[places] = draw.normal(context, width, dtype=dtype).cpu()
        self.cache = (to_float8(cache) if case.has_float8 else cache).to(device)
        counts = [count for count, _ in case.lengths] + [0] * case.padding
        self.starts = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
        contexts = [context for _, context in case.lengths] + [0] * case.padding
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device=device)
        self.table = self.table.to(device)
        self.sinks = draw.normal(case.heads, scale=2.0) if case.has_sinks else None

    def tensors(self):
        return self.query, self.rope_query, self.cache, self.table, self.starts, self.contexts

    def scratch(self) -> AttentionScratch | None:
        """Scratch memory of NaN, if contexts are split."""
        case = self.case
        if case.num_splits == 1:
            return None
        sizes = len(self.query) + 1, case.heads, case.num_splits, case.rank
        scratch = AttentionScratch.allocate(*sizes, self.query.device)
        scratch.sums.fill_(torch.nan)
        scratch.stats.fill_(torch.nan)
        return scratch

    def run(self) -> torch.Tensor:
        case, query = self.case, self.query
        tensors = list(self.tensors())
        if case.in_place:
            tensors[0] = query.clone()
            out = tensors[0]
        else:
            out = poisoned(*query.shape, dtype=query.dtype, device=query.device)
        options = case.num_splits, self.scratch(), case.growth
        paged_latent_attention(out, *tensors, case.config, 0.17, *options, sinks=self.sinks)
        return out

    def want(self) -> torch.Tensor:
        query, rope_query, *others = self.tensors()
        if self.case.growth is None:
            return plain_attention(query, rope_query, *others, 0.17, self.sinks)
        rows = self.case.lengths
        positions = [torch.arange(context - count, context) for count, context in rows]
        of_tokens = torch.cat([*positions, torch.zeros(self.case.padding)]).to(query.device)
        factors = query_factors(of_tokens, self.case.growth)[:, None, None]
        grown = query.double() * factors, rope_query.double() * factors
        return plain_attention(*grown, *others, 0.17).to(query.dtype)

    def check(self) -> None:
        got, tokens = self.run(), self.case.tokens
        assert got[tokens:].isnan().all(), "a padded token was written"
        want = self.want()
        assert_close(got[:tokens], want[:tokens], *tolerances(got.dtype))


class LatentKernelsConformance:
    @pytest.mark.parametrize("splits", [1, 2])
    def test_a_mixed_batch(self, draw, dtype, splits):
        Launch(draw, dtype, Case(MIXED, num_splits=splits, padding=2)).check()

    @pytest.mark.parametrize("splits", [1, 2])
    def test_queries_that_grow_with_their_position(self, draw, dtype, splits):
        growth = QueryGrowth(0.5, 4)
        Launch(draw, dtype, Case(MIXED, num_splits=splits, padding=2, growth=growth)).check()

    @pytest.mark.parametrize("splits", [1, 2])
    def test_sinks(self, draw, dtype, splits):
        Launch(draw, dtype, Case(MIXED, num_splits=splits, padding=2, has_sinks=True)).check()

    @pytest.mark.parametrize("in_place", [True, False])
    @pytest.mark.parametrize(("rank", "rope_dim"), [(512, 64), (40, 8), (16, 2), (33, 6)])
    def test_widths(self, draw, dtype, rank, rope_dim, in_place):
        case = Case(((1, 19), (4, 9)), rank=rank, rope_dim=rope_dim, in_place=in_place)
        Launch(draw, dtype, case).check()

    @pytest.mark.parametrize("heads", [1, 3, 16, 20, 40])
    def test_heads_in_several_programs(self, draw, dtype, heads):
        Launch(draw, dtype, Case(((1, 18), (3, 6)), heads, num_splits=2)).check()

    def test_more_rows_in_a_program(self, draw, dtype):
        config = replace(SMALL, block_m=64)
        Launch(draw, dtype, Case(((40, 47), (1, 9)), 12, block_size=32, config=config)).check()

    def test_a_launch_without_requests(self, draw, dtype):
        Launch(draw, dtype, Case((), padding=3)).check()

    @pytest.mark.parametrize("splits", [1, 4])
    def test_a_long_context(self, draw, dtype, splits):
        case = Case(((3, 1000),), block_size=16, config=LONG, num_splits=splits, in_place=True)
        Launch(draw, dtype, case).check()

    def test_a_tokens_bits_do_not_depend_on_chunks(self, draw, dtype, monkeypatch):
        monkeypatch.setattr(np, "matmul", product_of_single_rows)
        case = Case(((37, 37),))
        launch = Launch(draw, dtype, case)
        whole = launch.run()
        for begin, end in ((0, 5), (5, 16), (16, 36), (36, 37)):
            part = Launch(draw, dtype, replace(case, lengths=((end - begin, end),)))
            part.query, part.rope_query = launch.query[begin:end], launch.rope_query[begin:end]
            part.cache, part.table = launch.cache, launch.table
            assert torch.equal(part.run(), whole[begin:end])

    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize(("rank", "rope_dim"), [(512, 64), (40, 8), (33, 6)])
    def test_written_latents(self, draw, dtype, rank, rope_dim, interleaved):
        x = draw.normal(5, rank + rope_dim + 3, dtype=dtype, scale=3.0)[:, : rank + rope_dim]
        weight = draw.normal(rank, dtype=dtype)
        angles = draw.normal(5, rope_dim // 2, scale=9.0)
        cos = torch.cat([angles.cos()] * 2, -1).to(dtype)
        sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
        slots = torch.tensor([9, 2, -1, 0, 7], device=draw.device)
        caches = [poisoned(4, 4, rank + rope_dim, dtype=dtype, device=draw.device)] * 2
        caches = [cache.clone()[:, :3] for cache in caches]
        write_latents(caches[0], x, weight, 1e-6, cos, sin, slots, interleaved)
        tables = cos[:, None], sin[:, None]
        plain_write(caches[1], x, weight, 1e-6, *tables, slots, interleaved)
        torch.testing.assert_close(
            caches[0].double(), caches[1].double(), atol=tolerances(dtype)[0] * 4,
            rtol=tolerances(dtype)[1] * 2, equal_nan=True,
        )  # fmt: skip
