"""The tests of an indexer's kernels: they equal the references, and unused slots are NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conformance.attention_kernels import tolerances
from support.kernel_helpers import assert_close, poisoned

from shmllm_kernels.gpu.attention import AttentionScratch
from shmllm_kernels.gpu.block_indexer import choose_blocks
from shmllm_kernels.gpu.configs import AttentionConfig
from shmllm_kernels.gpu.decode_attention import decode_attention
from shmllm_kernels.gpu.indexer import choose_tokens, store_index_keys
from shmllm_kernels.gpu.latent_attention import paged_latent_attention
from shmllm_kernels.reference import indexer as reference
from shmllm_kernels.reference.attention import paged_attention as plain_paged_attention
from shmllm_kernels.reference.latent_attention import paged_latent_attention as plain_attention

MIXED = ((1, 21), (5, 5), (1, 1), (19, 30), (1, 700))


@dataclass(frozen=True)
class Case:
    """The shapes of a batch and of an indexer; lengths: for each request, (tokens in this step,
    context length); rows: how many tokens' scores there is room for."""

    lengths: tuple[tuple[int, int], ...] = MIXED
    top_k: int = 16
    heads: int = 4
    dim: int = 32
    rope_dim: int = 8
    interleaved: bool = False
    block_size: int = 8
    padding: int = 2
    rows: int = 10

    @property
    def tokens(self) -> int:
        return sum(count for count, _ in self.lengths)


