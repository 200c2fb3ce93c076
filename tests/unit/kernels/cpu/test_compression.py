"""CPU kernels of compressed attention: the entries that they make, in steps of any sizes, and the
lists of what tokens attend to, are those of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cpu_kernels import run_kernel
from torch import Tensor

from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.attention_pieces import request_words
from shmllm_kernels.cpu.compression import COMPRESS, NORMALISE_HEADS, STORE_ROWS, scratch_bytes
from shmllm_kernels.cpu.indexer import scratch_bytes as list_scratch_bytes
from shmllm_kernels.cpu.latent_layout import DTYPES, LatentLayout, padded
from shmllm_kernels.cpu.latents import ROTATE, ROTATE_BACK
from shmllm_kernels.cpu.listed_keys import LIST_KEYS
from shmllm_kernels.reference import compression as reference

KEY_DIM, DIM, ROPE_DIM, EPS, NUM_THREADS = 20, 24, 8, 1e-3, 2
LENGTHS = (37, 1, 70)


class Requests:
    """Requests whose rows lie in blocks that are scattered, all of whose tokens a step may have.

    Args:
        block_size: tokens in a block.
        rate, overlaps: those of `CompressionSpec`.
        stored: the dtype name of the cache.
    """

    def __init__(self, block_size: int, rate: int, overlaps: bool, stored: str) -> None:
        self.block_size, self.rate, self.stored = block_size, rate, stored
        self.width = DIM * (1 + overlaps)
        self.rows = LatentLayout(KEY_DIM, block_size, stored, 2 * self.width)
        per_block = 1 << (-(-block_size // rate) - 1).bit_length()
        self.entries = LatentLayout(DIM, per_block, stored, DIM)
        counts = [-(-length // block_size) for length in LENGTHS]
        self.tables = [torch.full((len(LENGTHS), max(counts)), 2**30).int() for _ in range(2)]
        for table in self.tables:
            ids = torch.randperm(sum(counts) + 2).int()[: sum(counts)].split(counts)
            for row, own in zip(table, ids, strict=True):
                row[: len(own)] = own
        self.caches = [
            torch.full((sum(counts) + 2, layout.block_bytes + 64), 0xFF, dtype=torch.uint8)
            for layout in (self.rows, self.entries)
        ]
        dtype = getattr(torch, stored)
        self.parts = [torch.randn(n, 2 * self.width).to(dtype).float() for n in LENGTHS]
        self.bias, self.weight = torch.randn(rate, self.width), torch.randn(DIM).to(dtype)
        pairs = ROPE_DIM // 2
        self.angles = torch.randn(max(LENGTHS), pairs)  # of positions

    def pages(self, part: int, offset: int = 0) -> NDArray[np.int64]:
        """The `Pages` of rows or of entries."""
        cache, layout = self.caches[part], (self.rows, self.entries)[part]
        shift = self.block_size.bit_length() - 1
        return np.array([cache.data_ptr() + offset, shift, cache.stride(0), layout.row_bytes])

    def words(self, table: Tensor, step: list[tuple[int, int, int]]) -> NDArray[np.int64]:
        """The words of a step's requests; the step is (request, begin, end) of each."""
        counts = np.array([end - begin for _, begin, end in step])
        columns = [
            np.cumsum(counts) - counts, counts, np.array([end for *_, end in step]),
            np.array([request for request, *_ in step]),
        ]  # fmt: skip
        self.kept = [*getattr(self, "kept", []), *columns]
        at = [each.ctypes.data for each in columns]
        return request_words(*at, table.data_ptr(), table.shape[1], 0, 0)

    def run(self, step: list[tuple[int, int, int]]) -> None:
        """Stores and compresses the tokens of a step."""
        x = torch.cat([self.parts[request][begin:end] for request, begin, end in step])
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in step])
        slots = np.concatenate(
            [
                self.tables[0][request].long().numpy()[np.arange(begin, end) // self.block_size]
                * self.block_size
                + np.arange(begin, end) % self.block_size
                for request, begin, end in step
            ]
        )
        angles = self.angles[torch.from_numpy(np.maximum(positions + 1 - self.rate, 0))]
        cos, sin = angles.cos(), angles.sin()
        sizes = np.array([len(x), len(step)])
        words = [self.words(table, step) for table in self.tables]
        source = self.pages(0, self.rows.index_offset)
        numbers = [self.rate, int(self.width > DIM), DIM, 0, self.width, ROPE_DIM // 2]
        window, entries = np.array(numbers), self.pages(1)
        scratch = np.full(NUM_THREADS * scratch_bytes(DIM), 0xFF, np.uint8)
        program = KernelProgram(NUM_THREADS)
        operands = [sizes.ctypes.data, x.data_ptr(), 4 * x.stride(0), x.shape[1]]
        operands += [slots.ctypes.data, source.ctypes.data]
        program.record(STORE_ROWS[self.stored], operands)
        operands = [
            sizes.ctypes.data, words[0].ctypes.data, positions.ctypes.data, source.ctypes.data,
            window.ctypes.data, words[1].ctypes.data, entries.ctypes.data, self.bias.data_ptr(),
            self.weight.data_ptr(), word_of_float(EPS), cos.data_ptr(), sin.data_ptr(),
            scratch.ctypes.data, scratch_bytes(DIM),
        ]  # fmt: skip
        program.record(COMPRESS[self.stored, self.stored], operands)
        program.replay()

    def want(self, request: int) -> Tensor:
        """The entries of a request."""
        values, gates = self.parts[request].split(self.width, 1)
        angles = self.angles[: len(values) // self.rate * self.rate : self.rate]
        tables = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        arguments = values, gates, self.bias, self.weight.float(), EPS, *tables
        return reference.make_entries(*arguments)

    def address(self, part: int, request: int, index: int) -> int:
        """Where a row or an entry lies."""
        position = index if part == 0 else (index + 1) * self.rate - 1
        block, offset = divmod(position, self.block_size)
        if part:
            offset = index - block * self.block_size // self.rate
        start, _, stride, row_bytes = self.pages(part).tolist()
        return start + int(self.tables[part][request, block]) * stride + offset * row_bytes

    def entry(self, request: int, index: int) -> Tensor:
        """An entry as it lies in the cache."""
        offset = self.address(1, request, index) - self.caches[1].data_ptr()
        size = self.entries.index_offset
        stored = self.caches[1].view(-1)[offset : offset + size].view(getattr(torch, self.stored))
        return in_order(stored, self.stored)[:DIM].float()


def in_order(row: Tensor, stored: str) -> Tensor:
    """The elements of a row; in bfloat16 those of two vectors alternate."""
    if stored != "bfloat16":
        return row
    size = int(padded(1)) // 2
    return row.view(-1, size, 2).transpose(1, 2).reshape(-1)


def steps(rng: np.random.Generator) -> list[list[tuple[int, int, int]]]:
    """All tokens of all requests, in steps of random sizes."""
    done, found = [0] * len(LENGTHS), []
    while any(at < length for at, length in zip(done, LENGTHS, strict=True)):
        step = []
        for request, length in enumerate(LENGTHS):
            end = min(done[request] + int(rng.integers(0, 12)), length)
            if end > done[request]:
                step.append((request, done[request], end))
                done[request] = end
        found += [step] if step else []
    return found


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "rate", "overlaps"), [(8, 4, True), (4, 8, False), (8, 3, True), (16, 16, False)]
)
def test_entries_are_those_of_the_reference_in_steps_of_any_sizes(
    block_size: int, rate: int, overlaps: bool, stored: str
) -> None:
    requests = Requests(block_size, rate, overlaps, stored)
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[stored]
    found = []
    for parts in ([[(i, 0, n) for i, n in enumerate(LENGTHS)]], steps(np.random.default_rng(4))):
        requests.caches[1].fill_(0xFF)
        for step in parts:
            requests.run(step)
        found.append(requests.caches[1].clone())
        for request in range(len(LENGTHS)):
            for index, want in enumerate(requests.want(request)):
                got = requests.entry(request, index)
                torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    assert torch.equal(*found), "the bits depend on the steps"


@pytest.mark.parametrize("rate", [0, 3, 4])
@pytest.mark.parametrize("top_k", [0, 5])
def test_lists_have_a_window_and_the_entries_with_the_largest_scores(rate: int, top_k: int) -> None:
    heads, window, step = 6, 11, [(i, 0, n) for i, n in enumerate(LENGTHS)]
    requests = Requests(8, rate or 4, True, "float32")
    num_tokens = sum(LENGTHS)
    most = max(LENGTHS) // (rate or 4) + 1
    keys = [torch.randn(most, DIM).round(decimals=1) for _ in LENGTHS]
    for request, every in enumerate(keys):
        for index in range(LENGTHS[request] // (rate or 4)):
            offset = requests.address(1, request, index) - requests.caches[1].data_ptr()
            offset += requests.entries.index_offset
            own = requests.caches[1].view(-1)[offset : offset + 4 * int(padded(DIM))]
            own.view(torch.float32)[:] = 0
            own.view(torch.float32)[:DIM] = every[index]
    queries, weights = torch.randn(num_tokens, heads, DIM), torch.randn(num_tokens, heads)
    words = [requests.words(table, step) for table in requests.tables]
    pages = [requests.pages(part) for part in range(2)]
    numbers = [window, rate, top_k, requests.entries.index_offset, heads, DIM, int(padded(DIM))]
    sizes, lists = np.array([num_tokens, len(step)]), np.array(numbers)
    size = list_scratch_bytes(requests.entries, heads, most)
    scratch = np.full(NUM_THREADS * size, 0xFF, np.uint8)
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    out = np.full((num_tokens, window + most), -1)
    program = KernelProgram(NUM_THREADS)
    operands = [
        sizes.ctypes.data, words[0].ctypes.data, positions.ctypes.data, pages[0].ctypes.data,
        words[1].ctypes.data, pages[1].ctypes.data, lists.ctypes.data, queries.data_ptr(),
        4 * queries.stride(0), weights.data_ptr(), 4 * weights.stride(0), scratch.ctypes.data, size,
        out.ctypes.data, out.strides[0],
    ]  # fmt: skip
    program.record(LIST_KEYS["float32"], operands)
    program.replay()
    for token, position in enumerate(positions.tolist()):
        request = int(np.searchsorted(np.cumsum(LENGTHS), token, side="right"))
        products = (queries[token].double() @ keys[request].double().T).clamp(min=0)
        scores = weights[token].double() @ products if top_k else None
        places, entries = reference.list_keys(position, window, rate, scores, top_k)
        want = [requests.address(0, request, at) for at in places]
        want += [requests.address(1, request, at) for at in entries]
        assert out[token, : len(want)].tolist() == want
        assert (out[token, len(want) :] == -1).all()


def test_heads_are_divided_by_their_root_mean_squares() -> None:
    x = torch.randn(5, 3 * 20)
    want = x.unflatten(1, (3, 20))
    want = (want * want.square().mean(-1, keepdim=True).add(EPS).rsqrt()).flatten(1)
    run_kernel(NORMALISE_HEADS, 5, x, 4 * x.stride(0), 3, 20, word_of_float(EPS))
    torch.testing.assert_close(x, want)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_a_rotation_is_undone(interleaved: int) -> None:
    x, angles = torch.randn(5, 3 * 20), torch.randn(5, 4)
    rotated, (cos, sin) = x.clone(), (angles.cos(), angles.sin())
    operands = rotated, 4 * x.stride(0), 3, 80, 4, interleaved, cos, sin
    run_kernel(ROTATE, 5, *operands)
    assert not torch.allclose(rotated, x)
    run_kernel(ROTATE_BACK, 5, *operands)
    torch.testing.assert_close(rotated, x)
