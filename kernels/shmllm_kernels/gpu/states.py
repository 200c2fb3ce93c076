"""The recurrent states of requests in the cache, for kernels of layers that have one.

The states lie in blocks that stand for `interval` tokens of a request: a token reads the state in
the block of the token before it, and a program leaves the state behind the last token of each block
in it. The grids of these kernels depend on the padded sizes of the step alone; a padded request has
no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a step and their states.

    Attributes:
        query_starts: [requests + 1] int32, the index of each request's first token.
        context_lens: [requests] int32, the number of each request's tokens with this step's.
        block_table: [requests, blocks] int32, the blocks of states.
        interval: the number of tokens of a block.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_table: Tensor
    interval: int


class OwnStates(NamedTuple):
    """The tokens of a request in the step, and its states.

    Attributes:
        states: pointer to the states of all blocks.
        table: pointer to the request's blocks.
        stride: the elements from a block to the next one.
        interval: the number of tokens of a block.
        first: the index of the request's first token in the step.
        count: the number of its tokens in the step.
        start: the position of the first one.
    """

    states: Any
    table: Any
    stride: Any
    interval: Any
    first: Any
    count: Any
    start: Any


@triton.jit
def own_states(
    request, states_ptr, starts_ptr, context_ptr, table_ptr, state_stride, table_stride, interval
):
    """Returns the `OwnStates` of a request."""
    first = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - first
    start = tl.load(context_ptr + request) - count
    table_ptr += request.to(tl.int64) * table_stride
    return OwnStates(states_ptr, table_ptr, state_stride, interval, first, count, start)


@triton.jit
def state_before(own):
    """Returns a pointer to the state before the request's first token in the step, which exists
    unless that is the first of all."""
    return _state_at(own, tl.maximum(own.start - 1, 0))


@triton.jit
def state_behind(own, token):
    """Returns a pointer to where the state behind a token of the step is kept."""
    return _state_at(own, own.start + token)


@triton.jit
def is_kept(own, token):
    """Whether the state behind a token is kept: behind the last one of its request in the step, and
    behind the last one of a block."""
    return ((own.start + token + 1) % own.interval == 0) | (token == own.count - 1)


@triton.jit
def _state_at(own, position):
    return own.states + tl.load(own.table + position // own.interval).to(tl.int64) * own.stride
