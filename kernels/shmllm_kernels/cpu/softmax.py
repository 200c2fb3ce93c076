"""The online softmax of one row, one chunk of keys at a time (Milakov and Gimelshein, 2018).

Weights are powers of two: the caller multiplies the scores by log2(e). A masked key gets the weight
zero, so that a row's result does not depend on whether the key was among those computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llvmlite import ir

from shmllm_kernels.cpu.bfloat16 import store_normal
from shmllm_kernels.cpu.language import emitted
from shmllm_kernels.cpu.simd import FLOAT, INT32, INT64, LANES, Emitter, Loop

INITIAL_MAX_SCORE = -1e30
"""The largest score of a row before its first chunk of keys."""

_SMALLEST_POWER = -120.0
_ROUNDS = 1.5 * 2.0**23
"""What makes a sum an integer."""
_MASKED_POSITION = 1 << 30
_TAYLOR_OF_POWER = [math.log(2) ** i / math.factorial(i) for i in range(7)]
_SHORT_POLYNOMIAL = [1.0, 0.69328293, 0.24221096, 0.05500893]
"""For weights that are rounded to bfloat16: of degree 3 the one with the smallest relative error,
1e-4, among those that are 1 at 0."""
_TANH_SERIES = 1.0, -1 / 3, 2 / 15, -17 / 315
"""The coefficients of x, x**3, x**5 and x**7."""
_SMALL_RATIO = 0.25


def _max(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    return e.builder.select(e.builder.fcmp_ordered(">", a, b), a, b)


def _max_lane(e: Emitter, x: ir.Value) -> ir.Value:
    """Returns the largest lane as a float. This compares halves of the vector; LLVM's own
    reduction compares one lane after the other."""
    width = e.lanes
    while width > 1:
        width //= 2
        others = [(lane + width) % e.lanes for lane in range(e.lanes)]
        x = _max(e, x, e.builder.shuffle_vector(x, x, ir.Constant(e.integers, others)))
    return e.builder.extract_element(x, ir.Constant(INT32, 0))


def power_of_two(
    e: Emitter, x: ir.Value, coefficients: Sequence[float] = _TAYLOR_OF_POWER
) -> ir.Value:
    """Returns 2**x for x at most 0, to 2 units in the last place; 2**0 is exactly 1.

    It uses a polynomial around the nearest integer, whose accuracy is that of the Taylor polynomial
    if none is given. The result is at least 2**-120.
    """
    number = lambda value: e.broadcast(ir.Constant(FLOAT, value))  # noqa: E731
    b = e.builder
    x = _max(e, x, number(_SMALLEST_POWER))
    shifted = b.fadd(x, number(_ROUNDS))  # its last bits are the nearest integer's
    rest = b.fsub(x, b.fsub(shifted, number(_ROUNDS)))
    y = number(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        y = e.fma(y, rest, number(coefficient))
    exponent = b.shl(b.bitcast(shifted, e.integers), e.splat_int(23))
    return b.bitcast(b.add(b.bitcast(y, e.integers), exponent), e.vector)


def _integers(e: Emitter, scalar: ir.Value) -> ir.Value:
    undef = ir.Constant(e.integers, ir.Undefined)
    narrow = e.builder.trunc(scalar, INT32)
    one = e.builder.insert_element(undef, narrow, ir.Constant(INT32, 0))
    return e.builder.shuffle_vector(one, undef, e.splat_int(0))


def _lanes(e: Emitter, keys_per_vector: ir.Value) -> ir.Value:
    """Returns each lane's index among the keys of a vector; a masked index for unused lanes."""
    count = ir.Constant(e.integers, list(range(e.lanes)))
    return e.builder.select(e.first(keys_per_vector), count, e.splat_int(_MASKED_POSITION))


def _store_weight(e: Emitter, weight: ir.Value, address: ir.Value, offset: ir.Value) -> ir.Value:
    e.store(weight, e.at(address, offset))
    return weight


