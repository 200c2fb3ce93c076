"""CPU attention over the paged cache: compared with float64, and independent of the batch."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from support.emulated_tiles import EMULATED_ATTEND
from support.variants import diagonal, each_once, slow

from shmllm_kernels.cpu import attention_pieces
from shmllm_kernels.cpu.amx import HAS_AMX
from shmllm_kernels.cpu.attention import (
    ATTEND,
    MERGE_SPLITS,
    scratch_bytes,
    split_states_bytes,
)
from shmllm_kernels.cpu.attention_pieces import count_pieces, request_words
from shmllm_kernels.cpu.cache_layout import IN_TILES, TILE_KEYS, CacheLayout, dtype_of, head_words
from shmllm_kernels.cpu.heads import STORE_HEADS
from shmllm_kernels.cpu.kernel_program import KernelProgram
from shmllm_kernels.cpu.memory import word_of_float
from shmllm_kernels.windows import Chunk, Window, window_number

EPS = 1e-6
MAX_TOKENS, MAX_REQUESTS, MAX_BLOCKS, NUM_THREADS = 2100, 8, 300, 2
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ALL_TILES = ["emulated tiles", *(["tiles"] if HAS_AMX else [])]
TILES = ALL_TILES[-1]
"""Where there is AMX, it computes; one test compares it with the emulation."""
STORED = [*DTYPES, "int8", TILES]
UNIT = 2**-9
"""Half the largest relative error of a number that is rounded to bfloat16: the errors of a sum's
terms differ in sign."""


class Emulated(CacheLayout):
    """The layout of a cache for tile instructions that are emulated."""


def made(
    num_kv_heads: int, head_dim: int, block_size: int, stored: str, value_dim: int | None = None
) -> CacheLayout:
    """A layout, by a name in STORED."""
    kind = Emulated if stored == "emulated tiles" else CacheLayout
    dtype = IN_TILES if stored in ALL_TILES else stored
    return kind(num_kv_heads, head_dim, block_size, dtype, value_dim)


def widths_of(layout: CacheLayout, num_heads: int) -> list[int]:
    """The widths of queries, keys and values of a token."""
    kv_heads = layout.num_kv_heads
    return [num_heads * layout.head_dim, kv_heads * layout.head_dim, kv_heads * layout.value_dim]


def kinds_of(layout: CacheLayout) -> tuple[str, str]:
    """The dtype names of the cache and of the weights, float32 beside int8."""
    dtype = dtype_of(layout.stored)
    return layout.stored, dtype if dtype in DTYPES else "float32"


def rounded(heads: torch.Tensor, stored: str) -> torch.Tensor:
    """What the cache holds of keys or values, [tokens, heads, head_dim] float64."""
    stored = dtype_of(stored)
    if stored != "int8":
        return heads.to(DTYPES[stored]).double()
    scales = heads.abs().amax(-1, keepdim=True) / 127
    return (heads / scales + 0.5).floor() * scales


def angles(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    of_tokens = positions[:, None].double() * frequencies
    return of_tokens.cos(), of_tokens.sin()


class Request:
    """The projections of a request's tokens, and the number of tokens in the cache."""

    def __init__(
        self,
        length: int,
        num_heads: int,
        layout: CacheLayout,
        seed: int,
        ends: np.ndarray | None = None,
        biased: int = 0,
    ) -> None:
        self.ends = ends  # of the keys that its tokens see; None: those of the layer
        generator = torch.Generator().manual_seed(seed)
        width = sum(widths_of(layout, num_heads))
        self.qkv = torch.randn(length, width, generator=generator) * 1.5
        self.blocks = np.zeros(0, np.int32)
        self.num_done = 0
        self.out = torch.full((length, num_heads * layout.value_dim), torch.nan)


