"""Functions of floating-point numbers that several kernels use, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + exp(-x)): 0 where the exponential is infinite."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Returns the hyperbolic tangent, to an absolute error of 2**-23: 1 where the exponential is
    infinite."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
