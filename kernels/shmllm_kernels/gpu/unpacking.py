"""Unpacks weights in registers: a tile of 32 elements of some runs becomes values in float32.

`packings` says how weights are stored. A run of 64 elements is unpacked in two halves, because its
low bits lie in the same bytes, and because groups of 32 and more have the same parameters in all of
a half. This module must not know what a kernel does with the values.

A kernel that calls `half_run` must be launched with FLAGS: a compiler may otherwise contract a
product and a sum to one operation, which is rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLAGS = {"enable_fp_fusion": False}
"""The options of a launch."""


@triton.jit
def half_run(
    code_rows, parameter_rows, run, is_there, width, HALF: tl.constexpr, PACKING: tl.constexpr
):
    """Returns the values of half a run of each of N rows, [32, N] float32. Elements behind the end
    of a row are finite.

    Args:
        code_rows: [N], the addresses of the rows' codes.
        parameter_rows: [N], the addresses of the rows' parameters.
        run: the index of the run, or [N] of each row's run.
        is_there: [N], which rows have that run. Nothing of others is read.
        width: the number of elements of a row.
        HALF: 0 or 1.
        PACKING: how the rows are stored.
    """
    lane = tl.arange(0, 32)[:, None]
    code = _codes(code_rows, run, is_there, width, lane, HALF, PACKING)
    number = _numbers(code, PACKING)
    scale, other = _parameters(parameter_rows, run, is_there, lane, HALF, PACKING)
    if len(PACKING.codes.table) > 0:  # a scale of 32 elements is multiplied once for all
        if PACKING.group == 16:
            number = number * PACKING.codes.unit
        else:
            scale = scale * PACKING.codes.unit
    if PACKING.form == "offset":
        return number * scale + other
    elif PACKING.form == "zero":
        return (number - other) * scale
    else:
        return number * scale


@triton.jit
def _codes(code_rows, run, is_there, width, lane, HALF: tl.constexpr, PACKING: tl.constexpr):
    """Returns the codes of half a run, [32, N] int32."""
    bits: tl.constexpr = PACKING.codes.bits
    rows = (code_rows + run * (8 * bits))[None, :]
    mask = is_there[None, :] & (lane < 32)
    if bits == 8:
        if PACKING.stored == "row":  # rows are not padded
            element = run * 64 + HALF * 32 + lane
            mask = mask & (element < width)
        return tl.load(rows + (HALF * 32 + lane), mask=mask, other=0).to(tl.int32)
    if bits < 4:
        low = tl.load(rows + lane % 16, mask=mask, other=0).to(tl.int32)
        code = (low >> (4 * HALF + 2 * (lane // 16))) & 3
    else:
        low = tl.load(rows + lane, mask=mask, other=0).to(tl.int32)
        code = (low >> (4 * HALF)) & 15
    if bits % 2 == 1:
        place: tl.constexpr = 8 * (bits - 1) + 4 * HALF
        words = (code_rows + (run * (8 * bits) + place)).to(tl.pointer_type(tl.int32))
        high = tl.load(words, mask=is_there, other=0)[None, :]
        code = code | (((high >> lane) & 1) << (bits - 1))
    elif bits == 6:
        high = tl.load(rows + (32 + lane % 16), mask=mask, other=0).to(tl.int32)
        code = code | (((high >> (4 * HALF + 2 * (lane // 16))) & 3) << 4)
    return code


@triton.jit
def _numbers(code, PACKING: tl.constexpr):
    """Returns the numbers that codes stand for, less the bias, float32; of a table in its units."""
    codes: tl.constexpr = PACKING.codes
    if len(codes.table) > 0:
        entries = tl.full(code.shape, codes.table[0], tl.int64)
        if codes.bits > 3:
            second = tl.full(code.shape, codes.table[1], tl.int64)
            entries = tl.where(code < 8, entries, second)
        entry = (entries >> (8 * (code & 7))).to(tl.int32)
        return ((entry << 24) >> 24).to(tl.float32)
    elif len(codes.floats) > 0:
        is_upper = (code & 4) != 0
        low = tl.where(is_upper, _of_four(code, codes.floats, 4), _of_four(code, codes.floats, 0))
        high = tl.where(is_upper, _of_four(code, codes.floats, 12), _of_four(code, codes.floats, 8))
        return tl.where((code & 8) != 0, high, low)
    elif codes.shift == 0:
        return (code - PACKING.bias).to(tl.float32)
    else:
        return _small_float(code, codes.bits, codes.shift, codes.unit)


@triton.jit
def _of_four(code, FLOATS: tl.constexpr, FIRST: tl.constexpr):
    """Chooses one of four numbers by the lowest two bits of codes, float32."""
    is_odd = (code & 1) != 0
    low = tl.where(is_odd, FLOATS[FIRST + 1], FLOATS[FIRST])
    high = tl.where(is_odd, FLOATS[FIRST + 3], FLOATS[FIRST + 2])
    return tl.where((code & 2) != 0, high, low)


@triton.jit
def _small_float(code, BITS: tl.constexpr, SHIFT: tl.constexpr, UNIT: tl.constexpr):
    """Returns floating numbers of so many bits as float32; see `packings.Codes`."""
    sign: tl.constexpr = 1 << (BITS - 1)
    magnitude = code & (sign - 1)
    half = magnitude << SHIFT
    if BITS == 8:  # the largest code of e4m3 is no number
        half = tl.where(magnitude == sign - 1, 0x7E00, half)
    half = half | ((code & sign) << (16 - BITS))
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * UNIT


@triton.jit
def _parameters(parameter_rows, run, is_there, lane, HALF: tl.constexpr, PACKING: tl.constexpr):
    """Returns the scales of half a run and its offsets or zeros, float32, [1, N] each, or [32, N]
    if it has several groups."""
    stored: tl.constexpr = PACKING.stored
    if PACKING.group == 16:
        is_first = lane < 16
        if stored == "k2":
            scales, others = _of_nibbles(parameter_rows + run // 4 * 5, run % 4, is_there, HALF)
            return _of_lanes(is_first, scales), _of_lanes(is_first, others)
        elif stored == "k6":
            scales = _of_small_record(parameter_rows + run // 4 * 9, run % 4, is_there, HALF)
        else:
            scales = _of_float8(parameter_rows + run * 2, is_there, HALF)
        scale = _of_lanes(is_first, scales)
        return scale, scale
    else:
        if stored == "k":
            scale, other = _of_record(parameter_rows + run // 4 * 5, run % 4, is_there, HALF)
        elif stored == "k8":
            scale = _of_short_record(parameter_rows + run // 4 * 5, run % 4, is_there, HALF)
            other = scale
        else:
            group: tl.constexpr = HALF * 32 // PACKING.group
            scale = _parameter(parameter_rows, run, is_there, group, PACKING)
            other = scale
            if PACKING.form != "scaled":
                behind: tl.constexpr = 64 // PACKING.group + group
                other = _parameter(parameter_rows, run, is_there, behind, PACKING)
        return scale[None, :], other[None, :]


@triton.jit
def _of_lanes(is_first, pair):
    """Returns the parameters of two groups, each for its lanes."""
    return tl.where(is_first, pair[0][None, :], pair[1][None, :])


@triton.jit
def _parameter(parameter_rows, run, is_there, PLACE: tl.constexpr, PACKING: tl.constexpr):
    """Returns one of the parameters of a run, [N] float32."""
    stored: tl.constexpr = PACKING.stored
    if stored == "row":
        return tl.load(parameter_rows, mask=is_there, other=0.0)
    elif PACKING.is_paired:
        words = parameter_rows + run * (PACKING.num_parameters // 2) + PLACE // 2
        word = tl.load(words, mask=is_there, other=0) >> (16 * (PLACE % 2))
        return _half(word) if stored == "float16" else _brain(word)
    else:
        own = parameter_rows + run * PACKING.num_parameters + PLACE
        parameter = tl.load(own, mask=is_there, other=0)
        if stored == "e8m0":
            exponent = parameter.to(tl.int32)
            bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
            return bits.to(tl.float32, bitcast=True)
        else:
            return parameter.to(tl.float32)


@triton.jit
def _of_record(record, run, is_there, HALF: tl.constexpr):
    """Returns the scales and the offsets of a half of one of the runs of a record "k", [N] each."""
    halves = tl.load(record, mask=is_there, other=0)
    factors = tl.load(record + 1 + run, mask=is_there, other=0) >> (8 * HALF)
    scale = (factors & 255).to(tl.float32) * _half(halves)
    minimum = ((factors >> 16) & 255).to(tl.float32) * _half(halves >> 16)
    return scale, -minimum


@triton.jit
def _of_small_record(record, run, is_there, HALF: tl.constexpr):
    """Returns the two scales of a half of one of the runs of a record "k6", [N] each."""
    d = _half(tl.load(record, mask=is_there, other=0))
    pair = tl.load(record + 1 + run * 2 + HALF, mask=is_there, other=0).to(tl.int32)
    return ((pair << 24) >> 24).to(tl.float32) * d, (pair >> 8).to(tl.float32) * d


@triton.jit
def _of_short_record(record, run, is_there, HALF: tl.constexpr):
    """Returns the scale of a half of one of the runs of a record "k8", [N]."""
    d = _half(tl.load(record, mask=is_there, other=0))
    pair = tl.load(record + 1 + run, mask=is_there, other=0).to(tl.int32)
    factor = pair >> 8 if HALF else (pair << 24) >> 24
    return factor.to(tl.float32) * d


@triton.jit
def _of_nibbles(record, run, is_there, HALF: tl.constexpr):
    """Returns the two scales and the two offsets of a half of one of the runs of a record "k2"."""
    halves = tl.load(record, mask=is_there, other=0)
    factors = tl.load(record + 1 + run, mask=is_there, other=0) >> (16 * HALF)
    d, dmin = _half(halves), _half(halves >> 16)
    scales = (factors & 15).to(tl.float32) * d, ((factors >> 8) & 15).to(tl.float32) * d
    first, second = (factors >> 4) & 15, (factors >> 12) & 15
    return scales, (-(first.to(tl.float32) * dmin), -(second.to(tl.float32) * dmin))


@triton.jit
def _of_float8(words, is_there, HALF: tl.constexpr):
    """Returns the two scales of a half of a run, stored as "e4m3"."""
    d = tl.load(words, mask=is_there, other=0).to(tl.float32, bitcast=True)
    factors = tl.load(words + 1, mask=is_there, other=0) >> (16 * HALF)
    first = _small_float(factors & 255, 8, 7, 256.0)
    second = _small_float((factors >> 8) & 255, 8, 7, 256.0)
    return first * d, second * d


@triton.jit
def _half(word):
    """Returns the lowest 16 bits of integers, a float16 number, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _brain(word):
    """Returns the lowest 16 bits of integers, a bfloat16 number, as float32."""
    return (word << 16).to(tl.float32, bitcast=True)
