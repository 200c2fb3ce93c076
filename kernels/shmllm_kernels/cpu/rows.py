"""Kernels that compute each row of activations independently of the other rows: lookups and
activations. `norms` has those of the residual stream.

All activations are float32; weights and tables have the model's dtype. A row's result depends on
that row alone: one thread computes it from beginning to end.
"""

from __future__ import annotations

import math

import numpy as np

from shmllm_kernels.cpu.functions import (
    gelu,
    gelu_tanh,
    quick_gelu,
    relu_squared,
    sigmoid,
    silu,
    tanh,
)
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import (
    float_of_word,
    floats,
    itemsize,
    number,
    word,
)
from shmllm_kernels.cpu.unpacking import (
    MAX_DEPTH,
    PACKINGS,
    has_column_scales,
    panel,
    row_bytes,
    scale_bytes,
    unpack,
)

PIECES_PER_THREAD = 8
NUMBERS_AT_ONCE = 4096
"""The numbers in a piece of work, for a kernel that computes each number independently."""


@compiled
def add_times(x, factor, out, count):
    """Adds ``factor * x``, `count` numbers in float32."""
    values, target = floats(x), floats(out)
    for i in range(count):
        target[i] += factor * values[i]


@compiled
def _rows_at_once(num_rows, num_threads):
    pieces = PIECES_PER_THREAD * num_threads
    return (num_rows + pieces - 1) // pieces


@compiled
def count_pieces(operands, piece, thread, num_threads):
    """Returns the number of pieces of a kernel whose first operand is the address of the number of
    rows."""
    num_rows = word(word(operands, 0), 0)
    size = max(_rows_at_once(num_rows, num_threads), 1)
    return (num_rows + size - 1) // size


@compiled
def rows_of_piece(operands, piece, num_threads):
    """Returns the bounds [begin, end) of a piece's rows."""
    num_rows = word(word(operands, 0), 0)
    size = _rows_at_once(num_rows, num_threads)
    return piece * size, min((piece + 1) * size, num_rows)


@compiled
def _is_own(operands, token):
    """Whether a token's row is in the table. Embeddings that were given belong to the table with
    the first row."""
    first, end = word(operands, 9), word(operands, 10)
    return (token >= first) & (token < end) | (token < 0) & (first == 0)


@compiled
def _finish_embedding(operands, row, kind):
    """Scales an embedding that was given, and adds that of its position."""
    width, embeds_scale = word(operands, 4), float_of_word(word(operands, 6))
    values, positions, position_table = (
        floats(word(operands, 3) + row * width * 4), word(operands, 7), word(operands, 8),
    )  # fmt: skip
    if word(word(operands, 1), row) < 0:
        for i in range(width):
            values[i] *= embeds_scale
    if position_table != 0:
        position = position_table + word(positions, row) * width * itemsize(kind)
        for i in range(width):
            values[i] += number(position, i, kind)
    if word(operands, 13) != 0:
        for i in range(width):
            values[i] += number(word(operands, 13), i, kind)
    if word(operands, 12) != 0:
        of_type = word(operands, 12) + word(word(operands, 11), row) * width * itemsize(kind)
        for i in range(width):
            values[i] += number(of_type, i, kind)


@compiled
def _embed(operands, piece, thread, num_threads, kind):
    token_ids, table, out, width = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    scale = float_of_word(word(operands, 5))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        token, values = word(token_ids, row), floats(out + row * width * 4)
        if _is_own(operands, token):
            if token >= 0:
                source = table + (token - word(operands, 9)) * width * itemsize(kind)
                for i in range(width):
                    values[i] = number(source, i, kind) * scale
            _finish_embedding(operands, row, kind)


EMBED = {kind: Kernel(count_pieces, _embed, kind) for kind in ("float32", "float16", "bfloat16")}
"""Kernels by the dtype name of the tables. ``out[row] = scale * table[token_ids[row] - first]``; a
row whose token id is negative already has an embedding: ``out[row] *= embeds_scale``. Then
``out[row] += position_table[positions[row]] + added + type_table[token_types[row]]``. Rows of
tokens that the table lacks stay as they are, those with embeddings of their own unless first is 0.

Operands: address of the number of rows; token_ids int64; table [end - first, width]; out
[rows, width]; width; scale and embeds_scale, numbers from `word_of_float`; positions int64;
position_table [positions, width] or 0: the model has none; first and end, the tokens in the table;
token_types int64; type_table [types, width] or 0: the model has none; added [width] or 0.
"""


