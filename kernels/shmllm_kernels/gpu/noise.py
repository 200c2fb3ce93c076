"""Gumbel noise inside a kernel, from Philox4x32-10 of (seed, position, vocabulary entry).

The noise equals that of `reference.philox`. Its uniform numbers are never 0 or 1, so that the noise
is finite.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gumbel(bits):
    """Returns -log(-log(1 - v)) for v = (bits + 0.5) / 2**32, to float32's precision for all v."""
    low = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    is_low = low < 0.5
    # Kahan's formula of log1p: the rounding error of 1 - v is in both factors and cancels.
    whole = 1.0 - low
    waited = -tl.log(tl.where(is_low, whole, rest))
    lost = 1.0 - whole
    corrected = tl.where(lost > 0.0, waited * (low / tl.where(lost > 0.0, lost, 1.0)), low)
    return -tl.log(tl.where(is_low, corrected, waited))


@triton.jit
def gumbel_of_range(seed, position, first, SIZE: tl.constexpr):
    """Returns the noise of the entries from first to first + SIZE, with one Philox call for four
    entries. first and SIZE are multiples of 4."""
    blocks = first // 4 + tl.arange(0, SIZE // 4)
    zeros = tl.zeros_like(blocks)
    w0, w1, w2, w3 = tl.philox(seed, blocks, zeros + position.to(tl.int32), zeros, zeros)
    bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (SIZE,))
    return _gumbel(bits)


@triton.jit
def gumbel_of_entries(seed, position, entries):
    """Returns the noise of any entries (int32): the same numbers, with one Philox call each."""
    zeros = tl.zeros_like(entries)
    place = zeros + position.to(tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, entries // 4, place, zeros, zeros)
    word = entries % 4
    bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return _gumbel(bits)