def _store_rounded(e: Emitter, weight: ir.Value, address: ir.Value, offset: ir.Value) -> ir.Value:
    return store_normal(e, weight, e.at(address, e.builder.lshr(offset, e.const(1))))


@emitted
def weigh(builder, scores, num_vectors, keys_per_vector, offset, span, max_score, weight_sums):
    """Turns a row's scores for one chunk of keys into softmax weights, in place.

    Args:
        scores: address of `num_vectors` (at least one) vectors, each of `keys_per_vector` scores.
        offset: index of the first key among the keys that the row attends to; negative if the
            chunk begins before them.
        span: the number of keys that the row attends to.
        max_score: address of the largest score so far, a float32; updated.
        weight_sums: address of the sums of weights so far, one for each lane; updated.

    Returns:
        The factor, a float32, by which weights of earlier chunks must be multiplied.
    """
    row = scores, num_vectors, keys_per_vector, offset, span, max_score, weight_sums
    return _weigh(builder, *row, scores, _store_weight, _TAYLOR_OF_POWER)


@emitted
def weigh_rounded(builder, scores, num_vectors, offset, span, max_score, weight_sums, weights):
    """As `weigh` for whole vectors, but it writes the weights as bfloat16 to an address, and adds
    what they are rounded to, so that the shares of the keys add up to 1."""
    whole = ir.Constant(INT64, LANES)
    row = scores, num_vectors, whole, offset, span, max_score, weight_sums
    return _weigh(builder, *row, weights, _store_rounded, _SHORT_POLYNOMIAL)


@emitted
def weigh_whole(builder, scores, num_keys, max_score, weight_sums, weights):
    """As `weigh_rounded` for a constant number of keys, of which the row attends to all. It
    computes the same bits without a loop."""
    e = Emitter(builder)
    values = [e.load(e.at(scores, 4 * i)) for i in range(0, num_keys.constant, LANES)]
    largest = values
    while len(largest) > 1:
        largest = [_max(e, *largest[i : i + 2]) for i in range(0, len(largest), 2)]
    old_max = e.load_scalar(max_score)
    new_maxima, factor = _new_maxima(e, largest[0], old_max, max_score)
    sums = e.zeros()
    for i, value in enumerate(values):
        power = power_of_two(e, builder.fsub(value, new_maxima), _SHORT_POLYNOMIAL)
        sums = builder.fadd(sums, _store_rounded(e, power, weights, e.const(4 * LANES * i)))
    e.store(e.fma(e.load(weight_sums), factor, sums), weight_sums)
    return builder.extract_element(factor, ir.Constant(INT32, 0))


