"""The blocks of GGUF files in the order of packed matrices: the same bits, in other places.

Blocks of 32 elements have the first half of these in the lower halves of their bytes and the second
half in the upper ones; packed matrices do so for 64 elements. The types with K have records of 256
elements. Words of 8 bytes are moved, and their bytes computed together: loading then takes about as
long as reading a file. `gguf_grids` has the types whose elements are looked up together. This
module must not know files. The layout of blocks: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shmllm.models import gguf_grids as grids

Array = np.ndarray[Any, np.dtype[Any]]
Repack = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Blocks [rows, blocks, block bytes] uint8 -> the integers and scales of rows; see `packed`."""

WORD = "<u8"
_LOW, _HIGH = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
_LOWEST = np.uint64(0x0101010101010101)
_GATHER = np.uint64(0x0102040810204080)
"""The factor that brings the lowest bits of a word's 8 bytes together in its highest byte."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks.

    Attributes:
        kind: one of `packed.PACKINGS`, which has the same values.
        repack: brings blocks into its order.
    """

    kind: str
    repack: Repack


def _words(blocks: Tensor, begin: int, count: int, dtype: str = WORD) -> list[Array]:
    """Returns `count` numbers that follow a position in each block, each [rows, blocks]."""
    memory = blocks.numpy()
    rows, num_blocks, _ = memory.shape
    width = np.dtype(dtype).itemsize
    return [
        np.ndarray(
            (rows, num_blocks), dtype, memory, begin + i * width, memory.strides[:2]
        ).copy()
        for i in range(count)
    ]  # fmt: skip


def _interleaved(numbers: Sequence[Array]) -> Tensor:
    """Returns bytes [rows, ...] in which a block's numbers lie one after the other."""
    out = np.empty((*numbers[0].shape, len(numbers)), numbers[0].dtype)
    for i, number in enumerate(numbers):
        out[..., i] = number
    return torch.from_numpy(out.view(np.uint8)).flatten(1)


def _pairs(blocks: Tensor) -> Tensor:
    """Returns pairs of blocks, [rows, pairs, 2 * block bytes]; zeros fill the last pair."""
    if blocks.shape[1] % 2:
        blocks = torch.cat([blocks, torch.zeros_like(blocks[:, :1])], 1)
    return blocks.contiguous().view(len(blocks), -1, 2 * blocks.shape[2])


