"""The causal convolution of each channel: before a recurrent layer, or with gates as a layer of
its own (Liquid AI, "LFM2 Technical Report", 2025, section 2).

The state of a request has the last inputs of each channel, [taps - 1, channels] float32, the oldest
first. One thread computes a channel's tokens one after the other: the result does not depend on the
steps that they were divided into.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import floats, itemsize, on_stack, word
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.cpu.simd import LANES, Emitter, Loop
from shmllm_kernels.cpu.states import end_of_stretch, num_requests, state_at, tokens_of

CHANNELS_AT_ONCE = 256
"""The channels in a piece of work."""
CHANNEL_MULTIPLE = 16
"""What the number of channels is a multiple of: the lanes of the widest vectors."""
MOST_TAPS, MOST_GATED_TAPS = 4, 8


@emitted
def _convolve_stretch(builder, x, stride, out, out_stride, count, before, before_stride, after,
                      weights, width, bias, kind, taps, is_gated):  # fmt: skip
    """Computes the convolutions of LANES channels of `count` tokens, at least one.

    Args: x: address of the first token's channels, or of their input gates, behind which output
    gates and inputs follow. stride: bytes from token to token. out: gets the results, which may be
    the memory of x. before: address of the inputs before them, with before_stride bytes from one to
    the next. after: gets the last inputs, which may be the memory of `before`. weights: address of
    these channels' first weights. width: the number of all channels. bias: address.
    """
    e, taps = Emitter(builder), taps.constant
    row = e.builder.mul(width, e.const(4))
    weight_row = e.builder.mul(width, e.const(itemsize(kind)))

    def at(address, index, step):
        return e.at(address, builder.mul(step, e.const(index)))

    factors = [e.load(at(weights, tap, weight_row), kind) for tap in range(taps)]
    old = [e.load(at(before, tap, before_stride)) for tap in range(taps - 1)]
    offset = e.load(bias, kind)
    loop = Loop(e, e.const(0), count, 1)
    loop.begin(old)
    place = e.at(x, builder.mul(loop.index, stride))
    newest = e.load(place)
    if is_gated.constant:
        newest = builder.fmul(newest, e.load(at(place, 2, row)))
    inputs = [*loop.values, newest]
    total = _weighted_sum(e, inputs, factors, offset)
    if is_gated.constant:
        total = builder.fmul(total, e.load(at(place, 1, row)))
    e.store(total, e.at(out, builder.mul(loop.index, out_stride)))
    loop.end(inputs[1:])
    for tap, value in enumerate(inputs[1:]):
        e.store(value, at(after, tap, row))


def _weighted_sum(e, inputs, factors, offset):
    total = offset
    for value, factor in zip(inputs, factors, strict=True):
        total = e.fma(value, factor, total)
    return total


@emitted
def _convolve_ahead(builder, x, stride, out, out_stride, count, weights, width, bias, ahead, kind,
                    taps):  # fmt: skip
    """Computes the gated convolutions of LANES channels of all tokens of a request, as
    `_convolve_stretch` does, which read `ahead` tokens behind their own."""
    e, taps = Emitter(builder), taps.constant
    row = e.builder.mul(width, e.const(4))
    weight_row = e.builder.mul(width, e.const(itemsize(kind)))

    def gated(token):
        """Returns the product of a token's input gates and inputs; zeros if there is no such
        token."""
        is_there = builder.icmp_unsigned("<", token, count)
        place = e.at(x, builder.mul(builder.select(is_there, token, e.const(0)), stride))
        inputs = e.load(e.at(place, builder.mul(row, e.const(2))))
        return builder.select(is_there, builder.fmul(e.load(place), inputs), e.zeros())

    factors = [e.load(e.at(weights, builder.mul(weight_row, e.const(tap))), kind)
               for tap in range(taps)]  # fmt: skip
    first = builder.sub(ahead, e.const(taps - 1))
    offset = e.load(bias, kind)
    loop = Loop(e, e.const(0), count, 1)
    loop.begin([gated(builder.add(first, e.const(tap))) for tap in range(taps - 1)])
    inputs = [*loop.values, gated(builder.add(loop.index, ahead))]
    gate = e.load(e.at(e.at(x, builder.mul(loop.index, stride)), row))
    total = builder.fmul(_weighted_sum(e, inputs, factors, offset), gate)
    e.store(total, e.at(out, builder.mul(loop.index, out_stride)))
    loop.end(inputs[1:])


@compiled
def _groups(operands):
    return (word(operands, 12) + CHANNELS_AT_ONCE - 1) // CHANNELS_AT_ONCE


@compiled
def _pieces(operands, piece, thread, num_threads):
    return num_requests(operands) * _groups(operands)


@compiled
def _convolve(operands, piece, thread, num_threads, kind, taps, is_gated, reads_ahead):
    request, group = piece // _groups(operands), piece % _groups(operands)
    tokens, x, stride, width = (
        tokens_of(operands, request), word(operands, 10), word(operands, 11), word(operands, 12),
    )  # fmt: skip
    out, out_stride = x, stride
    if is_gated:
        out, out_stride = word(operands, 15), word(operands, 16)
    nothing = on_stack(4 * LANES)
    for lane in range(LANES):
        floats(nothing)[lane] = np.float32(0.0)
    first = group * CHANNELS_AT_ONCE
    for channel in range(first, min(first + CHANNELS_AT_ONCE, width), LANES):
        position, before, before_stride = tokens.start, nothing, 0
        if tokens.start > 0:
            before = state_at(operands, tokens, tokens.start - 1) + 4 * channel
            before_stride = 4 * width
        bias = nothing
        if word(operands, 14) != 0:
            bias = word(operands, 14) + channel * itemsize(kind)
        weights = word(operands, 13) + channel * itemsize(kind)
        if reads_ahead:
            _convolve_ahead(
                x + tokens.row * stride + 4 * channel, stride,
                out + tokens.row * out_stride + 4 * channel, out_stride, tokens.end - position,
                weights, width, bias, word(operands, 17), kind, taps,
            )  # fmt: skip
            position = tokens.end
        while position < tokens.end:
            end, after = (
                end_of_stretch(operands, tokens, position),
                state_at(operands, tokens, position) + 4 * channel,
            )
            row = tokens.row + position - tokens.start
            _convolve_stretch(
                x + row * stride + 4 * channel, stride, out + row * out_stride + 4 * channel,
                out_stride, end - position, before, before_stride, after, weights, width, bias,
                kind, taps, is_gated,
            )  # fmt: skip
            position, before, before_stride = end, after, 4 * width


def _every(most_taps: int) -> list[tuple[str, int]]:
    return [(kind, taps) for kind in KINDS for taps in range(2, most_taps + 1)]


CONVOLVE = {key: Kernel(_pieces, _convolve, *key, 0, 0) for key in _every(MOST_TAPS)}
"""Kernels by the dtype name of weights and bias and the number of taps. In place: ``x[t] = bias +
sum(weights[j] * x[t - taps + 1 + j])`` over j.

Operands: those of `states`, and

    10 x: float32 rows
    11 the stride of x in bytes (a number)
    12 channels, a multiple of CHANNEL_MULTIPLE (a number)
    13 weights [taps, channels]
    14 bias [channels], or 0
"""

CONVOLVE_GATED = {key: Kernel(_pieces, _convolve, *key, 1, 0) for key in _every(MOST_GATED_TAPS)}
"""Kernels by the same. ``out[t] = gate[t] * (bias + sum(weights[j] * x[t - taps + 1 + j]))``, where
x is the product of input gates and inputs.

Operands: those of CONVOLVE, and

    10 x: float32 rows of input gates, output gates and inputs, [channels] each
    15 out: float32 rows
    16 the stride of out in bytes (a number)
"""

CONVOLVE_AHEAD = {key: Kernel(_pieces, _convolve, *key, 1, 1) for key in _every(MOST_GATED_TAPS)}
"""Kernels by the same, for steps with all tokens of each request: as CONVOLVE_GATED, of ``x[t -
taps + 1 + ahead + j]``, with zeros before a request's first token and behind its last one.

Operands: those of CONVOLVE_GATED, and

    17 ahead, less than the number of taps (a number)
"""
