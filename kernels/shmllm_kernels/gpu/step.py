"""The kernels before a step's layers: its inputs, and the tables of rotary embeddings.

They compute the same as `reference.step`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.reference.step import StepSizes, StepTensors

BLOCK = 1024
"""The number of elements in a tile of angles, and the number of entries of each input that
a program unpacks."""

_TWO_OVER_PI = tl.constexpr(0x28BE60DB9391054A)
"""2 / pi times 2**62."""


@triton.jit
def _reduced(angle):
    """Splits an angle into a multiple of pi / 2 and a remainder.

    Returns the nearest multiple, modulo 4, and the remainder. The remainder is exact to 2**-37 for
    0 <= angle < 2**24, from the 64 bits of 2 / pi that matter. The device's own cosine is meant for
    angles up to pi.
    """
    bits = angle.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    shift = 150 - (bits >> 23)
    turned = mantissa * (_TWO_OVER_PI >> tl.minimum(shift, 63).to(tl.int64))  # of 2**64 a turn
    quarter = (turned + (1 << 61)) >> 62
    rest = (turned - (quarter << 62)).to(tl.float32) * 3.4061215800865545e-19  # pi / 2 / 2**62
    return quarter.to(tl.int32) & 3, rest


@triton.jit
def _sine_and_cosine(angle):
    """Returns sine and cosine to the last one or two bits of float32, with the polynomials of
    Cephes' sinf and cosf."""
    quarter, x = _reduced(tl.abs(angle))
    z = x * x
    sine = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    cosine = 4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5)
    cosine = 1.0 - 0.5 * z + z * z * cosine
    is_odd = (quarter & 1) == 1
    s = tl.where(is_odd, cosine, sine)
    c = tl.where(is_odd, sine, cosine)
    return tl.where((quarter >= 2) != (angle < 0), -s, s), tl.where(
        (quarter == 1) | (quarter == 2), -c, c
    )


@triton.jit(do_not_specialize=["count"])
def _rope_tables(
    cos_ptr,
    sin_ptr,
    positions_ptr,
    frequencies_ptr,
    axes_ptr,
    count,
    scale,
    cos_stride,
    sin_stride,
    axis_stride,
    HAS_AXES: tl.constexpr,
    RATE: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, PAIRS)
    mask = (token < count)[:, None] & (pair < HALF)[None, :]
    if HAS_AXES:
        axis = tl.load(axes_ptr + pair, mask=pair < HALF, other=0)
        places = positions_ptr + axis[None, :] * axis_stride + token[:, None]
        position = tl.load(places, mask=mask, other=0).to(tl.float32)
    else:
        of_token = tl.load(positions_ptr + token, mask=token < count, other=0) // RATE * RATE
        position = of_token.to(tl.float32)[:, None]
    frequency = tl.load(frequencies_ptr + pair, mask=pair < HALF, other=0.0)
    sine, cosine = _sine_and_cosine(position * frequency[None, :])
    sine, cosine = sine * scale, cosine * scale
    dtype = cos_ptr.dtype.element_ty
    cos = cos_ptr + token[:, None] * cos_stride + pair[None, :]
    tl.store(cos, cosine.to(dtype), mask=mask)
    tl.store(cos + HALF, cosine.to(dtype), mask=mask)
    sin = sin_ptr + token[:, None] * sin_stride + pair[None, :]
    tl.store(sin, (-sine).to(dtype), mask=mask)
    tl.store(sin + HALF, sine.to(dtype), mask=mask)


@triton.jit
def _copy_padded(target_ptr, packed_ptr, index, count, end, padding):
    value = tl.load(packed_ptr + index, mask=index < count, other=0)
    value = tl.where(index < count, value, padding)
    tl.store(target_ptr + index, value.to(target_ptr.dtype.element_ty), mask=index < end)


_SIZES = ["tokens", "requests", "samples", "padded_tokens", "padded_requests", "padded_samples"]
_SIZES += ["slots_stride", "axis_stride", "ends_stride"]


