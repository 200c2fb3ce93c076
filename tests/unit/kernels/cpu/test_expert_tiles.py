"""Experts by tile instructions: the bits of a product of each expert alone, emulated and by AMX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.emulated_tiles import (
    EMULATED_DOWN,
    EMULATED_EXPERTS,
    EMULATED_GATE_AND_UP,
    EMULATED_MULTIPLY,
)
from torch import Tensor

from shmllm_kernels.cpu import KernelProgram, expert_tiles, gated_tiles, matrix_tiles
from shmllm_kernels.cpu.expert_tiles import ROUND_PAIRS, num_rounded_rows
from shmllm_kernels.cpu.tile_rounding import row_bytes
from tests.support.moe_helpers import MoERun
from tests.unit.kernels.cpu.test_experts import random_routing
from tests.unit.kernels.cpu.test_gated_tiles import X_KIND, gate_and_up
from tests.unit.kernels.cpu.test_matrix_tiles import NEEDS_AMX

EMULATED = EMULATED_EXPERTS, EMULATED_DOWN, EMULATED_GATE_AND_UP, EMULATED_MULTIPLY
AMX = (
    expert_tiles.GATE_AND_UP, expert_tiles.DOWN, gated_tiles.GATE_AND_UP, matrix_tiles.MULTIPLY,
)  # fmt: skip
GATED, DOWN = (X_KIND, "bfloat16", "silu"), (X_KIND, "bfloat16", "bfloat16")


def of_pairs(
    tables: tuple[Any, ...], run: MoERun, x: Tensor, gate_up: Tensor, down: Tensor,
    bias: Tensor | None, num_threads: int,
) -> Tensor:  # fmt: skip
    """The outputs of all sorted pairs, [pairs, hidden]."""
    (num_tokens, hidden), inner = x.shape, down.shape[2]
    pairs, blocks = num_tokens * run.top_k, torch.tensor(run.blocks).view(-1, 3)
    count = np.array([len(blocks)])
    rows = num_rounded_rows(pairs, len(blocks))
    source, activated = (
        torch.full((rows * row_bytes(width, "bfloat16"),), 0xFF, dtype=torch.uint8)
        for width in (hidden, inner)
    )
    out = torch.full((pairs + 1, hidden), torch.nan)
    chunks = [count.ctypes.data, blocks.data_ptr()]
    rounded, inside = ([each.data_ptr(), row_bytes(width, "bfloat16")] for each, width in
                       ((source, hidden), (activated, inner)))  # fmt: skip
    listed = [x.data_ptr(), 4 * hidden, run.tokens.data_ptr(), rounded[0], hidden, rounded[1]]
    program = KernelProgram(num_threads)
    program.record(ROUND_PAIRS, [*chunks, *listed])
    weights = [gate_up.data_ptr(), inner, hidden, 0]
    program.record(tables[0][GATED], [*chunks, *rounded, *inside, *weights])
    weights = [down.data_ptr(), hidden, inner, 0, 0 if bias is None else bias.data_ptr()]
    program.record(tables[1][DOWN], [*chunks, *inside, out.data_ptr(), 4 * hidden, *weights])
    program.replay()
    assert out[pairs:].isnan().all(), "wrote after the last pair"
    return out[:pairs]


def one_pair(
    tables: tuple[Any, ...], x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None
) -> Tensor:
    """The output of one expert for one token, [1, hidden], by products of their own."""
    hidden, inner = down.shape
    activated = gate_and_up(tables[2][GATED], x, gate_up, inner, 0, 1)
    out, count = torch.empty(1, hidden), np.array([1])
    program = KernelProgram(1)
    operands = [activated, row_bytes(inner, "bfloat16"), out, 4 * hidden, down, hidden, inner, 0]
    numbers = [each.data_ptr() if isinstance(each, Tensor) else each for each in operands]
    bias_at = 0 if bias is None else bias.data_ptr()
    program.record(tables[3][DOWN], [count.ctypes.data, *numbers, bias_at])
    program.replay()
    return out


def assert_same(tables: tuple[Any, ...], num_tokens: int, num_experts: int, has_bias: bool) -> None:
    hidden, inner, top_k = 70, 64, 2
    run = MoERun(num_experts, top_k, num_tokens)
    run.route_to(*random_routing(num_tokens, num_experts, top_k))
    run.sort()
    x = torch.randn(num_tokens, hidden)
    gate_up = torch.randn(num_experts, 2 * inner, hidden).bfloat16()
    down = torch.randn(num_experts, hidden, inner).bfloat16()
    bias = torch.randn(num_experts, hidden).bfloat16() if has_bias else None
    found = of_pairs(tables, run, x, gate_up, down, bias, 1)
    assert torch.equal(of_pairs(tables, run, x, gate_up, down, bias, 2), found)
    draw = np.random.default_rng(0)
    for expert, first, count in run.blocks:
        for pair in draw.choice(range(first, first + count), min(count, 3), replace=False):
            token = int(run.tokens[pair])
            own = None if bias is None else bias[expert]
            alone = one_pair(tables, x[token : token + 1], gate_up[expert], down[expert], own)
            assert torch.equal(found[pair : pair + 1], alone)


SIZES = [(1, 4), (9, 4), (40, 3), (200, 2)]


@pytest.mark.parametrize(("num_tokens", "num_experts"), SIZES)
def test_a_pair_has_the_bits_of_its_expert_alone(num_tokens: int, num_experts: int) -> None:
    assert_same(EMULATED, num_tokens, num_experts, has_bias=num_tokens == 9)


@NEEDS_AMX
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [*SIZES, (300, 2)])
def test_by_amx_too(num_tokens: int, num_experts: int, has_bias: bool) -> None:
    assert_same(AMX, num_tokens, num_experts, has_bias)
