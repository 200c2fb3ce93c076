"""What changes logits before they are drawn from: how often tokens were used, and biases.

Owns the table of uses: one int32 for each row and vocabulary entry, twice the times that the
row's output has the token, and 1 more if its prompt has it. It stays on the device, where the
tokens are sampled, and is kept only where a request has penalties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _count(
    uses_ptr,
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
        tl.atomic_or(uses_ptr + row * stride + token, 1, mask=is_use)
    else:
        tl.atomic_add(uses_ptr + row * stride + token, 2, mask=is_use)


@triton.jit(do_not_specialize=["count"])
def _add(logits_ptr, rows_ptr, tokens_ptr, values_ptr, count, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = tl.load(rows_ptr + index, mask=inside, other=-1).to(tl.int64)
    token = tl.load(tokens_ptr + index, mask=inside, other=0).to(tl.int64)
    value = tl.load(values_ptr + index, mask=inside, other=0.0)
    tl.atomic_add(logits_ptr + row * stride + token, value, mask=row >= 0)


def count_tokens(uses: Tensor, rows: Tensor, tokens: Tensor, is_prompt: bool = False) -> None:
    """Takes tokens into the table. A row's part has to be zeroed when a request enters it.

    Args:
        uses: [rows, vocab] int32, rows contiguous.
        rows: [count] int32, the row of each token; -1 for none.
        tokens: [count] int64; what is not in the vocabulary does not count.
        is_prompt: they are the prompt's, else the output's.

    Reads 12 bytes a token and changes 4.
    """
    assert uses.dtype is torch.int32, "uses are int32"
    assert rows.dtype is torch.int32, "rows are int32"
    assert tokens.dtype is torch.int64, "tokens are int64"
    assert rows.shape == tokens.shape, "one row for each token"
    assert uses.stride(1) == 1, "rows of uses must be contiguous"
    count = rows.shape[0]
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        sizes = count, uses.shape[1], uses.stride(0)
        _count[grid](uses, rows, tokens, *sizes, IS_PROMPT=is_prompt, BLOCK=BLOCK)


def add_biases(logits: Tensor, rows: Tensor, tokens: Tensor, biases: Tensor) -> None:
    """Adds to single entries of the logits; minus infinity forbids a token.

    Args:
        logits: [N, vocab] float32, rows contiguous; changed in place.
        rows: [count] int32, which row of the logits; -1 for none.
        tokens: [count] int64, in the vocabulary.
        biases: [count] float32.

    Reads 16 bytes a bias and changes 4.
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
