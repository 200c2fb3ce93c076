"""Kernel functions of a request's new keys, which the rows of decodes attend to in registers.

They are heads of the step's tokens, which are normalised, rotated and written to the cache, or an
earlier layer has done so, and they are read from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shmllm_kernels.gpu.attention_kernels import attend_to_tile
from shmllm_kernels.gpu.functions import tanh


@triton.jit
def _attend_to_one(
    sums, peak, total, query, key, value, is_seen, scale, cap,
    HAS_CAP: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Updates the online softmax of all rows with one key, [1, DIM_PADDED], if it is seen."""
    scores = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1) * scale
    if HAS_CAP:
        scores = cap * tanh(scores)
    scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, scores)
    weights = tl.exp2(scores - new_peak)
    shrink = tl.exp2(peak - new_peak)
    sums *= shrink[:, None]
    sums += weights.to(dtype).to(tl.float32)[:, None] * value.to(tl.float32)
    return sums, new_peak, total * shrink + weights


@triton.jit
def attend_to_new(
    sums, peak, total, query, new_key, new_value, position, first_keys, positions, num_seen, scale,
    cap, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, NEW_KEYS: tl.constexpr,
):  # fmt: skip
    """Updates the online softmax of all rows with the first `num_seen` of the new keys,
    which begin at `position`. A row sees those up to its own position."""
    if NEW_KEYS == 1:
        sums, peak, total = _attend_to_one(
            sums, peak, total, query, new_key, new_value, num_seen > 0, scale, cap, HAS_CAP,
            query.dtype,
        )  # fmt: skip
    else:
        keys = position + tl.arange(0, NEW_KEYS)
        sums, peak, total = attend_to_tile(
            sums, peak, total, query, tl.trans(new_key), new_value, keys, first_keys, positions,
            position, position + num_seen, scale, cap, True, HAS_WINDOW, HAS_CAP,
        )  # fmt: skip
    return sums, peak, total