class Layer:
    """One layer: a program that writes keys and values to the cache and computes attention."""

    def __init__(
        self,
        num_heads: int,
        layout: CacheLayout,
        window: Window | None = None,
        normed: bool = False,
        seed=0,
        scale: float | None = None,
        cap: float = 0.0,
        has_sinks: bool = False,
        ends: np.ndarray | None = None,
        biased: int = 0,
        by_token: bool = False,
    ) -> None:
        self.ends = ends  # of the keys that a request's tokens see; None: the attention is causal
        self.layout, self.num_heads, self.window = layout, num_heads, window
        dtype = DTYPES[kinds_of(layout)[1]]
        self.scale, self.cap = scale, cap
        self.sinks = (torch.arange(num_heads) - 2).to(dtype) if has_sinks else None
        self.generator = np.random.default_rng(seed)
        self.biased = biased  # the number of positions between which there are biases
        self.biases = torch.full((num_heads, 2 * biased + 31), torch.nan)[:, 16:-16]
        self.biases.normal_(generator=torch.Generator().manual_seed(5))
        self.of_tokens: torch.Tensor | None = None  # the same numbers for each token of a step
        if by_token:
            self.of_tokens = torch.full((MAX_TOKENS, num_heads, biased + 17), torch.nan)
        num_blocks = MAX_BLOCKS + 50
        self.cache = np.zeros((num_blocks, layout.block_bytes), np.uint8)
        self.free = list(self.generator.permutation(num_blocks))
        dim, width = layout.head_dim, sum(widths_of(layout, num_heads))
        weights = torch.Generator().manual_seed(9)
        self.norms = [torch.rand(dim, generator=weights).to(dtype) + 0.5 for _ in range(2)]
        self.normed = normed
        self.step = np.zeros(2, np.int64)
        self.columns = {
            name: np.zeros(MAX_REQUESTS + 1, np.int64)
            for name in ("first", "counts", "contexts", "rows", "tiles", "splits")
        }
        self.table = np.zeros((MAX_REQUESTS, MAX_BLOCKS), np.int32)
        self.qkv = np.zeros((MAX_TOKENS, width), np.float32)
        self.out = np.zeros((MAX_TOKENS, num_heads * layout.value_dim), np.float32)
        self.cos, self.sin = (np.zeros((MAX_TOKENS, dim // 2), np.float32) for _ in range(2))
        self.slots, self.seen = np.zeros(MAX_TOKENS, np.int64), np.zeros(MAX_TOKENS, np.int64)
        self._record()

    def _record(self) -> None:
        at = lambda array: array.ctypes.data  # noqa: E731
        columns = self.columns
        heads = head_words(self.layout, self.num_heads, self.scale)
        addresses = [at(columns[name]) for name in ("first", "counts", "contexts", "rows")]
        pieces = at(columns["tiles"]), at(columns["splits"])
        requests = request_words(*addresses, at(self.table), MAX_BLOCKS, *pieces)
        per_thread = scratch_bytes(self.layout, self.num_heads)
        scratch = np.full(NUM_THREADS * per_thread, 0xFF, np.uint8)
        states = np.full(split_states_bytes(self.layout, self.num_heads), 0xFF, np.uint8)  # NaN
        norms = [norm.data_ptr() if self.normed else 0 for norm in self.norms]
        self.program = KernelProgram(1)
        qkv, out = self.qkv, self.out
        self.program.record(
            STORE_HEADS[kinds_of(self.layout)],
            [at(self.step), at(heads), at(qkv), qkv.strides[0], at(self.cos), at(self.sin),
             at(self.slots), at(self.cache), *norms, word_of_float(EPS), 0, 0,
             self.layout.head_dim // 2, 0],
            [heads],
        )  # fmt: skip
        operands = [
            at(self.step), at(requests), at(heads), at(qkv), qkv.strides[0], at(out),
            out.strides[0], at(self.cache), window_number(self.window), at(scratch), per_thread,
            word_of_float(self.cap * math.log2(math.e)),
            0 if self.sinks is None else self.sinks.data_ptr(), at(states),
            0 if self.ends is None else at(self.seen), *self._place_of_biases(),
        ]  # fmt: skip
        attend = EMULATED_ATTEND if isinstance(self.layout, Emulated) else ATTEND
        for kernels in (attend, MERGE_SPLITS):
            kernel = kernels[kinds_of(self.layout)]
            self.program.record(kernel, operands, [requests, scratch, states])

    def _place_of_biases(self) -> tuple[int, int, int]:
        if not self.biased:
            return 0, 0, 0
        if self.of_tokens is not None:
            strides = 4 * self.of_tokens.stride(1), 4 * self.of_tokens.stride(0)
            return self.of_tokens.data_ptr(), *strides
        return self.biases[0, self.biased - 1 :].data_ptr(), 4 * self.biases.stride(0), 0

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
            self.qkv[places] = request.qkv[start:end]
            if self.ends is not None:
                ends = self.ends if request.ends is None else request.ends
                self.seen[places] = np.minimum(ends[start:end], len(request.qkv))
            if self.of_tokens is not None:
                for row, position in enumerate(positions, token):
                    own = self.biases[:, self.biased - 1 - position :][:, : self.biased]
                    self.of_tokens[row, :, : self.biased] = own
            self.slots[places] = request.blocks[positions // size] * size + positions % size
            tables = angles(torch.from_numpy(positions), self.layout.head_dim)
            self.cos[places], self.sin[places] = tables[0].numpy(), tables[1].numpy()
            for name, value in zip(
                ("first", "counts", "contexts", "rows"), (token, count, end, rows[i]), strict=True
            ):
                self.columns[name][i] = value
            self.table[rows[i], : len(request.blocks)] = request.blocks
            token += count
        self.step[:] = token, len(parts)
        heads_per_kv = self.num_heads // self.layout.num_kv_heads
        counts, contexts = (self.columns[name][: len(parts)] for name in ("counts", "contexts"))
        count_pieces(counts, contexts, heads_per_kv, self.columns["tiles"], self.columns["splits"])
        self.program.num_threads = num_threads
        self.program.replay()
        token = 0
        for request, count in parts:
            request.out[request.num_done : request.num_done + count] = torch.from_numpy(
                self.out[token : token + count].copy()
            )
            request.num_done += count
            token += count

    def expected(self, request: Request) -> torch.Tensor:
        """Returns the attention of all the request's tokens, computed in float64."""
        return self.expected_and_bound(request)[0]

    def expected_and_bound(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the attention of all the request's tokens, computed in float64, and how far it
        may differ, to the first order, if queries and weights are rounded to bfloat16.

        The share w of a key then changes by w times UNIT times (1 + scale * the sum of |q * k|):
        no cap makes a difference of scores larger. The weighted mean o of the values v changes by
        the sum of (v - o) times these changes.
        """
        layout, length = self.layout, len(request.qkv)
        dim, kv = layout.head_dim, layout.num_kv_heads
        parts = request.qkv.double().split(widths_of(layout, self.num_heads), 1)
        query, key = (part.unflatten(1, (-1, dim)) for part in parts[:2])
        value = parts[2].unflatten(1, (-1, layout.value_dim))
        if self.normed:
            query, key = (
                part * torch.rsqrt(part.square().mean(-1, keepdim=True) + EPS) * norm.double()
                for part, norm in zip((query, key), self.norms, strict=True)
            )
        cos, sin = (table[:, None] for table in angles(torch.arange(length), dim))
        turned = []
        for part in (query, key):
            low, high = part.chunk(2, -1)
            turned.append(torch.cat([low * cos - high * sin, high * cos + low * sin], -1))
        query, key = turned
        key, value = (rounded(part, layout.stored) for part in (key, value))
        key, value = (part.repeat_interleave(self.num_heads // kv, 1) for part in (key, value))
        scale = dim**-0.5 if self.scale is None else self.scale
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        errors = UNIT * (1 + torch.einsum("qhd,khd->hqk", query.abs(), key.abs()) * scale)
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        if self.biased:
            scores += self.biases.double()[:, self.biased - 1 - distance]
        ends = torch.arange(length) + 1
        if self.ends is not None:
            ends = torch.from_numpy(self.ends if request.ends is None else request.ends)
        seen = torch.arange(length) < ends[:length, None]
        if isinstance(self.window, Chunk):
            chunks = torch.arange(length) // self.window.size
            seen &= chunks >= chunks[:, None]
        elif self.window:
            seen &= distance < self.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, length, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., :length]
        out = torch.einsum("hqk,khd->qhd", weights, value)
        if not layout.is_tiled:
            return out.reshape(length, -1), torch.zeros(length, 1)
        bound = torch.stack(
            [
                torch.einsum("hk,khd->hd", weights[:, q] * errors[:, q], (value - out[q]).abs())
                for q in range(length)
            ]
        )
        return out.reshape(length, -1), bound.reshape(length, -1)


def check(layer: Layer, request: Request) -> None:
    if layer.layout.is_tiled:
        expected, bound = layer.expected_and_bound(request)
        # Keys that are turned in float32 may round to the other side than in float64.
        assert ((request.out.double() - expected).abs() <= 1.1 * bound + 1e-5).all()
        return
    torch.testing.assert_close(request.out.double(), layer.expected(request), rtol=0, atol=1e-5)


ALL_HEADS, HEAD_DIMS = [(4, 2), (9, 3), (8, 8), (8, 1)], [16, 20, 64, 80, 128]
SHAPES = [
    *diagonal(HEAD_DIMS, ALL_HEADS, ["float32"], [8, 16, 32, 64, 128]),
    *each_once([16, 20, 24, 32, 64], ALL_HEADS, [TILES], [16, 32, 128]),
    *[
        slow(*each)
        for each in itertools.product([80, 96, 128, 256], ALL_HEADS, [TILES], [16, 32, 128])
    ],
]
"""The emulation of heads of each number of tiles takes up to a quarter of a minute to compile."""


@pytest.mark.parametrize(("head_dim", "heads", "stored", "block_size"), SHAPES)
def test_prefill_and_decode(head_dim, heads, stored, block_size):
    num_heads, num_kv_heads = heads
    layout = made(num_kv_heads, head_dim, block_size, stored)
    layer = Layer(num_heads, layout)
    lengths = [1, 15, 16, 17, 150, 300]
    requests = [Request(n, num_heads, layout, seed) for seed, n in enumerate(lengths)]
    layer.run([(request, max(len(request.qkv) - 1, 1)) for request in requests])
    layer.run([(request, 1) for request in requests[1:]])
    for request in requests:
        check(layer, request)


@pytest.mark.parametrize("stored", ["float32", TILES])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(14, 2, 64), (5, 1, 2), (2, 2, 256), (71, 1, 32)]
)
def test_other_shapes(num_heads, num_kv_heads, head_dim, stored):
    layout = made(num_kv_heads, head_dim, 16, stored)
    layer = Layer(num_heads, layout)
    requests = [Request(n, num_heads, layout, n) for n in (40, 200)]
    layer.run([(request, len(request.qkv) - 1) for request in requests])
    layer.run([(request, 1) for request in requests])
    for request in requests:
        check(layer, request)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "stored"),
    [
        *[(192, 128, "float32"), (24, 16, "bfloat16"), (16, 40, "int8"), (24, 16, TILES)],
        slow(192, 128, TILES),
    ],
)
def test_values_of_another_width(head_dim, value_dim, stored):
    layout = made(2, head_dim, 16, stored, value_dim)
    layer = Layer(6, layout, 40, has_sinks=True)
    requests = [Request(n, 6, layout, n) for n in (5, 16, 270)]
    layer.run([(request, len(request.qkv) - 1) for request in requests])
    layer.run([(request, 1) for request in requests], NUM_THREADS)
    for request in requests:
        check(layer, request)
    whole = Request(270, 6, layout, 270)
    Layer(6, layout, 40, has_sinks=True).run([(whole, 270)])
    assert torch.equal(whole.out, requests[2].out)


WINDOWS = (1, 7, 64, 200, Chunk(7), Chunk(200))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("block_size", "stored"), [(8, "float32"), (16, "float32"), (64, "float32"), (16, TILES)]
)
def test_window(window, block_size, stored):
    layout = made(2, 32, block_size, stored)
    layer = Layer(6, layout, window)
    requests = [Request(n, 6, layout, n) for n in (5, 450, 130)]
    layer.run([(request, len(request.qkv) - 1) for request in requests])
    layer.run([(request, 1) for request in requests])
    for request in requests:
        check(layer, request)


@pytest.mark.parametrize("stored", STORED)
def test_dtypes_and_norms(stored):
    layout = made(2, 64, 16, stored)
    layer = Layer(4, layout, normed=True)
    request = Request(270, 4, layout, 1)
    layer.run([(request, 200)])
    layer.run([(request, 70)])
    if stored in ("float32", TILES):
        check(layer, request)
    else:  # a key near the middle between two representable numbers may be rounded either way
        bound = 1e-2 if stored == "int8" else 2e-3
        torch.testing.assert_close(
            request.out.double(), layer.expected(request), rtol=0, atol=bound
        )


OPTIONS = {
    "scaled": {"scale": 0.3},
    "capped": {"scale": 1.0, "cap": 5.0},
    "hardly-capped": {"cap": 1000.0},
    "sinks": {"has_sinks": True},
    "biases": {"biased": 300},
    "all": {"scale": 0.5, "cap": 3.0, "has_sinks": True, "window": 40, "biased": 900},
}


@pytest.mark.parametrize("stored", ["float32", slow("bfloat16"), slow("float16"), "int8", TILES])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_scale_cap_and_sinks(options, stored):
    layout = made(2, 32, 16, stored)
    layer = Layer(6, layout, **options)
    requests = [Request(n, 6, layout, n) for n in (1, 5, 300, 130)]
    layer.run([(request, max(len(request.qkv) - 1, 1)) for request in requests])
    layer.run([(request, 1) for request in requests[1:]])
    for request in requests:
        if stored in ("float32", TILES):
            check(layer, request)
        else:
            torch.testing.assert_close(
                request.out.double(), layer.expected(request), rtol=0, atol=2e-2
            )


def test_long_context():
    layout = CacheLayout(2, 64, 16, "float32")
    layer = Layer(4, layout)
    request = Request(2000, 4, layout, 3)
    layer.run([(request, 1999)])
    layer.run([(request, 1)])
    check(layer, request)


@pytest.mark.parametrize(
    ("stored", "options"),
    diagonal(
        ["float32", "int8", TILES],
        [{}, {"has_sinks": True, "window": 1100, "cap": 3.0}, {"window": Chunk(1050)}],
    ),
)
def test_pieces_of_a_context_change_no_bit(options, stored, monkeypatch):
    """Computes the last tokens in a chunk, whose pieces are tiles of queries, and one by one, whose
    pieces are splits; with and without room for these, and beside other requests."""
    layout = made(2, 20, 16, stored)

    def computed(chunks, others=0, max_splits=attention_pieces.MAX_SPLITS):
        monkeypatch.setattr(attention_pieces, "MAX_SPLITS", max_splits)
        layer = Layer(4, layout, **options)
        request = Request(2090, 4, layout, 7)
        neighbours = [Request(100, 4, layout, 8 + n) for n in range(others)]
        for count in chunks:
            around = [(other, 1) for other in neighbours]
            around.insert(others // 2, (request, count))
            layer.run(around, NUM_THREADS)
        return request.out

    whole = computed([2090])
    assert not whole.isnan().any()
    assert torch.equal(whole, computed([2085, *[1] * 5]))
    assert torch.equal(whole, computed([1020, *[1] * 10, 1010, *[1] * 50], others=4))
    assert torch.equal(whole, computed([2040, *[1] * 50], max_splits=2))


def test_contexts_are_divided_while_there_is_room(monkeypatch):
    monkeypatch.setattr(attention_pieces, "MAX_SPLITS", 5)
    counts = np.array([1, 1, 5, 1, 1])
    contexts = np.array([1024, 3000, 9000, 4096, 1025])
    tiles, splits = np.zeros(6, np.int64), np.zeros(6, np.int64)
    count_pieces(counts, contexts, 3, tiles, splits)
    assert splits.tolist() == [-1, 0, -1, -1, -1, 1]  # 3 splits, and no room for 4 and 2 others
    assert tiles.tolist() == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("options", "shape", "stored"),
    diagonal([{}, OPTIONS["all"]], [(4, 16, 64), (6, 8, 20), (10, 32, 80)], STORED),
)
def test_results_have_the_same_bits_in_any_batch(options, shape, stored):
    """Computes a request in one chunk, in several chunks beside other requests and token by token,
    with one thread and with two, and with NaN in unused cache slots."""
    num_heads, block_size, dim = shape
    layout = made(2, dim, max(block_size, TILE_KEYS if stored == TILES else 1), stored)
    length = 290

    def computed(chunks, others, num_threads, poison=None):
        layer = Layer(num_heads, layout, normed=True, seed=len(chunks), **options)
        if poison is not None:
            as_numbers = layer.cache.view(np.uint16 if layout.itemsize == 2 else np.uint32)
            # NaN as scales of int8, too
            as_numbers[:] = poison
        request = Request(length, num_heads, layout, 77)
        neighbours = [Request(sum(chunks) * 3, num_heads, layout, n) for n in range(others)]
        for i, count in enumerate(chunks):
            around = [(other, 1 + (count + i) % 3) for other in neighbours]
            around.insert(others // 2, (request, count))
            layer.run(around, num_threads)
        return request.out

    alone = computed([length], 0, 1)
    assert not alone.isnan().any()
    assert torch.equal(alone, computed([1, 2, 3, 128, 16, 7, 100, 33], 0, 1))
    assert torch.equal(alone, computed([33, 100, 1, 1, 5, 150], 5, 2))
    assert torch.equal(alone, computed([length], 3, 2))
    assert torch.equal(alone, computed([1] * length, 0, 2))
    assert torch.equal(alone, computed([30, *[1] * (length - 30)], 2, 2))
    nan = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}.get(
        dtype_of(layout.stored), 0x7FC00000
    )
    assert torch.equal(alone, computed([100, 190], 1, 2, poison=nan))


@pytest.mark.parametrize(("heads", "stored"), diagonal([(4, 4), (6, 2)], ["float32", TILES]))
def test_biases_of_tokens_are_added_as_those_of_distances_are(
    heads: tuple[int, int], stored: str
) -> None:
    found = []
    for by_token in (False, True):
        layer = Layer(heads[0], made(heads[1], 32, 16, stored), biased=300, by_token=by_token)
        requests = [Request(length, heads[0], layer.layout, length) for length in (5, 300, 70)]
        layer.run([(request, len(request.qkv) - 2) for request in requests])
        layer.run([(request, 2) for request in requests[1:]], num_threads=2)
        found.append(torch.cat([requests[0].out[:3], *(each.out for each in requests[1:])]))
    assert torch.equal(*found)


@pytest.mark.parametrize("dim", [16, 48, 80])
def test_the_padding_of_keys_is_written(dim: int) -> None:
    """Their dimensions are filled up to whole steps of a product, which NaN would spoil."""
    found = []
    for poison in (0, 0x7FC0):
        layer = Layer(4, made(2, dim, 32, TILES))
        layer.cache.view(np.uint16)[:] = poison
        request = Request(70, 4, layer.layout, 7)
        for count in (50, 19, 1):
            layer.run([(request, count)])
        found.append(request.out)
    assert torch.equal(*found)


LENGTHS = (1, 5, 16, 17, 70, 129, 300)
AHEADS = {
    "all": np.full(MAX_TOKENS, MAX_TOKENS),
    "3": np.arange(MAX_TOKENS) + 4,
    "images": np.maximum(np.arange(MAX_TOKENS) // 40 * 40 + 25, np.arange(MAX_TOKENS) + 1),
}
"""How far the tokens of a request see: to its end, 3 positions ahead, or to the end of the image
that they are in, the first 25 tokens of each 40."""


@pytest.mark.parametrize(
    ("heads", "window", "ahead", "stored"),
    diagonal([(4, 4), (6, 2)], [0, 9], list(AHEADS), STORED),
)
def test_tokens_see_keys_behind_them_up_to_their_ends(
    heads: tuple[int, int], window: int, ahead: str, stored: str
) -> None:
    num_heads, kv_heads = heads
    layout = made(kv_heads, 32, 16, stored)
    options = {"cap": 20.0} if window else {"biased": max(LENGTHS)}
    layer = Layer(num_heads, layout, window, ends=AHEADS[ahead], **options)
    requests = [Request(length, num_heads, layout, i) for i, length in enumerate(LENGTHS)]
    layer.run([(request, len(request.qkv)) for request in requests], num_threads=2)
    for request in requests:
        # In others a key may round to the other side than in float64.
        if stored in ("float32", TILES):
            check(layer, request)
        alone = Request(len(request.qkv), num_heads, layout, requests.index(request))
        layer.run([(alone, len(alone.qkv))])
        assert torch.equal(alone.out, request.out)


def test_chunks_that_end_behind_an_image_give_the_same_bits() -> None:
    layout = CacheLayout(2, 32, 16, "float32")
    layer = Layer(4, layout, ends=AHEADS["images"])
    whole, chunked = (Request(120, 4, layout, 3) for _ in range(2))
    layer.run([(whole, 120)])
    for count in (25, 15, 40, 40):
        layer.run([(chunked, count)])
    check(layer, whole)
    assert torch.equal(whole.out, chunked.out)


def ends_of_images(length: int, longest: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """The ends of keys of a request with random images, and the positions that none goes across."""
    generator = np.random.default_rng(seed)
    ends, position = np.arange(length) + 1, 0
    while position < length:
        position += generator.integers(0, longest // 3)
        end = min(position + generator.integers(1, longest), length)
        ends[position:end] = end
        position = end
    return ends, [end for end in range(1, length) if ends[end - 1] == end]


@pytest.mark.parametrize(
    ("heads", "window", "stored"), diagonal([(4, 4), (6, 2), (8, 1)], [0, 9, 40], STORED)
)
def test_requests_with_images_of_their_own_beside_decodes(
    heads: tuple[int, int], window: int, stored: str
) -> None:
    """Their chunks begin behind text and images, images are longer than a window and go across
    splits, and the last tokens come one by one: that of the longest context is in pieces."""
    num_heads, kv_heads = heads
    layout = made(kv_heads, 32, 16, stored)
    layer = Layer(num_heads, layout, window, ends=np.arange(MAX_TOKENS) + 1, seed=window)
    requests, plans = [], []
    for i, length in enumerate((1200, 70, 260, 17)):
        ends, places = ends_of_images(length - 3, 90, i)
        ends = np.append(ends, np.arange(length - 3, length) + 1)
        requests.append(Request(length, num_heads, layout, i, ends))
        cuts = sorted(np.random.default_rng(i).choice(places, min(4, len(places)), replace=False))
        plans.append([*np.diff([0, *cuts, length - 3]), 1, 1, 1])
    generator = np.random.default_rng(window)
    while any(plans):
        chosen = [
            i for i in generator.permutation(len(plans)) if plans[i] and generator.random() < 0.7
        ]
        if chosen:
            layer.run([(requests[i], plans[i].pop(0)) for i in chosen], num_threads=2)
    for i, request in enumerate(requests):
        if stored in ("float32", TILES):
            check(layer, request)
        else:
            differences = request.out.double() - layer.expected(request)
            assert differences.abs().max() < 0.05
        alone = Request(len(request.qkv), num_heads, layout, i, request.ends)
        layer.run([(alone, len(alone.qkv))])
        assert torch.equal(alone.out, request.out)


@pytest.mark.parametrize(("window", "stored"), diagonal([0, 9], STORED))
def test_ends_behind_each_token_have_the_bits_of_causal_attention(window: int, stored: str) -> None:
    layout = made(2, 32, 16, stored)
    found = []
    for ends in (None, np.arange(MAX_TOKENS) + 1):
        layer = Layer(6, layout, window, ends=ends)
        requests = [Request(length, 6, layout, i) for i, length in enumerate((1100, 40))]
        layer.run([(requests[0], 900), (requests[1], 30)])
        layer.run([(requests[0], 199), (requests[1], 1)])
        layer.run([(requests[1], 9), (requests[0], 1)])
        found.append(torch.cat([request.out for request in requests]))
    assert torch.equal(*found)


@pytest.mark.skipif(not HAS_AMX, reason="the CPU lacks AMX, or Linux refuses it")
@pytest.mark.parametrize("heads", [(9, 3), (4, 1)])
def test_amx_computes_what_the_emulation_computes(heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    results = []
    for stored in ALL_TILES:
        layout = made(num_kv_heads, 80, 32, stored)
        layer, request = Layer(num_heads, layout), Request(300, num_heads, layout, 5)
        layer.run([(request, 250)])
        for _ in range(50):
            layer.run([(request, 1)])
        results.append(request.out)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 20, 96])
def test_a_tile_of_tokens_is_stored_as_single_tokens_are(head_dim: int, block_size: int) -> None:
    layout = made(2, head_dim, block_size, "emulated tiles")
    caches = []
    for chunks in ([70], [1] * 70, [16, 3, 29, 22]):
        layer, request = Layer(4, layout), Request(70, 4, layout, 3)
        for count in chunks:
            layer.run([(request, count)])
        caches.append(torch.from_numpy(layer.cache[request.blocks]))
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0], caches[2])
    keys = caches[0][:, : layout.key_bytes].contiguous().view(torch.bfloat16)
    keys = keys.view(-1, layout.keys_shape[0] // 2, block_size, 2).transpose(1, 2).flatten(2)
    assert not keys[..., head_dim:].any(), "padding is not zero"
    assert keys.flatten(0, 1)[:70, :head_dim].any(-1).all()


def test_tiles_need_whole_blocks() -> None:
    with pytest.raises(ValueError, match="block_size 8 is no multiple of 16"):
        CacheLayout(2, 64, 8, IN_TILES)
