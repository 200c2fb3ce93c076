"""The recurrent states of requests in the cache, for kernels of layers that have one.

A block of states stands for `interval` tokens of a request. A token reads the state behind the
token before it, which is in that token's block, and writes its own state to its block. A kernel
therefore computes a request's tokens in stretches that end with a block or with the step.

The first operands of these kernels say where the requests are (`state_operands` makes them):

    0  step: int64 words, the number of tokens and the number of requests
    1  first_tokens, 2  counts, 3  context_lens, 4  rows: int64 [requests], see `StepInputs`
    5  block_table: int32 [rows, blocks]
    6  the number of blocks in a row of it (a number)
    7  interval: the number of tokens of a block (a number)
    8  the layer's states [blocks, block_bytes]
    9  block_bytes (a number)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmllm_kernels.cpu.language import compiled, emitted
from shmllm_kernels.cpu.memory import short_words, word
from shmllm_kernels.cpu.simd import LANES, Emitter, Loop

NUM_OPERANDS = 10


class Tokens(NamedTuple):
    """The tokens of one request in a step."""

    row: int  # the index of the first one among the tokens of the step
    start: int  # its position
    end: int  # the position behind the last one
    table: int  # the address of the request's block ids


@compiled
def num_requests(operands):
    return word(word(operands, 0), 1)


@compiled
def tokens_of(operands, request):
    """Returns the `Tokens` of a request of the step."""
    count, end = word(word(operands, 2), request), word(word(operands, 3), request)
    table = word(operands, 5) + word(word(operands, 4), request) * word(operands, 6) * 4
    return Tokens(word(word(operands, 1), request), end - count, end, table)


@compiled
def state_at(operands, tokens, position):
    """Returns the address of the block with the state behind a position."""
    block = np.int64(short_words(tokens.table)[position // word(operands, 7)])
    return word(operands, 8) + block * word(operands, 9)


@compiled
def end_of_stretch(operands, tokens, position):
    """Returns the end of the stretch of tokens from a position on that share a block."""
    interval = word(operands, 7)
    return min((position // interval + 1) * interval, tokens.end)


@emitted
def clear(builder, target, num_bytes):
    """Makes memory zero, a vector after the other."""
    e = Emitter(builder)
    loop = Loop(e, e.const(0), num_bytes, 4 * e.lanes)
    loop.begin([])
    e.store(e.zeros(), e.at(target, loop.index))
    loop.end([])


@compiled
def columns_at_once(width):
    """Returns the number of columns of a head's state that lie together, row after row."""
    return 2 * LANES if width % (2 * LANES) == 0 else LANES
