"""How the tiles of a matrix product multiply: in float32, or by the CPU's dot products.

    activations   weights    one step of a tile
    float32       any        widens LANES weights to float32; a fused multiply-add for each lane
    bfloat16      bfloat16   a lane adds the products of two pairs (AVX512_BF16)
    int8          int8       a lane adds the products of four pairs, exactly (AVX512_VNNI), or of
                             two pairs, which are widened to int16 (AVX2)

Each lane of an accumulator adds its products in the order of the row, so that a sum depends on its
operands alone. LLVM takes the operands of dot products as int32, whatever they are, in all its
versions since 15. The instruction VDPBF16PS takes subnormal numbers for zero. VPDPBUSD multiplies
unsigned by signed numbers: a step adds 128 to each weight, and the accumulators begin with -128
times the sum of the activations, which `rounding.ROUND` stored behind them. VPMADDWD needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from shmllm_kernels.cpu.simd import FEATURES, INT32, LANES, Emitter, function


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One way to multiply.

    Attributes:
        num_bytes: the size of an activation.
        width: the number of elements of a row in one step.
        load_x: (emitter, address) -> the activations of a step.
        load_first_x: (emitter, address, count) -> likewise; those after the first `count` are zero
            and not read.
        load_weight, load_first_weight: likewise, with the dtype name of the weights.
        multiply_add: (emitter, activations, weights, sums) -> the sums.
        begin: (emitter, address of a row's int32 correction) -> the sums before the first step.
        end: (emitter, sums over the lanes) -> these as float32.
    """

    num_bytes: int
    width: int
    load_x: Callable[..., ir.Value]
    load_first_x: Callable[..., ir.Value]
    load_weight: Callable[..., ir.Value]
    load_first_weight: Callable[..., ir.Value]
    multiply_add: Callable[..., ir.Value]
    begin: Callable[..., ir.Value] = lambda e, correction: e.zeros()
    end: Callable[..., ir.Value] = lambda e, sums: sums


def _load(e: Emitter, address: ir.Value) -> ir.Value:
    """Loads a register of any numbers, as the dot products take them: as int32."""
    pointer = e.builder.inttoptr(address, e.integers.as_pointer())
    return e.builder.load(pointer, align=1)


