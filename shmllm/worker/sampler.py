"""Chooses the next token of each row from its logits.

Order: forbidden ids, temperature, min_p, top_k, top_p, then the draw. The draw is the
Gumbel-max trick: add noise to every log-probability and take the largest. The noise of a
vocabulary entry is a hash of (seed, position, entry), so a request's tokens depend on
nothing else that runs beside it, and a logit that differs in its last bits changes the
draw only where the two best sums are as close as that.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shmllm.worker.batch import InputBatch, LongArray

GOLDEN_64 = 0x9E3779B97F4A7C15
MASK_64 = 2**64 - 1


def _mix_64(value: int) -> int:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    value = (value + GOLDEN_64) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def gumbel_noise(seed: int, position: int, size: int) -> npt.NDArray[np.float32]:
    """(size,) standard Gumbel noise that follows from `seed` and `position` alone.

    Each entry is murmur3's 32-bit finaliser over the entry's index and two keys.
    """
    key = _mix_64(_mix_64(seed & MASK_64) ^ position)
    bits = np.arange(size, dtype=np.uint32)
    bits *= np.uint32(0x9E3779B1)
    bits ^= np.uint32(key & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits ^= bits >> np.uint32(shift)
        bits *= np.uint32(factor)
    bits ^= bits >> np.uint32(16)
    bits += np.uint32(key >> 32)
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(0x2C1B3C6D)
    bits ^= bits >> np.uint32(12)
    uniform = (bits.astype(np.float64) + 0.5) / 2.0**32
    return (-np.log(-np.log(uniform))).astype(np.float32)


def keep_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Set to -inf what lies outside each row's top-k, then outside its nucleus.

    Args:
        logits: (N, V) float32.
        top_k: (N,) int64, 0 keeps all.
        top_p: (N,) float32 in (0, 1].
    """
    vocab_size = logits.shape[1]
    sorted_logits, order = logits.sort(dim=1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    kth = sorted_logits.gather(1, (k - 1)[:, None])
    sorted_logits.masked_fill_(sorted_logits < kth, -torch.inf)
    probabilities = sorted_logits.softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    outside = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    outside[:, 0] = False
    sorted_logits.masked_fill_(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, sorted_logits)


class Sampler:
    """
    Args:
        batch: holds each row's sampling parameters.
    """

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch

    def __call__(self, logits: torch.Tensor, rows: LongArray, positions: LongArray) -> LongArray:
        """
        Args:
            logits: (N, V) float32; overwritten.
            rows: (N,) row of each.
            positions: (N,) position that each sampled token will have.

        Returns:
            (N,) int64 token ids.
        """
        self._forbid(logits, rows, positions)
        tokens: LongArray = logits.argmax(dim=1).numpy()
        drawn = np.flatnonzero(self._batch.temperature[rows])
        if drawn.size:
            tokens = tokens.copy()
            tokens[drawn] = self._draw(
                logits[torch.from_numpy(drawn)], rows[drawn], positions[drawn]
            )
        return tokens

    def _forbid(self, logits: torch.Tensor, rows: LongArray, positions: LongArray) -> None:
        for index in np.flatnonzero(positions < self._batch.min_position[rows]).tolist():
            forbidden = self._batch.forbidden_ids[int(rows[index])]
            logits[index, [i for i in forbidden if i < logits.shape[1]]] = -torch.inf

    def _draw(self, logits: torch.Tensor, rows: LongArray, positions: LongArray) -> LongArray:
        batch = self._batch
        logits /= torch.from_numpy(batch.temperature[rows])[:, None]
        min_p, top_k, top_p = batch.min_p[rows], batch.top_k[rows], batch.top_p[rows]
        if min_p.any():
            best = logits.max(dim=1, keepdim=True).values
            floor = best + torch.from_numpy(np.log(np.maximum(min_p, 1e-38)))[:, None]
            bounded = torch.from_numpy(min_p > 0)[:, None]
            logits.masked_fill_((logits < floor) & bounded, -torch.inf)
        if top_k.any() or (top_p < 1).any():
            logits = keep_top_k_top_p(
                logits, torch.from_numpy(top_k.astype(np.int64)), torch.from_numpy(top_p)
            )
        for index, (seed, position) in enumerate(
            zip(batch.seeds[rows].tolist(), positions.tolist(), strict=True)
        ):
            logits[index] += torch.from_numpy(gumbel_noise(seed, position, logits.shape[1]))
        return logits.argmax(dim=1).numpy()
