"""Kernels of disentangled attention (He et al., "DeBERTa", 2021): what is added to the score of
each key, from products of queries and keys with projections of embeddings of their distance.

All numbers are float32. What is added to a token's scores depends on its own text alone.
"""

from __future__ import annotations

import numpy as np

from shmllm_kernels.cpu.kernel_program import Kernel
from shmllm_kernels.cpu.language import compiled, compiled_with
from shmllm_kernels.cpu.memory import float_of_word, floats, put_word, short_words, word
from shmllm_kernels.cpu.rows import count_pieces, rows_of_piece


@compiled
def _one_piece(operands, piece, thread, num_threads):
    return 1


@compiled
def _count(operands, piece, thread, num_threads):
    num_requests, lengths, counts = word(word(operands, 0), 0), word(operands, 1), word(operands, 2)
    longest = 1
    for request in range(num_requests):
        longest = max(longest, word(lengths, request))
    put_word(word(operands, 3), 0, word(counts, longest - 1))


COUNT_ROWS = Kernel(_one_piece, _count)
"""How many embeddings the texts of a step have.

Operands: the addresses of the number of requests, of their lengths int64, of the numbers of
embeddings of texts of one token, two, and so on, int64, and of the result, an int64.
"""


@compiled_with("reassoc", "contract")
def _product(first, second, width):
    a, b = floats(first), floats(second)
    total = np.float32(0.0)
    for i in range(width):
        total += a[i] * b[i]
    return total


@compiled
def _relate(operands, piece, thread, num_threads):
    qkv, stride, num_heads, head_dim = (
        word(operands, 1), word(operands, 2), word(operands, 3), word(operands, 4),
    )  # fmt: skip
    to_keys, to_queries, row_stride = word(operands, 5), word(operands, 6), word(operands, 7)
    rows = short_words(word(operands, 8))
    positions, ends = word(operands, 9), word(operands, 10)
    out, width, scale = word(operands, 11), word(operands, 12), float_of_word(word(operands, 13))
    begin, end = rows_of_piece(operands, piece, num_threads)
    for token in range(begin, end):
        position, count = word(positions, token), word(ends, token)
        first_key = qkv + (token - position) * stride + 4 * num_heads * head_dim
        for head in range(num_heads):
            column = 4 * head * head_dim
            query, key = qkv + token * stride + column, first_key + column
            sums = floats(out + 4 * (token * num_heads + head) * width)
            for other in range(count):
                row = column + np.int64(rows[position - other]) * row_stride
                total = np.float32(0.0)
                if to_keys != 0:
                    total += _product(query, to_keys + row, head_dim)
                if to_queries != 0:
                    total += _product(key + other * stride, to_queries + row, head_dim)
                sums[other] = scale * total


RELATE = Kernel(count_pieces, _relate)
"""``out[token, head, key] = scale * (query[token, head] . to_keys[row, head] + key[key, head] .
to_queries[row, head])`` for all keys of the token's text, with the row of their distance.

Operands (addresses, if not marked as numbers; strides in bytes):

    0  the address of the number of tokens
    1  qkv: rows [num_heads * head_dim] of queries and, behind them, as many of keys
    2  the stride of qkv, 3 num_heads, and 4 head_dim (numbers)
    5  to_keys and 6 to_queries: rows [num_heads * head_dim], or 0: that product is left out
    7  the stride of both (a number)
    8  rows: int32, that of each distance of a token from a key; the address is that of distance 0
    9  positions and 10 ends: int64 [tokens], a token's place in its text, and the text's length
    11 out: [tokens, num_heads, width], 12 width, at least as many as a text's tokens (a number)
    13 scale (a number from `word_of_float`)
"""