class Launch:
    """The tensors of a case, with shuffled blocks, and NaN in slots without a token."""

    def __init__(self, draw, dtype, case: Case, width: int) -> None:
        self.case, self.device = case, draw.device
        blocks = [-(-context // case.block_size) for _, context in case.lengths]
        num_requests, size = len(case.lengths) + case.padding, case.tokens + case.padding
        order = draw.permutation(sum(blocks) + 3).int().cpu()
        cache = poisoned(len(order), case.block_size + 1, width, dtype=dtype, device="cpu")
        cache = cache[:, : case.block_size]  # blocks of other layers lie between those of this one
        table = torch.full((num_requests, max(blocks) + 2), 2**30, dtype=torch.int32)
        taken = 0
        for row, (count, (_, context)) in enumerate(zip(blocks, case.lengths, strict=True)):
            ids = order[taken : taken + count]
            taken += count
            table[row, :count] = ids
            positions = torch.arange(context)
            places = ids.long()[positions // case.block_size], positions % case.block_size
            cache[places] = draw.normal(context, width, dtype=dtype).cpu()
        counts = [count for count, _ in case.lengths] + [0] * case.padding
        contexts = [context for _, context in case.lengths] + [0] * case.padding
        self.cache, self.table = cache.to(self.device), table.to(self.device)
        self.starts = torch.tensor([0, *counts]).cumsum(0).to(self.device, torch.int32)
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device=self.device)
        self.cos, self.sin = angles(draw, size, case.rope_dim, dtype)

    def choose(self, query, weights):
        """Returns slots, starts and lengths."""
        case, tokens = self.case, len(query)
        shapes = [(tokens, case.top_k), (tokens + 1,), (tokens,)]
        chosen, starts, lens = (
            torch.full(shape, -7, dtype=torch.int32, device=self.device) for shape in shapes
        )
        longest = max(context for _, context in case.lengths)
        scores = poisoned(case.rows, longest, dtype=torch.float32, device=self.device)
        choose_tokens(
            chosen, starts, lens, query, weights, self.cache, self.cos, self.sin, self.table,
            self.starts, self.contexts, scores, case.interleaved,
        )  # fmt: skip
        return chosen, starts, lens

    def expected(self, query, weights):
        case = self.case
        return reference.choose_tokens(
            query, weights, self.cache, self.cos, self.sin, self.table, self.starts, self.contexts,
            case.top_k, case.interleaved,
        )  # fmt: skip


def angles(draw, tokens, rope_dim, dtype):
    """Draws the tables of `reference.rope`."""
    drawn = draw.normal(tokens, rope_dim // 2, dtype=torch.float32)
    cos, sin = drawn.cos().to(dtype), drawn.sin().to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def integers(draw, *shape, dtype):
    """Draws small whole numbers, whose scores are exact: all orders of additions give the same."""
    return (draw.normal(*shape, dtype=torch.float32) * 1.5).round().to(dtype)


class IndexerKernelsConformance:
    @pytest.mark.parametrize(
        "case",
        [
            Case(),
            Case(top_k=700),
            Case(heads=40, dim=128, rope_dim=64, interleaved=True, block_size=32, rows=200),
            Case(dim=20, rope_dim=20, heads=1, top_k=1),
        ],
    )
    def test_the_largest_scores_are_chosen(self, draw, dtype, case):
        """Whole numbers make many ties, of which the first are chosen."""
        launch = Launch(draw, dtype, case, case.dim)
        launch.cos, launch.sin = torch.ones_like(launch.cos), torch.zeros_like(launch.sin)
        launch.cache.copy_(launch.cache.float().round())
        size = case.tokens + case.padding
        query = integers(draw, size, case.heads, case.dim, dtype=dtype)
        weights = integers(draw, size, case.heads, dtype=dtype)
        slots, starts, lens = launch.choose(query, weights)
        assert starts.tolist() == [*range(case.tokens + 1), *[case.tokens] * case.padding]
        want = launch.expected(query, weights)
        assert lens.tolist() == [*map(len, want), *[0] * case.padding]
        for row, expected in zip(slots.cpu(), want, strict=False):
            assert torch.equal(row[: len(expected)].long(), expected)
            assert (row[len(expected) :] == -7).all(), "it wrote more than it chose"

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_queries_are_rotated(self, draw, dtype, interleaved):
        case = Case(interleaved=interleaved)
        launch = Launch(draw, dtype, case, case.dim)
        size = case.tokens + case.padding
        query = draw.normal(size, case.heads, case.dim, dtype=dtype)
        weights = draw.normal(size, case.heads, dtype=dtype)
        slots, _, lens = launch.choose(query, weights)
        want = launch.expected(query, weights)
        same = 0
        for row, count, expected in zip(slots.tolist(), lens.tolist(), want, strict=False):
            same += len(set(row[:count]) & set(expected.tolist()))
        # Scores next to the last chosen one may be rounded past it.
        assert same >= 0.97 * sum(map(len, want))

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(("dim", "rope_dim"), [(128, 64), (20, 20), (48, 16)])
    def test_keys_are_normalised_rotated_and_stored(self, draw, dtype, dim, rope_dim, interleaved):
        x = draw.normal(7, dim, dtype=dtype) * 3 + 1
        weight, bias = draw.normal(dim, dtype=dtype), draw.normal(dim, dtype=dtype)
        cos, sin = angles(draw, 7, rope_dim, dtype)
        slots = torch.tensor([3, -1, 17, 0, 9, 22, -1], device=draw.device)
        found, want = (poisoned(3, 8, dim, dtype=dtype, device=draw.device) for _ in range(2))
        rest = weight, bias, 1e-6, cos, sin, slots, interleaved
        store_index_keys(found, x, *rest)
        reference.store_index_keys(want, x, *rest)
        written = torch.tensor([slot for slot in slots.tolist() if slot >= 0])
        assert found.flatten(0, 1).isnan().all(-1).sum() == 24 - len(written)
        got, expected = (each.flatten(0, 1).cpu()[written] for each in (found, want))
        assert_close(got, expected, *tolerances(dtype))

    @pytest.mark.parametrize("splits", [1, 2])
    def test_attention_reads_the_chosen_slots(self, draw, dtype, splits):
        rank, rope_dim, heads, top_k, tokens = 32, 16, 4, 21, 6
        launch = Launch(draw, dtype, Case(), rank + rope_dim)
        lens = torch.tensor([1, 21, 17, 5, 16, 0], dtype=torch.int32, device=draw.device)
        blocks = launch.table[4, :80].cpu().long()
        positions = torch.stack([draw.permutation(640).cpu()[:top_k] for _ in range(tokens)])
        slots = (blocks[positions // 8] * 8 + positions % 8).to(draw.device)
        query = draw.normal(tokens, heads, rank, dtype=dtype)
        rope_query = draw.normal(tokens, heads, rope_dim, dtype=dtype)
        starts = torch.tensor([0, 1, 2, 3, 4, 5, 5], dtype=torch.int32, device=draw.device)
        scratch = None
        if splits > 1:
            scratch = AttentionScratch.allocate(tokens, heads, splits, rank, draw.device)
        out = torch.zeros_like(query)
        paged_latent_attention(
            out, query, rope_query, launch.cache, slots.int(), starts, lens,
            AttentionConfig(16, 16, 4, 2), 0.17, splits, scratch, has_slots=True,
        )  # fmt: skip
        gathered = launch.cache[slots // 8, slots % 8]
        table = torch.arange(tokens, dtype=torch.int32, device=draw.device)[:, None]
        want = plain_attention(query, rope_query, gathered, table, starts, lens, 0.17)
        assert_close(out, want, *tolerances(dtype))


class BlockIndexerConformance:
    @pytest.mark.parametrize(
        ("case", "size", "num_local"),
        [
            (Case(top_k=3), 16, 1),
            (Case(top_k=60, heads=1), 16, 1),
            (Case(heads=5, dim=128, top_k=2, block_size=32, rows=200), 128, 2),
            (Case(dim=20, heads=1, top_k=1), 8, 1),
        ],
    )
    def test_blocks_with_the_largest_scores_are_chosen(self, draw, dtype, case, size, num_local):
        """Whole numbers make many ties, of which the first are chosen."""
        launch = Launch(draw, dtype, case, case.dim)
        launch.cache.copy_(launch.cache.float().round())
        tokens, device = case.tokens + case.padding, draw.device
        query = integers(draw, tokens, case.heads, case.dim, dtype=dtype)
        shapes = (
            (tokens, case.heads, case.top_k * (size // case.block_size)),
            (tokens + 1,),
            (tokens,),
        )
        chosen, starts, lens = (
            torch.full(shape, -7, dtype=torch.int32, device=device) for shape in shapes
        )
        most = -(-max(context for _, context in case.lengths) // size)
        scores = poisoned(case.rows, case.heads, most, dtype=torch.float32, device=device)
        of_requests = launch.table, launch.starts, launch.contexts
        choose_blocks(
            chosen, starts, lens, query, launch.cache, *of_requests, scores, size, num_local
        )
        want = reference.choose_blocks(
            query, launch.cache, *of_requests, size, case.top_k, num_local
        )
        assert starts.tolist() == [*range(case.tokens + 1), *[case.tokens] * case.padding]
        ends = [range(context - count, context) for count, context in case.lengths]
        positions = [position for each in ends for position in each]
        sizes = [
            (min(position // size + 1, case.top_k) - 1) * size + position % size + 1
            for position in positions
        ]
        assert lens.tolist() == [*sizes, *[0] * case.padding]
        for row, expected in zip(chosen.cpu(), want, strict=False):
            width = expected.shape[1]
            assert torch.equal(row[:, :width].long(), expected)
            assert (row[:, width:] == -7).all(), "it wrote more than it chose"

    @pytest.mark.parametrize("splits", [1, 2])
    def test_each_kv_head_reads_its_own_blocks(self, draw, dtype, splits):
        per_kv, kv_heads, dim, size, device = 3, 2, 32, 8, draw.device
        lens = torch.tensor([1, 21, 40, 0], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32, device=device)
        keys, values = (draw.normal(40, size, kv_heads, dim, dtype=dtype) for _ in range(2))
        ids = [draw.permutation(36)[:5] for _ in range(4 * kv_heads)]
        table = torch.stack(ids).view(4, kv_heads, 5).int()
        rows = torch.arange(4, device=device)
        # The token's own key is in the same block for each head.
        table[rows, :, (lens - 1).clamp(min=0) // size] = (36 + rows.int())[:, None]
        slots = torch.where(lens > 0, (36 + rows) * size + (lens - 1) % size, -1)
        query = draw.normal(4, per_kv * kv_heads, dim, dtype=dtype)
        scratch = None
        if splits > 1:
            scratch = AttentionScratch.allocate(4, per_kv * kv_heads, splits, dim, device)
            scratch.counters.zero_()
        out = torch.zeros_like(query)
        decode_attention(
            out, query, keys, values, table, starts, lens, slots, AttentionConfig(16, 16, 4, 2),
            0.17, num_splits=splits, scratch=scratch,
        )  # fmt: skip
        for head in range(kv_heads):
            own = slice(head * per_kv, (head + 1) * per_kv)
            one = slice(head, head + 1)
            want = plain_paged_attention(
                query[:, own], keys[:, :, one], values[:, :, one], table[:, head], starts, lens,
                0.17,
            )  # fmt: skip
            assert_close(out[:3, own], want[:3], *tolerances(dtype))
