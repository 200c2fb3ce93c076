"""The CPU kernel that writes keys and values: compared with the reference, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from shmllm_kernels.cpu.cache_layout import CacheLayout, head_words
from shmllm_kernels.cpu.heads import STORE_HEADS
from shmllm_kernels.cpu.kernel_program import KernelProgram
from shmllm_kernels.cpu.memory import word_of_float
from shmllm_kernels.cpu.row_factors import GROW
from shmllm_kernels.reference.rope_write import (
    HeadNorms,
    QueryGrowth,
    query_factors,
    rope_and_write,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 40, 16, 4
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """The features of a layer. is_wide: None: queries and keys have no norms. over_each: whether
    each head has weights of its own."""

    num_pairs: int = HEAD_DIM // 2
    is_interleaved: bool = False
    is_wide: bool | None = None
    over_each: bool = False
    is_centered: bool = False
    has_bias: bool = False
    offset: float = 0.0
    stored: str = "float32"
    has_value_norm: bool = False
    is_behind: bool = False
    value_dim: int = HEAD_DIM

    @property
    def extent(self) -> int:
        """The number by which the kernel knows what a norm reads, and its weights."""
        return 1 if self.is_wide else 2 if self.over_each else 0

    @property
    def layout(self) -> CacheLayout:
        """The layout of the cache."""
        return CacheLayout(NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, self.stored, self.value_dim)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The weights of the norms of queries and keys."""
        generator = torch.Generator().manual_seed(3)
        counts = (NUM_HEADS, NUM_KV_HEADS) if self.is_wide or self.over_each else (1, 1)
        if self.has_bias:
            counts = 2, 2
        query, key = (torch.randn(n * HEAD_DIM, generator=generator) for n in counts)
        return query.to(DTYPES[self.kinds[1]]), key.to(DTYPES[self.kinds[1]])

    def shaped(self, *weights: Tensor) -> list[Tensor]:
        """Returns weights as the reference takes them."""
        has_rows = self.over_each or self.has_bias
        return [each.view(-1, HEAD_DIM) if has_rows else each for each in weights]

    @property
    def kinds(self) -> tuple[str, str]:
        """The dtype names of the cache and of the weights, float32 beside int8."""
        return self.stored, self.stored if self.stored in DTYPES else "float32"


CASES = [
    Case(),
    Case(num_pairs=0),
    Case(num_pairs=8),
    Case(is_interleaved=True),
    Case(num_pairs=10, is_interleaved=True),
    Case(is_wide=False),
    Case(is_wide=False, offset=1.0),
    Case(num_pairs=0, is_wide=True),
    Case(num_pairs=15, is_interleaved=True, is_wide=True, offset=1.0),
    Case(is_wide=True, stored="float16"),
    Case(num_pairs=12, is_wide=False, offset=1.0, stored="bfloat16"),
    Case(is_wide=False, has_value_norm=True),
    Case(is_wide=False, is_behind=True),
    Case(num_pairs=8, is_interleaved=True, is_wide=False, offset=1.0, is_behind=True),
    Case(stored="int8"),
    Case(is_wide=False, over_each=True),
    Case(is_wide=False, over_each=True, is_centered=True, num_pairs=10, is_interleaved=True),
    Case(is_wide=False, is_centered=True, offset=1.0, is_behind=True, has_value_norm=True),
    Case(is_wide=False, over_each=True, is_centered=True, stored="bfloat16"),
    Case(is_wide=False, is_centered=True, has_bias=True, num_pairs=8),
    Case(is_wide=False, is_centered=True, has_bias=True, is_behind=True, stored="bfloat16"),
    Case(is_wide=False, has_value_norm=True, value_dim=24),
    Case(num_pairs=8, stored="int8", value_dim=48),
    Case(num_pairs=10, is_interleaved=True, is_wide=True, stored="int8"),
]


def angles(first: int, num_tokens: int, num_pairs: int) -> Tensor:
    return torch.arange(first, first + num_tokens)[:, None] * 0.7 ** torch.arange(num_pairs)


