"""Adds up what the experts of each token return, and adds the sum to the residual stream.

A token's result is the sum over its experts in ascending order, the shared one last. It does not
depend on the order of the pairs, nor on other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shmllm_kernels.gpu.configs import next_power_of_two, row_warps
from shmllm_kernels.gpu.functions import sigmoid
from shmllm_kernels.gpu.single_row_kernel import load_if

COLUMNS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sums over the experts of each token, in float32, and what becomes of them: ``sum(weights[
    token, i] * rows[token, i]) + sigmoid(gate) * shared``, added in this order.

    Attributes:
        out: [tokens, dim], each row contiguous; float32, float16 or bfloat16.
        weights: [tokens, top_k] float32 contiguous.
        shared: [tokens, dim], each row contiguous, out's dtype, the output of the shared expert;
            None: there is none, or its parts are rows beside those of the experts.
        gates: [tokens], any stride; None: the factor of the shared expert is 1.
        adds: whether ``scale`` times the sum, which is rounded before, is added to ``out``.
        scale: the factor of the sum then.
        skips: whether some pairs are left out, whose weights are 0 and whose rows are not read.
    """

    out: Tensor
    weights: Tensor
    shared: Tensor | None = None
    gates: Tensor | None = None
    adds: bool = False
    scale: float = 1.0
    skips: bool = False

    def check(self, top_k: int, dim: int) -> None:
        tokens = len(self.out)
        assert self.out.shape == (tokens, dim), "out: one row a token"
        assert self.weights.shape == (tokens, top_k), "weights: one for each pair"
        assert self.weights.is_contiguous(), "weights must be contiguous"
        assert self.out.stride(1) == 1, "rows must be contiguous"
        if self.shared is not None:
            assert self.shared.shape == self.out.shape, "shared: one row a token"
            assert self.shared.stride(1) == 1, "rows of shared must be contiguous"


@triton.jit
def gate_of(gates_ptr, place):
    """Returns the factor of a token's shared expert."""
    gate = 1.0
    if gates_ptr is not None:
        gate = sigmoid(tl.load(gates_ptr + place).to(tl.float32))
    return gate


@triton.jit
def load_addends(
    places, shared_ptr, gates_ptr, token, shared_stride, gates_stride, columns, inside,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Returns what is added to some columns of a token's sum: the weighted output of the shared
    expert, and the residual stream; float32, 0 for what there is not."""
    shared = 0.0
    if shared_ptr is not None:
        of_token = shared_ptr + token * shared_stride + columns
        shared = tl.load(of_token, mask=inside, other=0.0).to(tl.float32)
        shared *= gate_of(gates_ptr, token * gates_stride)
    return shared, load_if(ADDS, places, inside)


@triton.jit
def store_sum(places, total, shared, before, scale, inside, ADDS: tl.constexpr):
    """Stores some columns of a token's sum."""
    dtype = places.dtype.element_ty
    total += shared
    if ADDS:
        total = total.to(dtype).to(tl.float32) * scale + before
    tl.store(places, total.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _combine(
    out_ptr,
    rows_ptr,
    weights_ptr,
    shared_ptr,
    gates_ptr,
    out_stride,
    shared_stride,
    gates_stride,
    dim,
    scale,
    num_tokens,
    ADDS: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    SKIPS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    places = out_ptr + token * out_stride + columns
    shared, before = load_addends(
        places, shared_ptr, gates_ptr, token, shared_stride, gates_stride, columns, inside, ADDS
    )
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        weight = tl.load(weights_ptr + pair)
        is_read = inside
        if SKIPS:
            is_read = columns < tl.where(weight == 0.0, 0, dim)
        row = tl.load(rows_ptr + pair * dim + columns, mask=is_read, other=0.0)
        total += weight * row.to(tl.float32)
    if PARTS > 0:
        gate = gate_of(gates_ptr, token * gates_stride)
        for part in tl.static_range(PARTS):
            place = (TOP_K + part) * num_tokens + token
            row = tl.load(rows_ptr + place * dim + columns, mask=inside, other=0.0)
            total += gate * row.to(tl.float32)
    store_sum(places, total, shared, before, scale, inside, ADDS)


def combine(total: WeightedSum, rows: Tensor, is_dependent: bool = False, parts: int = 0) -> None:
    """Writes the sums over what each pair's expert returned.

    Args:
        total: the sums.
        rows: [tokens * (top_k + parts), dim] contiguous, the dtype of ``total.out``: those of
            [tokens, top_k] experts, and then those of [parts, tokens] of the shared one.
        is_dependent: whether the launch may begin before the launch before it has ended, from
            compute capability 9.0 on.
        parts: the number of parts of the shared expert among the rows.

    One launch a layer, which moves (top_k + 1) * tokens * dim elements, or (top_k + 2) with the
    residual stream: 36 KiB for a token with 8 experts and 2,048 columns. It takes 1.8 us for one
    token, 0.8 us until it begins, and two times 0.4 to 0.6 us for loads and stores; 110 us for
    8,192.
    """
    (num_rows, dim), (tokens, top_k) = rows.shape, total.weights.shape
    total.check(top_k, dim)
    assert num_rows == tokens * (top_k + parts), "a row for each pair, and for each part"
    assert not parts or total.shared is None, "the shared expert is computed once"
    assert rows.is_contiguous(), "rows must be contiguous"
    assert rows.dtype is total.out.dtype, "rows must have out's dtype"
    if tokens == 0:
        return
    block = min(next_power_of_two(dim), COLUMNS_AT_ONCE)
    shared, gates = total.shared, total.gates
    _combine[(tokens, triton.cdiv(dim, block))](
        total.out,
        rows,
        total.weights,
        shared,
        gates,
        total.out.stride(0),
        0 if shared is None else shared.stride(0),
        0 if gates is None else gates.stride(0),
        dim,
        total.scale,
        tokens,
        ADDS=total.adds,
        TOP_K=top_k,
        PARTS=parts,
        SKIPS=total.skips,
        IS_DEPENDENT=is_dependent,
        BLOCK=block,
        num_warps=row_warps(block),
        **({"launch_pdl": True} if is_dependent else {}),
    )