def _nibbles(first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
    """Joins the lower halves of bytes, and then the upper ones."""
    low = [a & _LOW | (b & _LOW) << 4 for a, b in zip(first, second, strict=True)]
    return low + [a >> 4 & _LOW | b & _HIGH for a, b in zip(first, second, strict=True)]


def _simple(num_parameters: int, num_high: int) -> Repack:
    """Blocks of parameters, the highest bits, and nibbles."""
    high_at = 2 * num_parameters
    low_at = high_at + num_high

    def repack(blocks: Tensor) -> tuple[Tensor, Tensor]:
        size, pairs = blocks.shape[2], _pairs(blocks)
        integers = _nibbles(_words(pairs, low_at, 2), _words(pairs, size + low_at, 2))
        if num_high:
            halves = [_words(pairs, at, 1, "<u4")[0] for at in (high_at, size + high_at)]
            integers.append(np.stack(halves, 2).view(WORD)[..., 0])
        # All scales of a run, and then all offsets.
        parameters = [
            _words(pairs, at + 2 * i, 1, "<u2")[0]
            for i in range(num_parameters)
            for at in (0, size)
        ]
        return _interleaved(integers), _interleaved(parameters).view(torch.float16)

    return repack


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    pairs = _pairs(blocks)
    integers = _interleaved(_words(pairs, 2, 4) + _words(pairs, 36, 4))
    scales = _interleaved(_words(pairs, 0, 1, "<u2") + _words(pairs, 34, 1, "<u2"))
    return integers.view(torch.int8), scales.view(torch.float16)


def _mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    pairs = _pairs(blocks)
    integers = _nibbles(_words(pairs, 1, 2), _words(pairs, 18, 2))
    scales = _words(pairs, 0, 1, "u1") + _words(pairs, 17, 1, "u1")
    return _interleaved(integers), _interleaved(scales)


def _k_scales(blocks: Tensor) -> Tensor:
    """The scales and the factors of 6 bits, in the records' order."""
    low, middle, high = _words(blocks, 4, 3, "<u4")
    six, four, two = (np.uint32(mask) for mask in (0x3F3F3F3F, 0x0F0F0F0F, 0x30303030))
    scales = low & six, high & four | low >> 2 & two
    offsets = middle & six, high >> 4 & four | middle >> 2 & two
    parts = _words(blocks, 0, 2, "<u2")
    for i in range(2):
        for shift in (0, 16):  # a run has two scales and two offsets
            parts += [(factors[i] >> shift).astype("<u2") for factors in (scales, offsets)]
    return _interleaved(parts)


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[..., 16:].flatten(1), _k_scales(blocks)


def _highest_bits(words: Sequence[Array], run: int) -> Array:
    """Returns the highest bits of a run: bit b of byte i belongs to element 32 * b + i."""
    bits = np.zeros_like(words[0])
    for place in range(8):
        word = words[place % 4] >> np.uint64(2 * run + place // 4) & _LOWEST
        bits |= word * _GATHER >> 56 << np.uint64(8 * place)
    return bits


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    high, low = _words(blocks, 16, 4), _words(blocks, 48, 16)
    parts = []
    for run in range(4):
        parts += [*low[4 * run : 4 * run + 4], _highest_bits(high, run)]
    return _interleaved(parts), _k_scales(blocks)


def _two_bits(words: Sequence[Array]) -> list[list[Array]]:
    """Returns two bits each of the elements of two runs: 32 bytes have those of the elements i,
    32 + i, 64 + i and 96 + i."""
    masks = [np.uint64(0x0303030303030303) << np.uint64(shift) for shift in (0, 2, 4, 6)]
    pairs = [(words[i], words[2 + i]) for i in range(2)]
    return [
        [
            a & masks[0] | b << 2 & masks[1] | a << 2 & masks[2] | b << 4 & masks[3]
            for a, b in pairs
        ],
        [
            a >> 4 & masks[0] | b >> 2 & masks[1] | a >> 2 & masks[2] | b & masks[3]
            for a, b in pairs
        ],
    ]


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    low, high = _words(blocks, 0, 16), _words(blocks, 128, 8)
    parts = []
    for half in range(2):
        # 64 bytes have the elements 0 to 63 in their lower halves, 64 to 127 in their upper ones.
        nibbles = _nibbles(low[8 * half : 8 * half + 4], low[8 * half + 4 : 8 * half + 8])
        first, second = _two_bits(high[4 * half : 4 * half + 4])
        parts += [*nibbles[:4], *first, *nibbles[4:], *second]
    scale, factors = _words(blocks, 208, 1, "<u2"), _words(blocks, 192, 8, "<u2")
    return _interleaved(parts), _interleaved(scale + factors)


def _all_two_bits(blocks: Tensor, begin: int) -> list[list[Array]]:
    """Returns two bits each of the elements of all runs."""
    words = _words(blocks, begin, 8)
    return [run for half in (0, 4) for run in _two_bits(words[half : half + 4])]


def _q2_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    integers = [word for run in _all_two_bits(blocks, 16) for word in run]
    scales = _words(blocks, 80, 2, "<u2") + _words(blocks, 0, 8, "<u2")
    return _interleaved(integers), _interleaved(scales)


def _q3_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    high, parts = _words(blocks, 0, 4), []
    for run, words in enumerate(_all_two_bits(blocks, 32)):
        parts += [*words, _highest_bits(high, run)]
    first, second, third = _words(blocks, 96, 3, "<u4")
    four, two = np.uint32(0x0F0F0F0F), np.uint32(0x03030303)
    factors = [
        _less_32((each >> shift & four) | (third >> high_shift & two) << 4)
        for each, shift, high_shift in (
            (first, 0, 0),
            (second, 0, 2),
            (first, 4, 4),
            (second, 4, 6),
        )
    ]
    scale = _words(blocks, 108, 1, "<u2")
    halves = [(each >> shift).astype("<u2") for each in factors for shift in (0, 16)]
    return _interleaved(parts), _interleaved(scale + halves)


def _less_32(factors: Array) -> Array:
    """Returns bytes of 6 bits minus 32, with their signs."""
    moved = factors ^ np.uint32(0x20202020)
    sign = moved & np.uint32(0x20202020)
    return moved | sign << 1 | sign << 2


def _iq4_xs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    words, parts = _words(blocks, 8, 16), []
    for run in range(4):
        parts += _nibbles(words[4 * run : 4 * run + 2], words[4 * run + 2 : 4 * run + 4])
    scale, high = _words(blocks, 0, 2, "<u2")
    low = _words(blocks, 4, 4, "u1")
    factors = [
        (low[i // 2] >> 4 * (i % 2) & 15) + ((high >> 2 * i & 3) << 4).astype("u1") - np.uint8(32)
        for i in range(8)
    ]
    pairs = [a | b.astype("<u2") << 8 for a, b in zip(factors[::2], factors[1::2], strict=True)]
    return _interleaved(parts), _interleaved([scale, *pairs])


def _tq2_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    integers = [word for run in _all_two_bits(blocks, 0) for word in run]
    scales = _interleaved(_words(blocks, 64, 1, "<u2") * 4)
    return _interleaved(integers), scales.view(torch.float16)


def _nvfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    # 8 bytes have the first 8 elements of a group in their lower halves, and then 8 in their upper.
    words = _words(blocks, 4, 4)
    low = [word & _LOW for word in words]
    high = [word >> 4 & _LOW for word in words]
    halves = [(each[i], each[i + 2]) for i in range(2) for each in (low, high)]
    integers = [a | b << 4 for a, b in halves]
    factors = _words(blocks, 0, 1, "<u4")[0]
    one = np.full_like(factors, np.float32(1).view("<u4"))
    return _interleaved(integers), _interleaved([one, factors])


BLOCK_TYPES = {
    "Q4_0": BlockType("int4", _simple(1, 0)),
    "Q4_1": BlockType("q4_1", _simple(2, 0)),
    "Q5_0": BlockType("q5_0", _simple(1, 4)),
    "Q5_1": BlockType("q5_1", _simple(2, 4)),
    "Q8_0": BlockType("q8_0", _q8_0),
    "Q4_K": BlockType("q4_k", _q4_k),
    "Q5_K": BlockType("q5_k", _q5_k),
    "Q6_K": BlockType("q6_k", _q6_k),
    "Q2_K": BlockType("q2_k", _q2_k),
    "Q3_K": BlockType("q3_k", _q3_k),
    "IQ4_NL": BlockType("iq4_nl", _simple(1, 0)),
    "IQ4_XS": BlockType("iq4_xs", _iq4_xs),
    "TQ1_0": BlockType("ternary", grids.ternary),
    "TQ2_0": BlockType("ternary", _tq2_0),
    "MXFP4": BlockType("mxfp4", _mxfp4),
    "NVFP4": BlockType("nvfp4", _nvfp4),
    **{name: BlockType(grid.kind, grid.repack) for name, grid in grids.GRIDS.items()},
}
"""By the name in `formats.gguf.TENSOR_TYPES`."""
