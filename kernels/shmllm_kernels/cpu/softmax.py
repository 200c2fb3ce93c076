"""One row of an online softmax, a stretch of keys at a time (Milakov and Gimelshein, 2018).

Scores are powers of two: whoever makes them multiplies them by log2(e). A key that a row does not
see contributes exactly nothing, so that it does not matter whether it was looked at.
"""

from __future__ import annotations

import math

from llvmlite import ir

from shmllm_kernels.cpu.language import emitted
from shmllm_kernels.cpu.simd import FLOAT, INT32, LANES, Emitter, Loop, function

LEAST = -1e30
"""The greatest score of a row that has seen nothing."""

_SMALLEST_POWER = -120.0
_OUT_OF_SIGHT = 1 << 30
_DEGREE = 6


def _rounded(e: Emitter, x: ir.Value) -> ir.Value:
    name = f"llvm.rint.v{e.lanes}f32"
    return e.builder.call(function(e.builder, name, e.vector, [e.vector]), [x])


def _greater(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    return e.builder.select(e.builder.fcmp_ordered(">", a, b), a, b)


def _greatest_lane(e: Emitter, x: ir.Value) -> ir.Value:
    """A float. By halves, where LLVM's own reduction goes from lane to lane."""
    width = e.lanes
    while width > 1:
        width //= 2
        others = [(lane + width) % e.lanes for lane in range(e.lanes)]
        x = _greater(e, x, e.builder.shuffle_vector(x, x, ir.Constant(e.integers, others)))
    return e.builder.extract_element(x, ir.Constant(INT32, 0))


def power_of_two(e: Emitter, x: ir.Value) -> ir.Value:
    """2 to the x, for x at most 0, to 2 units in the last place; 2**0 is exactly 1.

    By its Taylor polynomial around the nearest whole number. At least 2**-120.
    """
    number = lambda value: e.broadcast(ir.Constant(FLOAT, value))  # noqa: E731
    b = e.builder
    x = _greater(e, x, number(_SMALLEST_POWER))
    whole = _rounded(e, x)
    rest = b.fsub(x, whole)
    y = number(math.log(2) ** _DEGREE / math.factorial(_DEGREE))
    for degree in range(_DEGREE - 1, -1, -1):
        y = e.fma(y, rest, number(math.log(2) ** degree / math.factorial(degree)))
    exponent = b.shl(b.fptosi(whole, e.integers), e.splat_int(23))
    return b.bitcast(b.add(b.bitcast(y, e.integers), exponent), e.vector)


def _integers(e: Emitter, scalar: ir.Value) -> ir.Value:
    undef = ir.Constant(e.integers, ir.Undefined)
    narrow = e.builder.trunc(scalar, INT32)
    one = e.builder.insert_element(undef, narrow, ir.Constant(INT32, 0))
    return e.builder.shuffle_vector(one, undef, e.splat_int(0))


def _lanes(e: Emitter, keys_per_vector: ir.Value) -> ir.Value:
    """Each lane's place among keys; far away where a lane holds none."""
    count = ir.Constant(e.integers, list(range(e.lanes)))
    return e.builder.select(e.first(keys_per_vector), count, e.splat_int(_OUT_OF_SIGHT))


@emitted
def weigh(builder, scores, num_vectors, keys_per_vector, offset, span, greatest, total):
    """Turn a row's scores into weights, in place.

    Args:
        scores: address of `num_vectors` (at least one) vectors, each of `keys_per_vector` keys.
        offset: place of the first key among those that the row sees; may be negative.
        span: how many it sees.
        greatest: address of the greatest score so far, a float; is updated.
        total: address of the sum of weights so far, by lanes; is updated.

    Returns:
        What weights given before must be multiplied by, a float.
    """
    e = Emitter(builder)
    stop = builder.mul(num_vectors, e.const(4 * LANES))
    step = _integers(e, keys_per_vector)
    first = builder.add(_lanes(e, keys_per_vector), _integers(e, offset))
    seen_keys = _integers(e, span)
    least = e.broadcast(ir.Constant(FLOAT, LEAST))

    loop = Loop(e, e.const(0), stop, 4 * LANES)
    loop.begin([least, first])
    most, places = loop.values
    value = e.load(e.at(scores, loop.index))
    seen = builder.icmp_unsigned("<", places, seen_keys)
    most = _greater(e, builder.select(seen, value, least), most)
    loop.end([most, builder.add(places, step)])

    here = _greatest_lane(e, most)
    before = e.load_scalar(greatest)
    now = builder.select(builder.fcmp_ordered(">", here, before), here, before)
    e.store(now, greatest)
    summit = e.broadcast(now)
    factor = power_of_two(e, builder.fsub(e.broadcast(before), summit))

    loop = Loop(e, e.const(0), stop, 4 * LANES)
    loop.begin([e.zeros(), first])
    added, places = loop.values
    place = e.at(scores, loop.index)
    seen = builder.icmp_unsigned("<", places, seen_keys)
    power = power_of_two(e, builder.fsub(e.load(place), summit))
    weight = builder.select(seen, power, e.zeros())
    e.store(weight, place)
    added = builder.fadd(added, weight)
    loop.end([added, builder.add(places, step)])

    e.store(e.fma(e.load(total), factor, added), total)
    return builder.extract_element(factor, ir.Constant(INT32, 0))


@emitted
def total_weight(builder, total):
    """The sum over the lanes of what `weigh` added up at an address."""
    e = Emitter(builder)
    return e.sum(e.load(total))