@compiled
def _unpack_row(source, scales, width, out, scale, kind):
    """Writes ``scale`` times a row of packed weights, a part of it after the other."""
    unpacked = panel(1, kind, "float32")
    for begin in range(0, width, MAX_DEPTH):
        depth = min(width - begin, MAX_DEPTH)
        unpack(
            source + row_bytes(begin, kind), 0, scales + scale_bytes(begin, kind), 0, 1, depth,
            unpacked, kind, "float32",
        )  # fmt: skip
        values, numbers = floats(out + begin * 4), floats(unpacked)
        for i in range(depth):
            values[i] = numbers[i] * scale


@compiled
def _embed_packed(operands, piece, thread, num_threads, kind, position_kind):
    token_ids, table, out, width = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    scale, scales = float_of_word(word(operands, 5)), word(operands, 14)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        token, place = word(token_ids, row), out + row * width * 4
        if _is_own(operands, token):
            if token >= 0:
                at = token - word(operands, 9)
                source, own = (
                    table + at * row_bytes(width, kind),
                    scales + at * scale_bytes(width, kind),
                )
                if has_column_scales(kind):
                    values, of_row = floats(place), floats(own)[0]
                    for i in range(width):
                        values[i] = number(source, i, kind) * of_row * scale
                else:
                    _unpack_row(source, own, width, place, scale, kind)
            _finish_embedding(operands, row, position_kind)


EMBED_PACKED = {
    (kind, position_kind): Kernel(count_pieces, _embed_packed, kind, position_kind)
    for kind in PACKINGS
    for position_kind in EMBED
}
"""Kernels by the kind of a packed table, see `unpacking`, and the dtype name of the position table.
They do what EMBED does, with weights in float32 as products of float32 have them.

Operands: those of EMBED, and the address of the scales of the table.
"""


@compiled
def _gather(operands, piece, thread, num_threads):
    indices, source, out, width = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        values = floats(source + word(indices, row) * width * 4)
        target = floats(out + row * width * 4)
        for i in range(width):
            target[i] = values[i]


GATHER = Kernel(count_pieces, _gather)
"""``out[row] = source[indices[row]]``.

Operands: address of the number of rows; indices int64; source [any, width]; out [rows, width];
width.
"""


@compiled
def _copy(source, width, target):
    values, copies = floats(source), floats(target)
    for i in range(width):
        copies[i] = values[i]


@compiled
def _place(operands, piece, thread, num_threads):
    source, out, width, stride, source_stride = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
        word(operands, 5),
    )  # fmt: skip
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        _copy(source + row * source_stride, width, out + row * stride)


PLACE = Kernel(count_pieces, _place)
"""``out[row] = source[row]``, where the rows of both may be parts of wider ones.

Operands: address of the number of rows; addresses of the first elements of source and out; width;
the distances of out's rows and of those of source, in bytes.
"""


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared")
OF_HEADS = ("tanh", "sigmoid")
"""The activations that only heads have, which are not gated."""


@compiled
def activation(x, name):
    """Returns a function of ACTIVATIONS or OF_HEADS of x."""
    if name == "relu":
        return max(x, np.float32(0.0))
    if name == "tanh":
        return tanh(x)
    if name == "sigmoid":
        return sigmoid(x)
    if name == "silu":
        return silu(x, np.float32(1.0))
    if name == "relu_squared":
        return relu_squared(x)
    if name == "quick_gelu":
        return quick_gelu(x)
    return gelu(x) if name == "gelu" else gelu_tanh(x)


@compiled
def activate(operands, begin, end, name, is_gated):
    """Computes the rows [begin, end) of ACTIVATE."""
    source, out, width = word(operands, 1), word(operands, 2), word(operands, 3)
    for row in range(begin, end):
        values = floats(out + row * width * 4)
        if is_gated:
            gate = floats(source + row * width * 8)
            up = floats(source + row * width * 8 + width * 4)
            for i in range(width):
                values[i] = activation(gate[i], name) * up[i]
        else:
            numbers = floats(source + row * width * 4)
            for i in range(width):
                values[i] = activation(numbers[i], name)


@compiled
def _activate(operands, piece, thread, num_threads, name, is_gated):
    begin, end = rows_of_piece(operands, piece, num_threads)
    activate(operands, begin, end, name, is_gated)


