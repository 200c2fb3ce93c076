"""Products of a few tokens with rows of a matrix that a program keeps in registers.

A thread has 64 weights, so that several programs fit on a multiprocessor. Each row is added up by
itself: the bits of a token do not depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shmllm_kernels.gpu.configs import next_power_of_two, num_multiprocessors

WEIGHTS_PER_WARP = 32 * 64


@triton.jit
def load_rows(matrix_ptr, rows, num_rows, K: tl.constexpr, K_PADDED: tl.constexpr):
    """Returns some rows of a matrix [num_rows, K], contiguous, and 0 behind them."""
    ks = tl.arange(0, K_PADDED)
    places = matrix_ptr + rows[:, None] * K + ks[None, :]
    return tl.load(places, mask=(rows < num_rows)[:, None] & (ks < K)[None, :], other=0.0)


@triton.jit
def multiply(rows, x):
    """Returns the products of rows with a vector, float32."""
    return tl.sum(rows.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)


def tokens_per_program(
    num_tokens: int, programs: int, per_processor: int, device: torch.device
) -> int:
    """Returns how many tokens a program computes one after the other.

    A program reads its weights once for its tokens, but waits for each of their rows. So there are
    as many programs as run at once, and no more.

    Args:
        num_tokens: the number of tokens.
        programs: the number of programs that have all weights.
        per_processor: how many programs run at once on a multiprocessor.
        device: the device of the launch.
    """
    most = per_processor * num_multiprocessors(device)
    return min(next_power_of_two(-(-num_tokens * programs // most)), num_tokens)
