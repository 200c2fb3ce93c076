"""Counts the tokens of each row for penalties, and adds biases to logits.

The table of token counts has one int32 for each row and vocabulary entry: twice the number of the
token's occurrences in the row's output, plus 1 if its prompt contains it. The table stays on the
device, which samples the tokens, and is needed only for requests with penalties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _count(
    token_counts_ptr,
    rows_ptr,
    tokens_ptr,
    count,
    num_entries,
    stride,
    IS_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = tl.load(rows_ptr + index, mask=inside, other=-1).to(tl.int64)
    token = tl.load(tokens_ptr + index, mask=inside, other=-1).to(tl.int64)
    is_use = (row >= 0) & (token >= 0) & (token < num_entries)
    if IS_PROMPT:
        tl.atomic_or(token_counts_ptr + row * stride + token, 1, mask=is_use)
    else:
        tl.atomic_add(token_counts_ptr + row * stride + token, 2, mask=is_use)


@triton.jit(do_not_specialize=["count"])
def _add(logits_ptr, rows_ptr, tokens_ptr, values_ptr, count, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = tl.load(rows_ptr + index, mask=inside, other=-1).to(tl.int64)
    token = tl.load(tokens_ptr + index, mask=inside, other=0).to(tl.int64)
    value = tl.load(values_ptr + index, mask=inside, other=0.0)
    tl.atomic_add(logits_ptr + row * stride + token, value, mask=row >= 0)


def count_tokens(
    token_counts: Tensor, rows: Tensor, tokens: Tensor, is_prompt: bool = False
) -> None:
    """Adds tokens to the table. The caller zeroes a row of the table when a request gets the row.

    Args:
        token_counts: [rows, vocab] int32, rows contiguous.
        rows: [count] int32, the row of each token; -1: the token is skipped.
        tokens: [count] int64; tokens that are not in the vocabulary are skipped.
        is_prompt: whether the tokens are the prompt's; otherwise they are the output's.

    One launch. Reads 12 bytes for each token and changes 4, with an atomic addition: 2 us, the
    launch, for the tokens of 256 requests. The tokens of a prompt of 8,192 are 8,192 sectors of 32
    bytes, read and written, 0.5 MB: 3 us.
    """
    assert token_counts.dtype is torch.int32, "token_counts are int32"
    assert rows.dtype is torch.int32, "rows are int32"
    assert tokens.dtype is torch.int64, "tokens are int64"
    assert rows.shape == tokens.shape, "one row for each token"
    assert token_counts.stride(1) == 1, "rows of token_counts must be contiguous"
    count = rows.shape[0]
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        sizes = count, token_counts.shape[1], token_counts.stride(0)
        _count[grid](token_counts, rows, tokens, *sizes, IS_PROMPT=is_prompt, BLOCK=BLOCK)


def add_biases(logits: Tensor, rows: Tensor, tokens: Tensor, biases: Tensor) -> None:
    """Adds biases to single entries of the logits; minus infinity forbids a token.

    Args:
        logits: [N, vocab] float32, rows contiguous; changed in place.
        rows: [count] int32, the row of the logits of each bias; -1: the bias is skipped.
        tokens: [count] int64, all in the vocabulary.
        biases: [count] float32.

    One launch. Reads 16 bytes for each bias and changes 4, in a sector of 32 bytes of its own: 2
    us, the launch, for up to some ten thousand biases.
    """
    assert logits.dtype is torch.float32, "logits are float32"
    assert rows.dtype is torch.int32, "rows are int32"
    assert tokens.dtype is torch.int64, "tokens are int64"
    assert biases.dtype is torch.float32, "biases are float32"
    assert rows.shape == tokens.shape == biases.shape, "one row and one bias for each token"
    assert logits.stride(1) == 1, "rows of logits must be contiguous"
    count = rows.shape[0]
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        _add[grid](logits, rows, tokens, biases, count, logits.stride(0), BLOCK=BLOCK)