def _load_first(e: Emitter, address: ir.Value, count: ir.Value, num_bytes: int) -> ir.Value:
    lanes = Emitter(e.builder, LANES * 4 // num_bytes)
    return e.builder.bitcast(lanes.load_first_bits(address, count, 8 * num_bytes), e.integers)


def _dot_pairs(e: Emitter, x: ir.Value, weight: ir.Value, sums: ir.Value) -> ir.Value:
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    dot = function(e.builder, name, e.vector, [e.vector, e.integers, e.integers])
    return e.builder.call(dot, [sums, x, weight])


def round_pairs(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Rounds two vectors of 16 float32 to one of 32 bfloat16, to the nearest, ties to even, as
    int32; needs HAS_BFLOAT16. (The types of LLVM's intrinsic depend on its version.)"""
    kind = ir.FunctionType(e.integers, [e.vector, e.vector])
    return e.builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [low, high], False)


def _widened(e: Emitter, read: ir.Value) -> ir.Value:
    """Widens bytes to int16, as int32."""
    words = ir.VectorType(ir.IntType(16), read.type.count)
    return e.builder.bitcast(e.builder.sext(read, words), e.integers)


def _load_words(e: Emitter, address: ir.Value) -> ir.Value:
    kind = ir.VectorType(ir.IntType(8), 2 * LANES)
    pointer = e.builder.inttoptr(address, kind.as_pointer())
    return _widened(e, e.builder.load(pointer, align=1))


def _load_first_words(e: Emitter, address: ir.Value, count: ir.Value) -> ir.Value:
    return _widened(e, Emitter(e.builder, 2 * LANES).load_first_bits(address, count, 8))


def dot_words(e: Emitter, sums: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
    """Adds the products of two words of 16 bits in each lane, which AVX2 has."""
    words = ir.VectorType(ir.IntType(16), 2 * e.lanes)
    dot = function(e.builder, "llvm.x86.avx2.pmadd.wd", e.integers, [words] * 2)
    both = [e.builder.bitcast(each, words) for each in (weights, x)]
    return e.builder.add(sums, e.builder.call(dot, both))


def _plus_128(e: Emitter, weight: ir.Value) -> ir.Value:
    return e.builder.xor(weight, e.splat_int(-0x7F7F7F80))  # 0x80 in each byte


def dot_bytes(e: Emitter, sums: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
    """Adds the products of four unsigned bytes of weights and four signed ones of activations in
    each lane, which AVX512_VNNI has."""
    name = "llvm.x86.avx512.vpdpbusd.512"
    dot = function(e.builder, name, e.integers, [e.integers] * 3)
    return e.builder.call(dot, [sums, weights, x])


def _corrected(e: Emitter, correction: ir.Value) -> ir.Value:
    pointer = e.builder.inttoptr(correction, INT32.as_pointer())
    return e.builder.insert_element(
        e.splat_int(0), e.builder.load(pointer, align=4), ir.Constant(INT32, 0)
    )


_INT8_BY_BYTES = Arithmetic(
    1,
    4 * LANES,
    _load,
    lambda e, address, count: _load_first(e, address, count, 1),
    lambda e, address, kind: _plus_128(e, _load(e, address)),
    lambda e, address, count, kind: _plus_128(e, _load_first(e, address, count, 1)),
    lambda e, x, weight, sums: dot_bytes(e, sums, weight, x),
    _corrected,
    lambda e, sums: e.builder.sitofp(sums, e.vector),
)
_INT8_BY_WORDS = Arithmetic(
    1,
    2 * LANES,
    _load_words,
    _load_first_words,
    lambda e, address, kind: _load_words(e, address),
    lambda e, address, count, kind: _load_first_words(e, address, count),
    lambda e, x, weight, sums: dot_words(e, sums, weight, x),
    lambda e, correction: e.splat_int(0),
    lambda e, sums: e.builder.sitofp(sums, e.vector),
)

HAS_DOTS_OF_BYTES = LANES == 16 and bool(FEATURES.get("avx512vnni"))
HAS_DOTS_OF_WORDS = LANES == 8 and bool(FEATURES.get("avx2"))
"""What integers of activations and weights meet as on this CPU, if it has instructions for that."""

ARITHMETIC = {
    "float32": Arithmetic(
        4,
        LANES,
        lambda e, address: e.load(address),
        lambda e, address, count: e.load_first(address, count),
        lambda e, address, kind: e.load(address, kind),
        lambda e, address, count, kind: e.load_first(address, count, kind),
        lambda e, x, weight, sums: e.fma(x, weight, sums),
    ),
    "bfloat16": Arithmetic(
        2,
        2 * LANES,
        _load,
        lambda e, address, count: _load_first(e, address, count, 2),
        lambda e, address, kind: _load(e, address),
        lambda e, address, count, kind: _load_first(e, address, count, 2),
        _dot_pairs,
    ),
    "int8": _INT8_BY_WORDS if HAS_DOTS_OF_WORDS else _INT8_BY_BYTES,
}
"""The ways by the dtype name of the activations."""

HAS_BFLOAT16 = LANES == 16 and bool(FEATURES.get("avx512bf16"))
"""Whether this CPU multiplies bfloat16 itself."""
HAS_INT8 = HAS_DOTS_OF_BYTES or HAS_DOTS_OF_WORDS
"""Whether this CPU multiplies integers of 8 bits, and by groups those of 16, itself."""
INT8_INSTRUCTION = "AVX2" if HAS_DOTS_OF_WORDS else "AVX512_VNNI"
"""The name of the instructions that do it or, if there are none, would."""
