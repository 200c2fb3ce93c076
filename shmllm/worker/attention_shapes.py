"""Shapes of attention calls with which a query's output has the same bits.

Owns the search for them. torch attends in tiles of 512 keys, and its products choose their
kernels by the number of query rows and cut long sums of keys in pieces. So the number of queries
and the padded length of the context show in the last bits, unless both are among those found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.row_tiles import one_thread, same_bits
from shmllm.models.tiled_product import uneven

KEY_TILE = 512
QUERY_LENS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT_LENS = (64, 128, 192, 256, 320, 384, 448, KEY_TILE)
REFERENCES = (8, 16, 32)
NUM_QUERIES = 160


@dataclass(frozen=True, slots=True)
class AlikeShapes:
    """Calls that give a query the same bits; a mask is always one of their arguments.

    Attributes:
        query_lens: tokens of one call, ascending.
        context_lens: what may follow whole tiles of KEY_TILE keys, ascending to KEY_TILE.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    always_masked: ClassVar[bool] = True

    @property
    def longest_query(self) -> int:
        return self.query_lens[-1]

    def padded_query(self, count: int) -> int:
        """Tokens to compute for `count` of them, at most `longest_query`."""
        return next(n for n in self.query_lens if n >= count)

    def padded_context(self, length: int) -> int:
        """Keys to attend to for a context of `length` tokens."""
        whole = (length - 1) // KEY_TILE * KEY_TILE
        return whole + next(n for n in self.context_lens if n >= length - whole)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Queries to one context of whole tiles and `length` keys.

    Attributes:
        query: (1, H, Q, per_kv, D).
        key: (1, H, whole + KEY_TILE, D), as `value`.
        positions: (Q,) of the queries.
        whole: keys in whole tiles before the last one.
        length: keys in the last tile that any query sees.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    whole: int
    length: int

    def attend(self, first: int, count: int, length: int) -> Tensor:
        """Queries `first` to `first + count`, the last tile padded to `length` keys ->
        (1, H, count, per_kv, D)."""
        context = self.whole + length
        query = self.query[:, :, first : first + count]
        hidden = torch.arange(context) > self.positions[first : first + count, None]
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -torch.inf)
        attended = scaled_dot_product_attention(
            query.flatten(2, 3),
            self.key[:, :, :context],
            self.value[:, :, :context],
            attn_mask=mask.repeat_interleave(query.shape[3], 0)[None, None],
        )
        return attended.view(query.shape)


def find_alike_shapes(config: ModelConfig, dtype: torch.dtype) -> AlikeShapes:
    """The shapes that hold for this model on this machine, from calls on small tensors.

    Raises:
        EngineStartError: there are none.
    """
    heads = (min(config.num_kv_heads, 2), config.num_heads // config.num_kv_heads)
    trials = {
        length: [
            trial
            for whole in (0, KEY_TILE)
            for trial in _make_trials(heads, config.head_dim, dtype, whole, length)
        ]
        for length in CONTEXT_LENS
    }
    for reference in REFERENCES:
        query_lens = [n for n in QUERY_LENS if _agrees(trials[KEY_TILE], reference, (n,))]
        if reference in query_lens:
            lengths = [n for n in CONTEXT_LENS if _agrees(trials[n], reference, query_lens)]
            return AlikeShapes(tuple(query_lens), tuple(lengths))
    raise EngineStartError(
        f"deterministic=True cannot be held on this machine: torch's attention with "
        f"{config.num_heads} heads of {config.head_dim} in {dtype} depends on the place of a query"
    )


def _make_trials(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, whole: int, length: int
) -> tuple[_Trial, _Trial]:
    """One whose scores are rounding errors alone, and one whose outputs are."""
    generator = torch.Generator().manual_seed(whole + length)
    kv_heads, per_kv = heads
    keys, half = whole + KEY_TILE, dim // 2
    order = torch.randperm(2 * half, generator=generator)
    query = torch.zeros(1, kv_heads, NUM_QUERIES, per_kv, dim)
    key = torch.zeros(1, kv_heads, keys, dim)
    left = 8 * uneven(generator, 1, kv_heads, NUM_QUERIES, per_kv, half)
    right = 8 * uneven(generator, 1, kv_heads, keys, half)
    query[..., : 2 * half] = torch.cat([left, left], -1)[..., order]
    key[..., : 2 * half] = torch.cat([right, -right], -1)[..., order]
    value = torch.randn(1, kv_heads, keys, dim, generator=generator)
    # Every other query sees all of the context, the others random parts of it.
    positions = torch.randint(0, whole + length, (NUM_QUERIES,), generator=generator)
    positions[::2] = whole + length - 1
    place = (positions, whole, length)
    scores = _Trial(query.to(dtype), key.to(dtype), value.to(dtype), *place)
    # All weights are equal, and over each tile the values cancel in random order: sums that
    # are cut anywhere show.
    value = torch.zeros(1, kv_heads, keys, dim)
    for begin, size in ((0, whole), (whole, length)):
        part = 256 * uneven(generator, 1, kv_heads, size // 2, dim)
        mixed = torch.randperm(size, generator=generator)
        value[:, :, begin : begin + size] = torch.cat([part, -part], 2)[:, :, mixed]
    outputs = _Trial(torch.zeros_like(query).to(dtype), key.to(dtype), value.to(dtype), *place)
    return scores, outputs


def _agrees(trials: Sequence[_Trial], reference: int, query_lens: Sequence[int]) -> bool:
    """Whether calls of these query lengths, padded no further than to what they see, give what
    calls of the reference's length padded to whole tiles give."""
    for trial in trials:
        expected = torch.cat(
            [
                trial.attend(first, reference, KEY_TILE)
                for first in range(0, NUM_QUERIES, reference)
            ],
            2,
        )
        for count in query_lens:
            for first in (0, 3, NUM_QUERIES - count):
                attended = trial.attend(first, count, trial.length)
                if not same_bits(attended, expected[:, :, first : first + count]):
                    return False
            with one_thread():
                attended = trial.attend(0, count, trial.length)
            if not same_bits(attended, expected[:, :, :count]):
                return False
    return True
