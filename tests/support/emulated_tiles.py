"""Instructions on tiles that compute in memory, so that kernels for AMX run on any CPU.

They follow the operations of "Intel 64 and IA-32 Architectures Software Developer's Manual", volume
2: TDPBF16PS sums the products of even and of odd elements apart, each with a fused multiply-add in
the order of the words, adds both, and adds that to the sum; subnormal numbers become zero in
operands and results. What the CPU would reject, a wrong configuration or tiles whose sizes do not
fit together, makes sums that no test takes for right: NaN, and large integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llvmlite import ir

from shmllm_kernels.cpu import Kernel, expert_tiles, gated_tiles
from shmllm_kernels.cpu.attention_in_tiles import ATTEND_IN_TILES, attend_by
from shmllm_kernels.cpu.attention_pieces import num_pieces
from shmllm_kernels.cpu.language import compiled, compiled_noinline, emitted
from shmllm_kernels.cpu.matrix_tiles import MULTIPLY, count_pieces, multiply_by
from shmllm_kernels.cpu.memory import floats, number, put_word, short_words, word
from shmllm_kernels.cpu.simd import FLOAT, INT64, function
from shmllm_kernels.cpu.tile_instructions import LINE_BYTES, LINES, TILE_BYTES, Tiles
from shmllm_kernels.cpu.tile_rounding import TILED
from shmllm_kernels.cpu.translate import expand

_NUM_TILES = 8
_CONFIGURATION = _NUM_TILES * TILE_BYTES
_WIDTHS, _HEIGHTS = _CONFIGURATION + 16, _CONFIGURATION + 48
_WRONG = 0x7FC0DEAD  # NaN as float32
_SMALLEST_NORMAL = 2.0**-126
_memory: WeakKeyDictionary[ir.Function, ir.Value] = WeakKeyDictionary()


def _registers(builder: ir.IRBuilder) -> ir.Value:
    """Returns the address of the tiles and of the configuration, in the stack of a kernel."""
    if builder.function not in _memory:
        with builder.goto_entry_block():
            place = builder.alloca(ir.ArrayType(ir.IntType(8), _CONFIGURATION + LINE_BYTES))
            place.align = LINE_BYTES
            address = builder.ptrtoint(place, INT64)
            palette = builder.add(address, ir.Constant(INT64, _CONFIGURATION))
            builder.store(ir.Constant(INT64, 0), builder.inttoptr(palette, INT64.as_pointer()))
        _memory[builder.function] = address
    return _memory[builder.function]


def _instruction(source: Callable[..., None]) -> Any:
    """Decorator of a function in the language of kernels, which gets the address of the tiles as
    the first argument."""
    function = compiled_noinline(source)
    return emitted(
        lambda builder, *arguments: expand(builder, function, [_registers(builder), *arguments])
    )


@emitted
def _byte(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    return builder.zext(builder.load(pointer), INT64)


@emitted
def _signed_byte(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    return builder.sext(builder.load(pointer), INT64)


@emitted
def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return builder.call(function(builder, "llvm.fma.f32", FLOAT, [FLOAT] * 3), [a, b, c])


@compiled
def _height(tiles: Any, tile: Any) -> Any:
    return _byte(tiles + _HEIGHTS + tile)


@compiled
def _words(tiles: Any, tile: Any) -> Any:
    """The number of words in a line of a tile."""
    return _byte(tiles + _WIDTHS + 2 * tile) // 4


@compiled
def _line(tiles: Any, tile: Any, line: Any) -> Any:
    return tiles + TILE_BYTES * tile + LINE_BYTES * line


@compiled
def _clear(tiles: Any, tile: Any) -> None:
    for line in range(LINES):
        for i in range(LINE_BYTES // 8):
            put_word(_line(tiles, tile, line), i, 0)


@_instruction
def _zero(tiles: Any, tile: Any) -> None:
    _clear(tiles, tile)


@_instruction
def _release(tiles: Any) -> None:
    for i in range(LINE_BYTES // 8):
        put_word(tiles + _CONFIGURATION, i, 0)


@_instruction
def _configure(tiles: Any, address: Any) -> None:
    """Sets all sizes to 0, so that nothing is computed, if the configuration is not valid."""
    is_valid = _byte(address) == 1
    for i in range(1, 16):
        is_valid = is_valid and _byte(address + i) == 0
    for tile in range(2 * _NUM_TILES):
        width = _byte(address + 16 + 2 * tile)
        is_valid = is_valid and _byte(address + 17 + 2 * tile) == 0
        is_valid = is_valid and width <= LINE_BYTES and width % 4 == 0
        is_valid = is_valid and _byte(address + 48 + tile) <= LINES
        if tile >= _NUM_TILES:
            is_valid = is_valid and width == 0 and _byte(address + 48 + tile) == 0
    for i in range(LINE_BYTES // 8):
        put_word(tiles + _CONFIGURATION, i, word(address, i) if is_valid else 0)


@_instruction
def _load(tiles: Any, tile: Any, address: Any, stride: Any) -> None:
    _clear(tiles, tile)
    for line in range(_height(tiles, tile)):
        for i in range(_words(tiles, tile)):
            short_words(_line(tiles, tile, line))[i] = short_words(address + line * stride)[i]


@_instruction
def _store(tiles: Any, tile: Any, address: Any, stride: Any) -> None:
    for line in range(_height(tiles, tile)):
        for i in range(_words(tiles, tile)):
            short_words(address + line * stride)[i] = short_words(_line(tiles, tile, line))[i]
    if _height(tiles, tile) == 0:
        for i in range(TILE_BYTES // 4):
            short_words(address)[i] = np.int32(_WRONG)


@compiled
def _flush(x: Any) -> Any:
    """Returns zero in place of a subnormal number."""
    is_subnormal = x > np.float32(-_SMALLEST_NORMAL) and x < np.float32(_SMALLEST_NORMAL)
    return np.float32(0.0) if is_subnormal else x


@compiled
def _half_of_dot(weights: Any, activations: Any, num_words: Any, row: Any, half: Any) -> Any:
    """Sums the products of the even (half 0) or odd elements of a line of weights."""
    total = np.float32(0.0)
    for i in range(num_words):
        w = _flush(number(weights, 2 * i + half, "bfloat16"))
        x = _flush(number(activations + i * LINE_BYTES, 2 * row + half, "bfloat16"))
        total = _flush(_fma(w, x, total))
    return total


@compiled
def _dot_bfloat16(weights: Any, activations: Any, num_words: Any, row: Any, total: Any) -> Any:
    even = _half_of_dot(weights, activations, num_words, row, 0)
    odd = _half_of_dot(weights, activations, num_words, row, 1)
    return _flush(_flush(total) + _flush(even + odd))


@compiled
def _dot_int8(weights: Any, activations: Any, num_words: Any, row: Any, total: Any) -> Any:
    for i in range(num_words):
        for j in range(4):
            x = _signed_byte(activations + i * LINE_BYTES + 4 * row + j)
            total += np.int32(_signed_byte(weights + 4 * i + j) * x)
    return total


@_instruction
def _dot(tiles: Any, kind: Any, sums: Any, weights: Any, activations: Any) -> None:
    num_words, fits = _words(tiles, weights), _height(tiles, sums) == _height(tiles, weights)
    fits = (
        fits
        and _words(tiles, sums) == _words(tiles, activations)
        and num_words == _height(tiles, activations)
    )
    fits = fits and _height(tiles, sums) > 0 and _words(tiles, sums) > 0 and num_words > 0
    for line in range(LINES):
        w, x = _line(tiles, weights, line), _line(tiles, activations, 0)
        as_floats, as_integers = (
            floats(_line(tiles, sums, line)),
            short_words(_line(tiles, sums, line)),
        )
        for row in range(LINES):
            if fits and line < _height(tiles, sums) and row < _words(tiles, sums):
                if kind == "int8":
                    as_integers[row] = _dot_int8(w, x, num_words, row, as_integers[row])
                else:
                    as_floats[row] = _dot_bfloat16(w, x, num_words, row, as_floats[row])
            else:
                as_integers[row] = np.int32(0 if fits else _WRONG)


EMULATED = Tiles(_configure, _zero, _load, _store, _dot, _release)


@compiled
def _multiply(
    operands: Any, piece: Any, thread: Any, num_threads: Any, x_kind: Any, kind: Any, bias_kind: Any
) -> None:
    multiply_by(EMULATED, operands, piece, num_threads, x_kind, kind, bias_kind)


EMULATED_MULTIPLY = {
    kinds: Kernel(count_pieces, _multiply, TILED[kinds[0]], *kinds[1:]) for kinds in MULTIPLY
}
"""The kernels of `matrix_tiles.MULTIPLY` with EMULATED instead of AMX."""


@compiled
def _gate_and_up(
    operands: Any, piece: Any, thread: Any, num_threads: Any, x_kind: Any, kind: Any, name: Any
) -> None:
    gated_tiles.multiply_by(EMULATED, operands, piece, num_threads, x_kind, kind, name)


EMULATED_GATE_AND_UP = {
    kinds: Kernel(gated_tiles.count_pieces, _gate_and_up, TILED[kinds[0]], *kinds[1:])
    for kinds in gated_tiles.GATE_AND_UP
}
"""The kernels of `gated_tiles.GATE_AND_UP` with EMULATED instead of AMX."""


@compiled
def _gate_and_up_of_experts(
    operands: Any, piece: Any, thread: Any, num_threads: Any, kind: Any, name: Any
) -> None:
    expert_tiles.gate_and_up_by(EMULATED, operands, piece, num_threads, kind, name)


@compiled
def _down(
    operands: Any, piece: Any, thread: Any, num_threads: Any, kind: Any, bias_kind: Any
) -> None:
    expert_tiles.down_by(EMULATED, operands, piece, num_threads, kind, bias_kind)


EMULATED_EXPERTS = {
    kinds: Kernel(expert_tiles.count_gated, _gate_and_up_of_experts, *kinds[1:])
    for kinds in expert_tiles.GATE_AND_UP
}
EMULATED_DOWN = {
    kinds: Kernel(expert_tiles.count_down, _down, *kinds[1:]) for kinds in expert_tiles.DOWN
}
"""The kernels of `expert_tiles` with EMULATED instead of AMX."""


@compiled
def _attend(operands: Any, piece: Any, thread: Any, num_threads: Any, kind: Any) -> None:
    attend_by(EMULATED, operands, piece, thread, num_threads, kind)


EMULATED_ATTEND = {kinds: Kernel(num_pieces, _attend, kinds[1]) for kinds in ATTEND_IN_TILES}
"""The kernels of `attention_in_tiles.ATTEND_IN_TILES` with EMULATED instead of AMX."""