ACTIVATE = {
    (name, is_gated): Kernel(count_pieces, _activate, name, is_gated)
    for name in (*ACTIVATIONS, *OF_HEADS)
    for is_gated in (True, False)
    if name in ACTIVATIONS or not is_gated
}
"""Kernels by the function's name and whether it is gated: ``f(gate) * up``, or ``f(x)``.

Operands: address of the number of rows; gate and up side by side [rows, 2 * width], or x [rows,
width]; out [rows, width]; width.
"""


@compiled
def _count_parts(operands, piece, thread, num_threads):
    return (word(word(operands, 0), 0) * word(operands, 2) + NUMBERS_AT_ONCE - 1) // NUMBERS_AT_ONCE


@compiled
def _scale_and_cap(operands, piece, thread, num_threads):
    values, count = floats(word(operands, 1)), word(word(operands, 0), 0) * word(operands, 2)
    scale, cap = float_of_word(word(operands, 3)), float_of_word(word(operands, 4))
    begin, end = piece * NUMBERS_AT_ONCE, min((piece + 1) * NUMBERS_AT_ONCE, count)
    if cap == np.float32(0.0):
        for i in range(begin, end):
            values[i] *= scale
    else:
        for i in range(begin, end):
            values[i] = cap * tanh(values[i] * scale / cap)


SCALE_AND_CAP = Kernel(_count_parts, _scale_and_cap)
"""``x *= scale``, and then ``x = cap * tanh(x / cap)`` if there is a cap, in place.

Operands: address of the number of rows; x [rows, width]; width; scale, and cap or 0, numbers from
`word_of_float`.
"""


@compiled
def _forbid_behind(operands, piece, thread, num_threads):
    x, width, count = word(operands, 1), word(operands, 2), word(operands, 3)
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        values = floats(x + row * width * 4)
        for i in range(count, width):
            values[i] = np.float32(-math.inf)


FORBID_BEHIND = Kernel(count_pieces, _forbid_behind)
"""``x[:, count:] = -inf``, in place.

Operands: address of the number of rows; x [rows, width]; width; count.
"""


@compiled
def _clip(operands, piece, thread, num_threads):
    values, count = floats(word(operands, 1)), word(word(operands, 0), 0) * word(operands, 2)
    bound = float_of_word(word(operands, 3))
    begin, end = piece * NUMBERS_AT_ONCE, min((piece + 1) * NUMBERS_AT_ONCE, count)
    for i in range(begin, end):
        x = values[i]
        values[i] = bound if x > bound else -bound if x < -bound else x  # a NaN stays one


CLIP = Kernel(_count_parts, _clip)
"""``x = min(max(x, -bound), bound)``, in place.

Operands: address of the number of rows; x [rows, width]; width; bound, a number from
`word_of_float`.
"""


@compiled
def _position_of_pair(operands, row, i, position, has_axes):
    """Returns the position that rotates a pair: the given one, or that on the pair's axis."""
    if has_axes:
        on_axis = word(operands, 1) + word(word(operands, 7), i) * word(operands, 8)
        return np.float32(word(on_axis, row))
    return position


@compiled
def _rope_tables(operands, piece, thread, num_threads, has_axes):
    positions, half = word(operands, 1), word(operands, 3)
    frequencies = floats(word(operands, 2))
    scale = float_of_word(word(operands, 6))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for row in range(begin, end):
        cos = floats(word(operands, 4) + row * half * 4)
        sin = floats(word(operands, 5) + row * half * 4)
        position = np.float32(word(positions, row))
        for i in range(half):
            angle = _position_of_pair(operands, row, i, position, has_axes) * frequencies[i]
            cos[i] = np.float32(math.cos(angle)) * scale
            sin[i] = np.float32(math.sin(angle)) * scale


ROPE_TABLES = {has_axes: Kernel(count_pieces, _rope_tables, has_axes) for has_axes in (False, True)}
"""Kernels by whether positions are on several axes, of which each frequency has one. They compute
cosines and sines of each row's position times each frequency (Su et al., 2021).

Operands: address of the number of rows; positions int64 [rows], or [axes, rows]; frequencies [half]
float32; half; cos [rows, half]; sin [rows, half]; the factor of cosines and sines, a number from
`word_of_float`. With axes also: the axis of each frequency, int64 [half]; the bytes from the
positions on one axis to those on the next.
"""