def stored(
    case: Case, qkv: Tensor, slots: Tensor, num_threads: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns the query heads and the cache after a step with these tokens.

    Args:
        case: the layer.
        qkv: [tokens, ...].
        slots: [tokens].
        num_threads: the number of threads.
        first: the position of the first token.
    """
    layout = case.layout
    heads, num_tokens = head_words(layout, NUM_HEADS), np.array([len(qkv)])
    qkv, (q_norm, k_norm) = qkv.clone(), case.weights
    cache = torch.zeros(NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8)
    turns = angles(first, len(qkv), case.num_pairs)
    tables = [turns.cos(), turns.sin()] if case.num_pairs else []
    norms = [0, 0] if case.is_wide is None else [q_norm.data_ptr(), k_norm.data_ptr()]
    ones = torch.ones(case.value_dim, dtype=q_norm.dtype)
    program = KernelProgram(num_threads)
    program.record(
        STORE_HEADS[case.kinds],
        [num_tokens.ctypes.data, heads.ctypes.data, qkv.data_ptr(), 4 * qkv.shape[1],
         *([table.data_ptr() for table in tables] or [0, 0]), slots.data_ptr(), cache.data_ptr(),
         *norms, word_of_float(EPS), word_of_float(case.offset), case.extent,
         case.num_pairs, int(case.is_interleaved), ones.data_ptr() if case.has_value_norm else 0,
         int(case.is_behind), int(case.is_centered) + int(case.has_bias)],
    )  # fmt: skip
    program.replay()
    return qkv[:, : NUM_HEADS * HEAD_DIM], cache


def keys_and_values(cache: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Returns the keys and the values in a cache, [blocks, BLOCK_SIZE, kv heads, width]."""
    layout, kind = case.layout, case.stored
    of_heads = cache.view(NUM_BLOCKS, NUM_KV_HEADS, -1)
    sizes = [layout.key_bytes, layout.value_bytes, 2 * layout.scale_row_bytes]
    parts = [part.contiguous() for part in of_heads.split(sizes, -1)]
    numbers = [part.view(DTYPES.get(kind, torch.int8)) for part in parts[:2]]
    keys = numbers[0].unflatten(-1, layout.keys_shape)
    values = numbers[1].unflatten(-1, layout.values_shape)
    if kind == "int8":
        scales = parts[2].view(torch.float32).unflatten(-1, (2, -1))
        keys = keys * scales[..., 0, None, :]
        values = values * scales[..., 1, :BLOCK_SIZE, None]
    values = values[..., : case.value_dim]
    return keys[..., :BLOCK_SIZE].permute(0, 3, 1, 2), values.permute(0, 2, 1, 3)


def expected(case: Case, qkv: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the query heads, the keys and the values that the reference computes."""
    shape, sizes = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS), (HEAD_DIM, case.value_dim)
    query = torch.empty(len(qkv), NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    keys, values = (torch.zeros(*shape, size, dtype=torch.float64) for size in sizes)
    turns = angles(0, len(qkv), case.num_pairs)[:, None].double()
    cos, sin = torch.cat([turns.cos()] * 2, -1), torch.cat([-turns.sin(), turns.sin()], -1)
    q_norm, k_norm = case.weights
    columns = (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
    heads, new = qkv[:, :columns].double(), qkv[:, columns:].double()
    rope_and_write(
        query, keys, values, heads.unflatten(1, (-1, HEAD_DIM)),
        cos if case.num_pairs else None, sin if case.num_pairs else None, slots,
        None if case.is_wide is None else HeadNorms(
            *(weight.double() for weight in case.shaped(q_norm, k_norm)), EPS, case.offset,
            case.has_value_norm, case.is_behind, case.is_centered, case.has_bias,
        ),
        case.is_interleaved, values=new.unflatten(1, (-1, case.value_dim)),
    )  # fmt: skip
    return query, keys, values


def random_tokens(count: int, case: Case) -> tuple[Tensor, Tensor]:
    """Returns qkv and slots."""
    generator = torch.Generator().manual_seed(count)
    width = (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + NUM_KV_HEADS * case.value_dim
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:count]
    return torch.randn(count, width, generator=generator) * 2 + 0.5, slots


@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_equal_the_reference(case: Case) -> None:
    qkv, slots = random_tokens(40, case)
    query, cache = stored(case, qkv, slots, 2)
    keys, values = keys_and_values(cache, case)
    want_query, want_keys, want_values = expected(case, qkv, slots)
    close = torch.testing.assert_close
    close(query.double().view_as(want_query), want_query, rtol=3e-6, atol=3e-6)
    if case.stored == "int8":
        for found, want in ((keys.double(), want_keys), (values.double(), want_values)):
            steps = want.abs().amax(-1, keepdim=True) / 127
            assert ((found - want).abs() <= 0.501 * steps + 1e-5).all()
        return
    unit = 3e-6 if case.stored == "float32" else torch.finfo(DTYPES[case.stored]).eps
    close(keys.double(), want_keys, rtol=unit, atol=1e-5)
    close(values.double(), want_values, rtol=unit, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_has_the_same_bits_in_any_step(case: Case) -> None:
    qkv, slots = random_tokens(33, case)
    query, cache = stored(case, qkv, slots, 2)
    alone = [stored(case, qkv[i : i + 1], slots[i : i + 1], 1, i) for i in range(len(qkv))]
    assert torch.equal(query, torch.cat([of_one for of_one, _ in alone]))
    assert torch.equal(cache, sum((of_one for _, of_one in alone), torch.zeros_like(cache)))


@pytest.mark.parametrize("power", [0.0, 0.1])
def test_queries_grow_with_their_position(power: float) -> None:
    growth = QueryGrowth(0.5, 7, 1, power)
    queries, positions = torch.randn(40, 33), torch.arange(40) * 11
    rows, count = queries.clone(), np.array([40])
    program = KernelProgram(2)
    program.record(
        GROW,
        [count.ctypes.data, rows.data_ptr(), 4 * 33, 20, positions.data_ptr(),
         word_of_float(growth.rate), growth.length, growth.offset, word_of_float(power)],
    )  # fmt: skip
    program.replay()
    assert torch.equal(rows[:, 20:], queries[:, 20:])
    want = queries[:, :20] * query_factors(positions, growth)[:, None]
    torch.testing.assert_close(rows[:, :20], want, rtol=1e-6, atol=0)
