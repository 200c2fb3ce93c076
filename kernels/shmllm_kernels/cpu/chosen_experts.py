"""What follows the choice of experts: their weights, ids and numbers are changed or copied.

A token's results depend on that token alone.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import floats, number, put_narrow, put_word, word
from shmllm_kernels.cpu.norms import KINDS
from shmllm_kernels.cpu.pairs import pieces_of_tokens, tokens_of_piece


@compiled
def _scale_chosen(operands, piece, thread, num_threads, kind):
    top_k, ids, scales = word(operands, 1), word(operands, 2), word(operands, 4)
    weights = floats(word(operands, 3))
    begin, end = tokens_of_piece(operands, piece, num_threads)
    for pair in range(begin * top_k, end * top_k):
        weights[pair] *= number(scales, word(ids, pair), kind)


SCALE_CHOSEN = {kind: Kernel(pieces_of_tokens, _scale_chosen, kind) for kind in KINDS}
"""Kernels by the dtype name of the scales. ``weights *= scales[ids]``, in place.

Operands: address of the number of tokens; top_k; ids [tokens, top_k] int64; weights [tokens, top_k]
float32; scales [experts].
"""


@compiled
def _report(operands, piece, thread, num_threads, num_bytes):
    top_k, ids, out, stride = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    begin, end = tokens_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        for choice in range(top_k):
            put_narrow(out + token * stride, choice, word(ids, token * top_k + choice), num_bytes)


REPORT = {num_bytes: Kernel(pieces_of_tokens, _report, num_bytes) for num_bytes in (1, 2)}
"""Kernels by the size of a number in bytes. ``out[token] = ids[token]``, where the rows of ``out``
are parts of wider ones.

Operands: address of the number of tokens; top_k; ids [tokens, top_k] int64; address of out's first
element; the distance of out's rows, in bytes.
"""


@compiled
def _take_identities(operands, piece, thread, num_threads):
    top_k, num_experts, ids = word(operands, 1), word(operands, 2), word(operands, 3)
    weights, width = floats(word(operands, 4)), word(operands, 9)
    begin, end = tokens_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        total, expert = np.float32(0.0), np.int64(0)
        for pair in range(token * top_k, (token + 1) * top_k):
            if word(ids, pair) < num_experts:
                expert = word(ids, pair)
            else:
                total += weights[pair]
                weights[pair] = np.float32(0.0)
                put_word(ids, pair, expert)
        values = floats(word(operands, 5) + token * word(operands, 6))
        target = floats(word(operands, 7) + token * word(operands, 8))
        for i in range(width):
            target[i] = total * values[i]


TAKE_IDENTITIES = Kernel(pieces_of_tokens, _take_identities)
"""``out[token] = total * x[token]``, with the sum of the weights of a token's choices that are no
experts. These weights become 0, and their ids that of the token's last expert, or 0.

Operands: address of the number of tokens; top_k; the number of experts; ids [tokens, top_k] int64,
in ascending order; weights [tokens, top_k] float32; x [tokens, width] float32 and the distance of
its rows, in bytes; out, likewise; width.
"""


@compiled
def _leave_out(operands, piece, thread, num_threads):
    top_k, ids, tokens = word(operands, 1), word(operands, 2), word(operands, 3)
    listed, count, are_listed = word(operands, 4), word(operands, 5), word(operands, 6)
    begin, end = tokens_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        own = word(tokens, token)
        is_listed = np.int64(1) if own < 0 else np.int64(0)
        for index in range(count):
            if word(listed, index) == own:
                is_listed = np.int64(1)
        if is_listed != are_listed:
            for pair in range(token * top_k, (token + 1) * top_k):
                put_word(ids, pair, -1)


LEAVE_OUT = Kernel(pieces_of_tokens, _leave_out)
"""``ids[token] = -1`` of tokens of one of two kinds: those whose id is listed or negative, and the
others.

Operands: address of the number of tokens; top_k; ids [tokens, top_k] int64, experts; the id of each
token, [tokens] int64; the listed ids, int64; their number; 1 if the listed ones stay, 0 if the
others do.
"""
