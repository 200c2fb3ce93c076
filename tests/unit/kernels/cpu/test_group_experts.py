"""Packed experts with activations by groups: the bits of a loop over experts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.cpu_kernels import NEEDS_INT8, guarded, run_kernel
from support.packed_matrices import PackedMatrix, drawn_matrix
from support.variants import slow
from torch import Tensor

from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.experts import DOWN, GATE_AND_UP, RELU_SQUARED, SCRATCH_BYTES, SILU
from shmllm_kernels.cpu.group_products import X_KINDS
from shmllm_kernels.cpu.group_rounding import ROUND, row_bytes
from shmllm_kernels.cpu.pairs import BLOCK_WORDS, SORT, max_blocks
from shmllm_kernels.cpu.products import ROWS_AT_ONCE
from shmllm_kernels.cpu.rows import ACTIVATE
from tests.unit.kernels.cpu.test_experts import random_routing
from tests.unit.kernels.cpu.test_group_products import multiply_rounded

pytestmark = NEEDS_INT8
NUM_EXPERTS, TOP_K = 5, 2


class PackedExperts(NamedTuple):
    """The matrices of all experts, one below the other."""

    gate_up: PackedMatrix
    down: PackedMatrix
    activation: str
    dtype: str

    @classmethod
    def drawn(cls, hidden: int, inner: int, kinds: tuple[str, str], *rest: str) -> PackedExperts:
        activation, dtype = rest
        columns = inner if activation == RELU_SQUARED else 2 * inner
        gate_up = drawn_matrix(NUM_EXPERTS * columns, hidden, kinds[0])
        down = drawn_matrix(NUM_EXPERTS * hidden, inner, kinds[1])
        return cls(gate_up, down, activation, dtype)

    def x_kinds(self) -> tuple[str, str]:
        """The names of the activations of both products."""
        return X_KINDS[self.dtype, self.gate_up.kind], X_KINDS[self.dtype, self.down.kind]


def of_expert(matrix: PackedMatrix, expert: int) -> PackedMatrix:
    rows = len(matrix.integers) // NUM_EXPERTS
    own = slice(expert * rows, (expert + 1) * rows)
    return matrix._replace(integers=matrix.integers[own], scales=matrix.scales[own])


def computed(x: Tensor, experts: PackedExperts, ids: Tensor, num_threads: int) -> Tensor:
    """Returns the outputs of the pairs, [tokens, TOP_K, hidden]."""
    pairs, hidden, inner = ids.numel(), x.shape[1], experts.down.k
    counts, num_tokens = np.array([-1, -1]), np.array([len(x)])
    tokens, places = torch.full((pairs,), -1), torch.full_like(ids, -1)
    firsts = torch.full((NUM_EXPERTS,), -1)
    blocks = torch.full((max_blocks(len(x), TOP_K, NUM_EXPERTS), BLOCK_WORDS), -1)
    activated, out = torch.full((pairs, inner), torch.nan), torch.full((pairs, hidden), torch.nan)
    scratch = torch.full((num_threads, SCRATCH_BYTES // 4), torch.nan)
    kinds = experts.x_kinds()
    strides = row_bytes(hidden, kinds[0]), row_bytes(inner, kinds[1])
    rounded, inner_rounded = guarded(len(x) * strides[0]), guarded(pairs * strides[1])
    num_pairs = counts[1:]
    at = [counts.ctypes.data, blocks.data_ptr()]
    program = KernelProgram(num_threads)
    program.record(SORT, [
        num_tokens.ctypes.data, ids.data_ptr(), NUM_EXPERTS, TOP_K, firsts.data_ptr(),
        tokens.data_ptr(), places.data_ptr(), blocks.data_ptr(), counts.ctypes.data,
    ])  # fmt: skip
    program.record(ROUND[kinds[0]], [
        num_tokens.ctypes.data, x.data_ptr(), rounded.data_ptr(), hidden, strides[0],
    ])  # fmt: skip
    program.record(GATE_AND_UP[kinds[0], experts.gate_up.kind, "bfloat16", experts.activation], [
        *at, rounded.data_ptr(), strides[0], activated.data_ptr(), 4 * inner,
        experts.gate_up.integers.data_ptr(), inner, hidden, experts.gate_up.scales.data_ptr(), 0,
        tokens.data_ptr(), scratch.data_ptr(), 0,
    ])  # fmt: skip
    program.record(ROUND[kinds[1]], [
        num_pairs.ctypes.data, activated.data_ptr(), inner_rounded.data_ptr(), inner, strides[1],
    ])  # fmt: skip
    program.record(DOWN[kinds[1], experts.down.kind, "bfloat16"], [
        *at, inner_rounded.data_ptr(), strides[1], out.data_ptr(), 4 * hidden,
        experts.down.integers.data_ptr(), hidden, inner, experts.down.scales.data_ptr(), 0,
    ])  # fmt: skip
    program.replay()
    return out[places]


def looped(x: Tensor, experts: PackedExperts, ids: Tensor) -> Tensor:
    """The same by the kernels of a dense MLP, one expert after the other."""
    inner, out = experts.down.k, torch.full((*ids.shape, x.shape[1]), torch.nan)
    is_gated = experts.activation != RELU_SQUARED
    for expert in range(NUM_EXPERTS):
        chosen, choices = torch.nonzero(ids == expert, as_tuple=True)
        if len(chosen) == 0:
            continue
        gate_up = multiply_rounded(x[chosen], of_expert(experts.gate_up, expert), experts.dtype)
        activated = torch.empty(len(chosen), inner)
        kernel = ACTIVATE[experts.activation, is_gated]
        run_kernel(kernel, len(chosen), gate_up, activated, inner)
        down = of_expert(experts.down, expert)
        out[chosen, choices] = multiply_rounded(activated, down, experts.dtype)
    return out


@pytest.mark.parametrize(
    ("kinds", "activation", "dtype"),
    [
        (("q4_k", "q6_k"), SILU, "int16"),
        (("int4", "q8_0"), RELU_SQUARED, "int16"),
        slow(("q5_0", "q5_1"), SILU, "int8"),
    ],
)
def test_pairs_have_the_bits_of_a_loop_over_experts(
    kinds: tuple[str, str], activation: str, dtype: str
) -> None:
    """Includes experts without tokens, one row, more rows than a block has, and several parts of
    k."""
    for hidden, inner, num_tokens in ((256, 512, 1), (256, 256, 2 * ROWS_AT_ONCE), (1280, 256, 7)):
        experts = PackedExperts.drawn(hidden, inner, kinds, activation, dtype)
        x = torch.randn(num_tokens, hidden)
        ids, _ = random_routing(num_tokens, NUM_EXPERTS, TOP_K)
        expected = looped(x, experts, ids)
        for num_threads in (1, 2):
            assert torch.equal(computed(x, experts, ids, num_threads), expected)


def test_widths_that_are_no_whole_panels_or_runs() -> None:
    experts = PackedExperts.drawn(104, 40, ("q8_0", "int4"), SILU, "int16")
    x, (ids, _) = torch.randn(9, 104), random_routing(9, NUM_EXPERTS, TOP_K)
    assert torch.equal(computed(x, experts, ids, 2), looped(x, experts, ids))
