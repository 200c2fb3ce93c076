"""The recurrent states of requests in the cache, for kernels of layers that have one.

The states lie in blocks that stand for `interval` tokens of a request: a token reads the state in
the block of the token before it, and a program leaves the state behind the last token of each block
in it. The grids of these kernels depend on the padded sizes of the step alone; a padded request has
no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@triton.jit
def is_kept(position, token, count, interval):
    """Whether the state behind a token is kept: behind the last one of its request in the step, and
    behind the last one of a block."""
    return ((position + 1) % interval == 0) | (token == count - 1)


@triton.jit
def state_block(table_ptr, position, interval):
    """The block with the state behind a position."""
    return tl.load(table_ptr + position // interval).to(tl.int64)
