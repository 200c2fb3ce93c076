"""Counter-based random numbers: they depend only on (seed, position, vocabulary entry).

Philox4x32-10 (Salmon et al., 2011) hashes a counter with a key in ten rounds. The key is the
request's seed, and the counter (entry // 4, position, 0, 0) gives the words of four entries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""32-bit words, stored in 64 bits so that products fit."""

NUM_ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_HALF = np.uint64(32)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> list[Words]:
    """Returns four words for each counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        first, second = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0, c1 = (second >> _HALF) ^ c1 ^ k0, second & _MASK
        c2, c3 = (first >> _HALF) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _STEPS[0]) & _MASK, (k1 + _STEPS[1]) & _MASK
    return [c0, c1, c2, c3]


def gumbel_noise(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.float32]:
    """Returns standard Gumbel noise for the first ``size`` entries of each row.

    A word w becomes ``-log(-log(1 - (w + 0.5) / 2**32))``.

    Args:
        seeds: (N,) int64.
        positions: (N,) int64, below 2**32.
        size: the number of entries of a row.

    Returns:
        (N, size) float32, computed in float64.
    """
    blocks: Words = np.arange(-(-size // 4), dtype=np.uint64)
    shape = (len(seeds), len(blocks))
    bits_of_seed: Words = seeds.astype(np.uint64)[:, None]
    key = bits_of_seed & _MASK, bits_of_seed >> _HALF
    place = np.broadcast_to(positions.astype(np.uint64)[:, None], shape)
    zeros = np.zeros(shape, np.uint64)
    words = philox((np.broadcast_to(blocks, shape), place, zeros, zeros), key)
    bits = np.stack(words, axis=-1).reshape(len(seeds), -1)[:, :size]
    uniform = (bits.astype(np.float64) + 0.5) / 2.0**32
    noise: npt.NDArray[np.float32] = -np.log(-np.log1p(-uniform)).astype(np.float32)
    return noise
