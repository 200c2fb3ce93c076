"""Converts keys and values to and from FP8: e4m3, one byte each, with a scale of 1.

A cache of bytes is FP8, any other one has numbers of the model's dtype. From compute capability 8.9
on, the hardware converts two numbers in an instruction, and Triton has the dtype. Before, and in
Triton's interpreter, integer operations do. Both have the same bits, but for the sign of NaN.

Two numbers become bfloat16 in four instructions of the hardware: one to float16, two to float32,
one to bfloat16. The instruction from float16 to bfloat16 needs three, but a multiprocessor has 16
lanes for it in place of 64, and has to convert 18 numbers in each cycle at 4.3 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq
from triton.runtime.jit import constexpr_function

_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_LARGEST = tl.constexpr(448.0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_ULP_IS_SUBNORMAL = tl.constexpr(2.0**14)
"""The number of float32 whose last bit is worth 2**-9, as that of a subnormal e4m3 number."""


def as_stored(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what kernels take of a cache: FP8 numbers as bytes, which any GPU can load.

    Args:
        cache: keys or values.
        dtype: the model's dtype.
    """
    assert cache.dtype in (dtype, torch.float8_e4m3fn), "the cache has the query's dtype, or FP8"
    return cache if cache.dtype is dtype else cache.view(torch.uint8)


@triton.jit
def to_float8(x):
    """Returns the codes, uint8, of numbers: rounded to nearest even, at most 448; NaN stays NaN."""
    x = x.to(tl.float32)
    if _IS_COMPILED and cuda_capability_geq(8, 9):
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        size = tl.minimum(tl.abs(x), _LARGEST)
        bits = size.to(tl.int32, bitcast=True)
        bits += 0x7FFFF + ((bits >> 20) & 1)
        normal = (bits >> 20) - (120 << 3)  # the exponents differ by 120
        small = (size + _ULP_IS_SUBNORMAL).to(tl.int32, bitcast=True) & 15
        code = tl.where(size < _SMALLEST_NORMAL, small, normal)
        code = tl.where(x == x, code, 0x7F)
        return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_float8(code, dtype: tl.constexpr):
    """Returns the numbers of codes, uint8, in a dtype that has all of them."""
    if _IS_COMPILED and cuda_capability_geq(8, 9):
        half = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        return half.to(tl.float32).to(dtype)
    else:
        # The bits of a float16 number whose exponent is 8 too small, subnormal or not.
        half = (code.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4080
        number = half.to(tl.float16, bitcast=True) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), number).to(dtype)


@constexpr_function
def converts_slowly(dtype):
    """Returns whether integer operations convert what a cache with elements of a dtype has."""
    return _IS_COMPILED and dtype == tl.uint8 and not cuda_capability_geq(8, 9)


@constexpr_function
def _needs_layout(rows, width):
    """Returns whether Triton has to be told where a tile for products with some rows is converted.
    On 9.0 and 10.0 products of 64 rows take it from shared memory, so that it knows. Before, those
    with heads of more than 128 elements would spill."""
    takes_shared = cuda_capability_geq(9, 0) and not cuda_capability_geq(12, 0)
    return rows < 64 or (width <= 128 and not takes_shared)


@triton.jit
def from_cache(x, dtype: tl.constexpr, ROWS: tl.constexpr):
    """Returns what was loaded from a cache in the model's dtype.

    Args:
        x: the elements as the cache has them.
        dtype: the model's dtype.
        ROWS: the number of rows that are multiplied with them.
    """
    if x.dtype == tl.uint8:
        x = from_float8(x, dtype)
        width: tl.constexpr = max(x.shape[0], x.shape[1])
        if _IS_COMPILED and _needs_layout(ROWS, width) and x.dtype.primitive_bitwidth == 16:
            # This does nothing. Without it Triton gives the bytes to the threads that multiply the
            # numbers: each byte is loaded by itself, and each warp of a prompt converts them all.
            x = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
            )
    return x


@triton.jit
def to_cache(x, dtype: tl.constexpr):
    """Returns numbers of the model's dtype as a cache with elements of `dtype` stores them."""
    return to_float8(x) if dtype == tl.uint8 else x