def _new_maxima(
    e: Emitter, maxima: ir.Value, old_max: ir.Value, max_score: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Stores the largest score of all; returns vectors of it and of the factor of weights."""
    chunk_max = _max_lane(e, maxima)
    is_larger = e.builder.fcmp_ordered(">", chunk_max, old_max)
    new_max = e.builder.select(is_larger, chunk_max, old_max)
    e.store(new_max, max_score)
    new_maxima = e.broadcast(new_max)
    return new_maxima, power_of_two(e, e.builder.fsub(e.broadcast(old_max), new_maxima))


def _weigh(
    builder, scores, num_vectors, keys_per_vector, offset, span, max_score, weight_sums, weights,
    store, polynomial,
):  # fmt: skip
    e = Emitter(builder)
    stop = builder.mul(num_vectors, e.const(4 * LANES))
    step = _integers(e, keys_per_vector)
    first = builder.add(_lanes(e, keys_per_vector), _integers(e, offset))
    visible_keys = _integers(e, span)
    initial = e.broadcast(ir.Constant(FLOAT, INITIAL_MAX_SCORE))

    loop = Loop(e, e.const(0), stop, 4 * LANES)
    loop.begin([initial, first])
    maxima, indices = loop.values
    value = e.load(e.at(scores, loop.index))
    is_visible = builder.icmp_unsigned("<", indices, visible_keys)
    maxima = _max(e, builder.select(is_visible, value, initial), maxima)
    loop.end([maxima, builder.add(indices, step)])

    new_maxima, factor = _new_maxima(e, maxima, e.load_scalar(max_score), max_score)

    loop = Loop(e, e.const(0), stop, 4 * LANES)
    loop.begin([e.zeros(), first])
    sums, indices = loop.values
    address = e.at(scores, loop.index)
    is_visible = builder.icmp_unsigned("<", indices, visible_keys)
    power = power_of_two(e, builder.fsub(e.load(address), new_maxima), polynomial)
    weight = builder.select(is_visible, power, e.zeros())
    sums = builder.fadd(sums, store(e, weight, weights, loop.index))
    loop.end([sums, builder.add(indices, step)])

    e.store(e.fma(e.load(weight_sums), factor, sums), weight_sums)
    return builder.extract_element(factor, ir.Constant(INT32, 0))


@emitted
def cap_scores(builder, scores, num_vectors, cap):
    """Replaces scores by ``cap * tanh(score / cap)``, in place.

    Args:
        scores: address of `num_vectors` (at least one) vectors.
        cap: a positive float32.
    """
    e = Emitter(builder)
    number = lambda value: e.broadcast(ir.Constant(FLOAT, value))  # noqa: E731
    caps, one = e.broadcast(cap), number(1.0)
    loop = Loop(e, e.const(0), builder.mul(num_vectors, e.const(4 * LANES)), 4 * LANES)
    loop.begin([])
    address = e.at(scores, loop.index)
    ratio = builder.fdiv(e.load(address), caps)
    is_negative = builder.fcmp_ordered("<", ratio, e.zeros())
    down = builder.select(is_negative, ratio, builder.fneg(ratio))
    # tanh(-x) = (t - 1) / (t + 1) with t = e**(-2 x), for -x = `down`
    power = power_of_two(e, builder.fmul(down, number(2 / math.log(2))))
    tanh = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
    tanh = builder.select(is_negative, builder.fneg(tanh), tanh)
    # Near 0 the difference loses digits: the Taylor polynomial does not.
    square = builder.fmul(ratio, ratio)
    series = number(_TANH_SERIES[-1])
    for coefficient in reversed(_TANH_SERIES[:-1]):
        series = e.fma(series, square, number(coefficient))
    is_small = builder.fcmp_ordered("<", square, number(_SMALL_RATIO**2))
    tanh = builder.select(is_small, builder.fmul(ratio, series), tanh)
    e.store(builder.fmul(caps, tanh), address)
    loop.end([])


@emitted
def add_biases(builder, scores, num_vectors, keys_per_vector, biases, count):
    """Adds a bias to each of a row's scores, in place.

    Args:
        scores: address of `num_vectors` (at least one) vectors, each of `keys_per_vector` scores.
        biases: address of those of the keys, float32, which are multiplied by log2(e).
        count: the number of keys that have one; scores of others may become anything.
    """
    e = Emitter(builder)
    factors = e.broadcast(ir.Constant(FLOAT, math.log2(math.e)))
    loop = Loop(e, e.const(0), num_vectors, 1)
    loop.begin([])
    key = builder.mul(loop.index, keys_per_vector)
    own = e.load_first(e.at(biases, builder.mul(key, e.const(4))), builder.sub(count, key))
    place = e.at(scores, builder.mul(loop.index, e.const(4 * LANES)))
    e.store(e.fma(own, factors, e.load(place)), place)
    loop.end([])


@emitted
def merge_factor(builder, score, largest):
    """Returns 2**(score - largest), by which weights relative to `score` become such relative to
    `largest`, which is at least as large."""
    e = Emitter(builder)
    power = power_of_two(e, e.broadcast(builder.fsub(score, largest)))
    return builder.extract_element(power, ir.Constant(INT32, 0))


@emitted
def total_weight(builder, weight_sums):
    """Returns the sum over the lanes of the sums that `weigh` stored at this address."""
    e = Emitter(builder)
    return e.sum(e.load(weight_sums))
