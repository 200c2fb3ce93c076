"""Functions of floating-point numbers that several kernels use, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + exp(-x)): 0 where the exponential is infinite."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Returns log(1 + exp(x)), also where the exponential is far below one; beyond 20, where they
    differ by less than a float32, x."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.maximum(u - 1.0, 1e-30)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def tanh(x):
    """Returns the hyperbolic tangent, to an absolute error of 2**-23: 1 where the exponential is
    infinite."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