@triton.jit(do_not_specialize=_SIZES)
def _unpack_step(
    packed_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    token_types_ptr,
    rope_positions_ptr,
    ends_ptr,
    query_starts_ptr,
    context_lens_ptr,
    rows_ptr,
    sample_tokens_ptr,
    sample_rows_ptr,
    sample_positions_ptr,
    slots_stride,
    axis_stride,
    ends_stride,
    tokens,
    requests,
    samples,
    padded_tokens,
    padded_requests,
    padded_samples,
    NUM_GROUPS: tl.constexpr,
    HAS_TYPES: tl.constexpr,
    NUM_AXES: tl.constexpr,
    NUM_ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _copy_padded(token_ids_ptr, packed_ptr, index, tokens, padded_tokens, -1)
    _copy_padded(positions_ptr, packed_ptr + tokens, index, tokens, padded_tokens, 0)
    packed_ptr += 2 * tokens
    for _ in range(NUM_GROUPS):
        _copy_padded(slots_ptr, packed_ptr, index, tokens, padded_tokens, -1)
        slots_ptr += slots_stride
        packed_ptr += tokens
    if HAS_TYPES:
        _copy_padded(token_types_ptr, packed_ptr, index, tokens, padded_tokens, 0)
        packed_ptr += tokens
    for _ in range(NUM_AXES):
        _copy_padded(rope_positions_ptr, packed_ptr, index, tokens, padded_tokens, 0)
        rope_positions_ptr += axis_stride
        packed_ptr += tokens
    for _ in range(NUM_ENDS):
        _copy_padded(ends_ptr, packed_ptr, index, tokens, padded_tokens, 0)
        ends_ptr += ends_stride
        packed_ptr += tokens
    _copy_padded(query_starts_ptr, packed_ptr, index, requests, padded_requests + 1, tokens)
    _copy_padded(context_lens_ptr, packed_ptr + requests, index, requests, padded_requests, 0)
    _copy_padded(rows_ptr, packed_ptr + 2 * requests, index, requests, padded_requests, 0)
    packed_ptr += 3 * requests
    _copy_padded(sample_tokens_ptr, packed_ptr, index, samples, padded_samples, 0)
    _copy_padded(sample_rows_ptr, packed_ptr + samples, index, samples, padded_samples, -1)
    _copy_padded(sample_positions_ptr, packed_ptr + 2 * samples, index, samples, padded_samples, 0)


def rope_tables(
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    scale: float,
    axes: Tensor | None = None,
    rate: int = 1,
) -> None:
    """Writes the tables that ``rope_and_write`` takes.

    Args:
        cos: [tokens, dim], float32, float16 or bfloat16, each row contiguous, with any stride
            between rows; gets the cosines twice.
        sin: as ``cos``; gets the negated sines, then the sines.
        positions: [tokens] int64, not negative; with ``axes`` [axes, tokens], rows contiguous.
        frequencies: [dim / 2] float32, in radians per position. The magnitudes of frequencies and
            of angles must be below 2**24. Angles are rounded to float32, as in transformers.
        scale: the factor of cosines and sines.
        axes: [dim / 2] int64, the axis of the position that belongs to each frequency; None: a
            position is one number.
        rate: positions are rounded down to multiples of this number. Without ``axes``.

    Writes 2 * tokens * dim elements, 512 bytes for a token, with about 40 operations for each pair.
    One launch a step: 2 us for one token, 3 us for 8,192.
    """
    count, dim = cos.shape
    assert sin.shape == cos.shape, "sin must have cos' shape"
    assert sin.dtype is cos.dtype, "sin must have cos' dtype"
    assert cos.stride(1) == sin.stride(1) == 1, "rows must be contiguous"
    assert frequencies.shape == (dim // 2,), "frequencies: one for each pair"
    assert frequencies.dtype is torch.float32, "frequencies are float32"
    assert frequencies.stride(0) == 1, "frequencies must be contiguous"
    assert 0 < dim <= 2 * BLOCK, f"heads of {dim} elements do not fit into a tile"
    assert dim % 2 == 0, f"a head of {dim} elements has no halves"
    assert axes is None or rate == 1, "positions on axes are not rounded"
    if axes is not None:
        assert axes.shape == frequencies.shape, "axes: one for each pair"
        assert axes.dtype is torch.int64, "axes are int64"
        assert axes.stride(0) == 1, "axes must be contiguous"
        assert positions.dim() == 2, "positions: a row for each axis"
    _check_per_row(positions if axes is None else positions[0], count)
    if count == 0:
        return
    pairs = next_power_of_two(dim // 2)
    tokens = BLOCK // pairs
    _rope_tables[(triton.cdiv(count, tokens),)](
        cos,
        sin,
        positions,
        frequencies,
        positions if axes is None else axes,
        count,
        scale,
        cos.stride(0),
        sin.stride(0),
        0 if axes is None else positions.stride(0),
        HAS_AXES=axes is not None,
        RATE=rate,
        HALF=dim // 2,
        TOKENS=tokens,
        PAIRS=pairs,
    )


def unpack_step(step: StepTensors, packed: Tensor, sizes: StepSizes, padded: StepSizes) -> None:
    """Copies the inputs of a step to the tensors that its kernels read, and pads them.

    It is launched before a graph and not captured in it, because its sizes come from the host.

    Args:
        step: the tensors that are written.
        packed: int64, contiguous: the numbers that `reference.step.unpack_step` takes. Further
            numbers may follow.
        sizes: the numbers of tokens, requests and samples.
        padded: the sizes up to which ``step`` is written, at least ``sizes``; see `StepTensors`.

    Reads 8 bytes for each number and writes 4 or 8: 48 bytes for a token. One launch a step: 2 us
    for up to 8,192 tokens.
    """
    assert packed.dtype is torch.int64, "packed numbers are int64"
    assert packed.stride(0) == 1, "packed numbers must be contiguous"
    assert packed.shape[0] >= step.num_packed(sizes), "packed is shorter than its parts"
    limits = len(step.token_ids), len(step.rows), len(step.sample_tokens)
    for name, size, end, limit in zip(StepSizes._fields, sizes, padded, limits, strict=True):
        assert 0 <= size <= end <= limit, f"{name}: {size} padded to {end}, of {limit}"
    longest = max(padded.num_tokens, padded.num_requests + 1, padded.num_samples)
    _unpack_step[(triton.cdiv(longest, BLOCK),)](
        packed,
        step.token_ids,
        step.positions,
        step.slots,
        step.token_types,
        step.rope_positions,
        step.ends,
        step.query_starts,
        step.context_lens,
        step.rows,
        step.sample_tokens,
        step.sample_rows,
        step.sample_positions,
        step.slots.stride(0),
        step.rope_positions.stride(0),
        step.ends.stride(0),
        *sizes,
        *padded,
        NUM_GROUPS=len(step.slots),
        HAS_TYPES=len(step.token_types) > 0,
        NUM_AXES=len(step.rope_positions),
        NUM_ENDS=len(step.ends),
        BLOCK=BLOCK,
    )


def _check_per_row(numbers: Tensor, count: int) -> None:
    assert numbers.shape == (count,), "one number for each row"
    assert numbers.dtype is torch.int64, "numbers are int64"
    assert numbers.stride(0) == 1 or count < 2, "numbers must be contiguous"
