"""CPU attention over paged latents: compared with float64, and independent of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.variants import slow
from torch import Tensor

from shmllm_kernels.cpu import latent_attention
from shmllm_kernels.cpu.attention_pieces import count_pieces, request_words
from shmllm_kernels.cpu.kernel_program import KernelProgram
from shmllm_kernels.cpu.latent_attention import (
    ATTEND_LATENTS,
    MERGE_LATENTS,
    SPLIT_KEYS,
    scratch_bytes,
    size_words,
    split_states_bytes,
)
from shmllm_kernels.cpu.latent_layout import LatentLayout
from shmllm_kernels.cpu.latents import ROTATE, STORE_LATENTS
from shmllm_kernels.cpu.memory import word_of_float
from shmllm_kernels.reference.latent_attention import paged_latent_attention
from shmllm_kernels.reference.rope import rotate

EPS, SCALE = 1e-6, 0.11
MAX_TOKENS, MAX_REQUESTS, MAX_BLOCKS, NUM_THREADS = 700, 6, 100, 2


class Request:
    """The projections of a request's tokens, and the number of tokens in the cache."""

    def __init__(self, length: int, layer: Layer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.latents = torch.randn(length, layer.rank + layer.rope_dim, generator=generator)
        self.queries = torch.randn(length, layer.num_heads, layer.rank, generator=generator)
        self.ropes = torch.randn(length, layer.num_heads, layer.rope_dim, generator=generator)
        self.blocks = np.zeros(0, np.int32)
        self.num_done = 0
        self.out = torch.full_like(self.queries, torch.nan)


class Layer:
    """One layer: a program that writes latents to the cache and computes attention."""

    def __init__(
        self,
        num_heads: int,
        sizes: tuple[int, int],
        block_size: int,
        stored: str,
        interleaved: bool = True,
        has_sinks: bool = False,
    ) -> None:
        self.rank, self.rope_dim = sizes
        self.layout = layout = LatentLayout(sum(sizes), block_size, stored)
        self.num_heads, self.interleaved = num_heads, interleaved
        self.sinks = torch.randn(num_heads) * 3 if has_sinks else None
        self.generator = np.random.default_rng(len(layout.stored) + num_heads)
        num_blocks = MAX_BLOCKS + 20
        self.cache = torch.full((num_blocks, layout.block_bytes + 64), 0xFF, dtype=torch.uint8)
        self.free = list(self.generator.permutation(num_blocks))
        dtype = getattr(torch, layout.stored)
        self.norm = (torch.rand(self.rank, generator=torch.Generator().manual_seed(1)) + 0.5).to(
            dtype
        )
        self.step = np.zeros(2, np.int64)
        self.columns = {
            name: np.zeros(MAX_REQUESTS + 1, np.int64)
            for name in ("first", "counts", "contexts", "rows", "tiles", "splits")
        }
        self.table = np.zeros((MAX_REQUESTS, MAX_BLOCKS), np.int32)
        self.slots = np.zeros(MAX_TOKENS, np.int64)
        self.cos, self.sin = (torch.zeros(MAX_TOKENS, self.rope_dim // 2) for _ in range(2))
        self.latents = torch.zeros(MAX_TOKENS, self.rank + self.rope_dim)
        self.queries = torch.zeros(MAX_TOKENS, num_heads, self.rank)
        self.ropes = torch.zeros(MAX_TOKENS, num_heads, self.rope_dim)
        self._record()

    def _record(self) -> None:
        layout, heads = self.layout, self.num_heads
        at = lambda array: array.ctypes.data  # noqa: E731
        pairs, tables = self.rope_dim // 2, [self.cos.data_ptr(), self.sin.data_ptr()]
        self.program = KernelProgram(1)
        rope = [self.ropes.data_ptr(), 4 * heads * self.rope_dim, 4 * self.rope_dim]
        rotation = [rope[0], rope[1], heads, rope[2], pairs, int(self.interleaved), *tables]
        self.program.record(ROTATE, [at(self.step), *rotation])
        source = [self.latents.data_ptr(), 4 * self.latents.shape[1], self.rank, pairs]
        place = [layout.row_bytes, layout.block_size.bit_length() - 1, self.cache.stride(0)]
        self.program.record(
            STORE_LATENTS[layout.stored, layout.stored],
            [at(self.step), *source, int(self.interleaved), *tables, self.norm.data_ptr(),
             word_of_float(EPS), at(self.slots), self.cache.data_ptr(), *place,
             self.latents.shape[1]],
        )  # fmt: skip
        names = ("first", "counts", "contexts", "rows")
        requests = request_words(
            *(at(self.columns[name]) for name in names), at(self.table), MAX_BLOCKS,
            at(self.columns["tiles"]), at(self.columns["splits"]),
        )  # fmt: skip
        per_thread = scratch_bytes(layout, heads, self.rank)
        scratch = np.full(NUM_THREADS * per_thread, 0xFF, np.uint8)
        states = np.empty(split_states_bytes(heads, self.rank), np.uint8)
        sizes = size_words(layout, heads, self.rank, SCALE, self.cache.stride(0))
        query = [self.queries.data_ptr(), 4 * heads * self.rank]
        operands = [
            at(self.step), at(requests), at(sizes), *query, *rope, *query, self.cache.data_ptr(),
            at(scratch), per_thread, at(states), 0 if self.sinks is None else self.sinks.data_ptr(),
        ]  # fmt: skip
        kept = [requests, scratch, states, sizes]
        self.program.record(ATTEND_LATENTS[layout.stored], operands, kept)
        self.program.record(MERGE_LATENTS, operands)

    def run(self, parts: list[tuple[Request, int]], num_threads: int = 1) -> None:
        """Computes the given number of further tokens of each request in one step."""
        size, token = self.layout.block_size, 0
        rows = self.generator.permutation(MAX_REQUESTS)
        for i, (request, count) in enumerate(parts):
            start, end = request.num_done, request.num_done + count
            fresh = [self.free.pop() for _ in range(-(-end // size) - len(request.blocks))]
            request.blocks = np.append(request.blocks, fresh).astype(np.int32)
            positions = np.arange(start, end)
            places = slice(token, token + count)
            self.latents[places] = request.latents[start:end]
            self.queries[places] = request.queries[start:end]
            self.ropes[places] = request.ropes[start:end]
            self.slots[places] = request.blocks[positions // size] * size + positions % size
            self.cos[places], self.sin[places] = self.angles(torch.from_numpy(positions))
            values = token, count, end, rows[i]
            for name, value in zip(("first", "counts", "contexts", "rows"), values, strict=True):
                self.columns[name][i] = value
            self.table[rows[i], : len(request.blocks)] = request.blocks
            token += count
        self.step[:] = token, len(parts)
        counts, contexts = (self.columns[name][: len(parts)] for name in ("counts", "contexts"))
        pieces = self.columns["tiles"], self.columns["splits"]
        count_pieces(counts, contexts, self.num_heads, *pieces, SPLIT_KEYS)
        self.program.num_threads = num_threads
        self.program.replay()
        token = 0
        for request, count in parts:
            done = slice(request.num_done, request.num_done + count)
            request.out[done] = self.queries[token : token + count]
            request.num_done += count
            token += count

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        dim = self.rope_dim
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        of_tokens = positions[:, None].double() * frequencies
        return of_tokens.cos().float(), of_tokens.sin().float()

    def expected(self, request: Request) -> Tensor:
        """Returns the attention of all the request's tokens, [tokens, heads, rank] float64."""
        length = len(request.queries)
        latents, keys = request.latents.double().split([self.rank, self.rope_dim], -1)
        mean = latents.square().mean(-1, keepdim=True)
        latents = latents * torch.rsqrt(mean + EPS) * self.norm.double()
        cos, sin = (table.double()[:, None] for table in self.angles(torch.arange(length)))
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        keys = rotate(keys[:, None], cos, sin, self.interleaved)[:, 0]
        ropes = rotate(request.ropes.double(), cos, sin, self.interleaved)
        rows = torch.cat([latents, keys], -1).to(getattr(torch, self.layout.stored)).double()
        return paged_latent_attention(
            request.queries.double(), ropes, rows[None], torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([0, length]), torch.tensor([length]), SCALE, self.sinks,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "sizes", "block_size", "interleaved", "stored", "has_sinks"),
    [
        (16, (512, 64), 16, True, "float32", False),
        (16, (512, 64), 64, False, "bfloat16", True),
        (1, (16, 2), 1, True, "float16", False),
        (3, (40, 8), 2, False, "float32", True),
        (50, (100, 24), 16, True, "float32", False),
        slow(128, (512, 64), 32, True, "bfloat16", True),
    ],
)
def test_prompts_and_decodes_equal_float64(
    heads, sizes, block_size, interleaved, stored, has_sinks
):
    layer = Layer(heads, sizes, block_size, stored, interleaved, has_sinks)
    lengths = [1, 15, 16, 17] if block_size < 4 else [1, 17, 130, 300]
    requests = [Request(n, layer, seed) for seed, n in enumerate(lengths)]
    layer.run([(request, max(len(request.queries) - 2, 1)) for request in requests])
    for _ in range(2):
        layer.run([(request, 1) for request in requests[1:]], NUM_THREADS)
    for request in requests:
        bound = 1e-5 if stored == "float32" else 1e-2
        found = request.out.double()
        torch.testing.assert_close(found, layer.expected(request), rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("heads", "sizes", "stored"),
    [
        (5, (64, 16), "float32"),
        (16, (40, 8), "bfloat16"),
        (49, (33, 6), "float16"),
        slow(16, (512, 64), "bfloat16"),
    ],
)
def test_results_have_the_same_bits_in_any_batch(heads, sizes, stored, monkeypatch):
    """Computes a request in one chunk, in several beside other requests and token by token, with
    and without room for splits, with one thread and with two. Unused slots contain NaN."""
    length = 2 * SPLIT_KEYS + 40

    def computed(chunks, others=0, num_threads=NUM_THREADS, max_splits=1024):
        monkeypatch.setattr("shmllm_kernels.cpu.attention_pieces.MAX_SPLITS", max_splits)
        layer = Layer(heads, sizes, 16, stored)
        request = Request(length, layer, 77)
        neighbours = [Request(80, layer, n) for n in range(others)]
        for i, count in enumerate(chunks):
            around = [(other, 1 + (count + i) % 3) for other in neighbours]
            around.insert(others // 2, (request, count))
            layer.run(around, num_threads)
        return request.out

    whole = computed([length], num_threads=1)
    assert not whole.isnan().any()
    assert torch.equal(whole, computed([length]))
    assert torch.equal(whole, computed([1, 2, 3, 128, 16, 300, *[1] * (length - 450)]))
    assert torch.equal(whole, computed([240, *[1] * 20, 200, *[1] * (length - 460)], max_splits=1))
    assert torch.equal(whole, computed([33, 100, 1, 1, length - 140, *[1] * 5], others=3))


def test_a_split_is_whole_chunks() -> None:
    assert SPLIT_KEYS % latent_attention.CHUNK_KEYS == 0
