"""Kernels in which the ranks of a group meet: processes that compute parts of the same step.

Each meeting has a word for each rank in memory that the ranks share. A rank writes the step's
number there when it has written its part of the result, and waits until the others have. Steps
count up, so a word never has to be set back. No rank begins a step before all have ended the one
before: the words of a meeting, and what was written before it, stay until then.

A rank that arrives at the last meeting of a step may have threads that come late to earlier
kernels. They take no piece, but they count the pieces. So what is counted must not change before
they have left too, which these kernels do not show.
"""

from __future__ import annotations

import ctypes

from shmllm_kernels.cpu.atomics import (
    SPINS,
    load_acquire,
    monotonic_ns,
    store_release,
    wait_a_moment,
)
from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, put_word, word
from shmllm_kernels.cpu.object_code import addresses_of
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece

LINE_BYTES = 64
"""The distance of two ranks' words, so that they never share a cache line."""


@compiled
def _arrive(operands):
    step = word(word(operands, 1), 0)
    store_release(word(operands, 2) + word(operands, 3) * LINE_BYTES, step)


@compiled
def _await(operands, rank):
    """Waits until a rank has arrived, or the group has ended."""
    step, place = word(word(operands, 1), 0), word(operands, 2) + rank * LINE_BYTES
    spins = 0
    while load_acquire(place) < step:
        spins = wait_a_moment(spins)
        if spins > SPINS and load_acquire(word(operands, 5)) != 0:
            return


@compiled
def _await_ranks(operands, piece, first, end):
    """Waits until some ranks have arrived, or the group has ended. The wait of one piece counts for
    all, which wait at the same time."""
    waits = word(operands, 6)
    is_measured = (piece == 0) & (word(waits, 0) != 0)
    began = 0
    if is_measured:
        began = monotonic_ns()
    for rank in range(first, end):
        _await(operands, rank)
    if is_measured:
        put_word(waits, 1, word(waits, 1) + monotonic_ns() - began)


@compiled
def _await_others(operands, piece):
    _await_ranks(operands, piece, 0, word(operands, 4))


@compiled
def _await_one(operands, piece):
    rank = word(operands, 7)
    _await_ranks(operands, piece, rank, rank + 1)


@compiled
def _sum_parts(operands, piece, thread, num_threads):
    _arrive(operands)
    _await_others(operands, piece)
    width, stride = word(operands, 11), word(operands, 8)
    begin, end = rows_of_piece(operands, piece, num_threads)
    skipped, count = 4 * begin * width, (end - begin) * width
    parts, out = word(operands, 7) + skipped, floats(word(operands, 10) + skipped)
    first, second = floats(parts), floats(parts + stride)
    if word(operands, 9) == 1:
        for i in range(count):
            out[i] = first[i]
    else:
        for i in range(count):
            out[i] = first[i] + second[i]
    for part in range(2, word(operands, 9)):
        values = floats(parts + part * stride)
        for i in range(count):
            out[i] += values[i]


SUM_PARTS = Kernel(count_pieces, _sum_parts)
"""``out = parts[0] + parts[1] + ...``, added in this order, after all ranks have arrived.

Operands: address of the number of rows; address of the step's number, int64; the meeting's words
[ranks, LINE_BYTES]; rank; number of ranks; address of an int64 that is not 0 when the group has
ended: then out is undefined; address of two int64: whether this rank measures how long it waits,
and the ns that it has waited, which this rank alone writes; parts [parts, rows, width] float32; the
distance of two parts in bytes; the number of parts; out [rows, width] float32; width.
"""


@compiled
def _one_piece(operands, piece, thread, num_threads):
    return 1


@compiled
def _publish(operands, piece, thread, num_threads):
    _arrive(operands)


PUBLISH = Kernel(_one_piece, _publish)
"""Arrives at a meeting, and waits for nobody. Operands: the first five of SUM_PARTS."""


@compiled
def _meet(operands, piece, thread, num_threads):
    _arrive(operands)
    _await_others(operands, piece)


MEET = Kernel(_one_piece, _meet)
"""Waits until all ranks have arrived. Operands: the first seven of SUM_PARTS."""


@compiled
def _take(operands, piece, thread, num_threads):
    _await_one(operands, piece)
    begin, end = rows_of_piece(operands, piece, num_threads)
    width = word(operands, 10)
    source = floats(word(operands, 8) + 4 * begin * width)
    out = floats(word(operands, 9) + 4 * begin * width)
    for i in range((end - begin) * width):
        out[i] = source[i]


TAKE = Kernel(count_pieces, _take)
"""``out = source``, after one other rank has arrived.

Operands: the first seven of SUM_PARTS; the other rank; source [rows, width] float32; out, likewise;
width.
"""


@compiled
def _meet_one(operands, piece, thread, num_threads):
    _await_one(operands, piece)


AWAIT = Kernel(_one_piece, _meet_one)
"""Waits until one other rank has arrived. Operands: the first eight of TAKE."""


@compiled
def _await_more(address, last, num_yields, unused):
    spins = 0
    while (load_acquire(address) <= last) & (spins < SPINS + num_yields):
        spins = wait_a_moment(spins)
    return load_acquire(address)


_FUNCTION_TYPE = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 5)


class AwaitMore:
    """Waits in a loop, without Python's lock, until a word of shared memory has grown.

    Args:
        address: the address of the int64.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._wait = _FUNCTION_TYPE(addresses_of((_await_more, ()))[0])

    def __call__(self, last: int, num_yields: int) -> int:
        """Return the word when it is more than `last`, or after it has let other threads run so
        many times."""
        return int(self._wait(self._address, last, num_yields, 0))
