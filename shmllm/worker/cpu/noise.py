"""Gumbel noise as a hash of (seed, position, vocabulary entry).

A request's draws therefore depend neither on the batch nor on chunking, prefix caching or
preemption.
"""

from __future__ import annotations

import numpy as np

from shmllm.worker.arrays import FloatArray, LongArray, SeedArray, WordArray

GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)
BLOCK_ENTRIES = 2**15


def _mix_64(value: SeedArray) -> SeedArray:
    """The finaliser of splitmix64: every input bit affects every output bit."""
    value = value + GOLDEN_64
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _keys(seeds: SeedArray, positions: LongArray) -> tuple[WordArray, WordArray]:
    """Return two 32-bit keys for each pair of seed and position."""
    mixed = _mix_64(_mix_64(seeds) ^ positions.astype(np.uint64))
    low = mixed & np.uint64(0xFFFFFFFF)
    return low.astype(np.uint32), (mixed >> np.uint64(32)).astype(np.uint32)


def _gumbel(bits: WordArray, low: WordArray, high: WordArray) -> FloatArray:
    """Return Gumbel noise from the 32-bit finaliser of murmur3, applied to the indices of
    vocabulary entries and two keys.

    Args:
        bits: the indices; overwritten.
        low, high: the keys.
    """
    bits *= np.uint32(0x9E3779B1)
    bits ^= low
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits ^= bits >> np.uint32(shift)
        bits *= np.uint32(factor)
    bits ^= bits >> np.uint32(16)
    bits += high
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(0x2C1B3C6D)
    bits ^= bits >> np.uint32(12)
    uniform = bits.astype(np.float64)
    uniform += 0.5
    uniform /= 2.0**32
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    return np.negative(uniform, out=uniform).astype(np.float32)


def gumbel_noise(seeds: SeedArray, positions: LongArray, size: int) -> FloatArray:
    """Return (N, size) standard Gumbel noise for N seeds and positions."""
    noise = np.empty((len(seeds), size), np.float32)
    low, high = _keys(seeds, positions)
    entries = np.arange(size, dtype=np.uint32)
    rows = max(BLOCK_ENTRIES // size, 1)  # a block fits into a core's cache
    for begin in range(0, len(seeds), rows):
        block = slice(begin, begin + rows)
        bits = np.tile(entries, (len(noise[block]), 1))
        noise[block] = _gumbel(bits, low[block, None], high[block, None])
    return noise


def gumbel_noise_at(
    seeds: SeedArray,
    positions: LongArray,
    rows: LongArray,
    entries: LongArray,
) -> FloatArray:
    """Return the noise of single entries, the same as `gumbel_noise(...)[rows, entries]`."""
    low, high = _keys(seeds, positions)
    return _gumbel(entries.astype(np.uint32), low[rows], high[rows])
