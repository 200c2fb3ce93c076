"""A shared expert, which every token goes to, within the launches of the other experts.

Its matrices are as wide as those of some experts together. So it is taken as so many parts, each as
wide as an expert: the part of an inner dimension with the rows of gate and up, and the columns of
down, that belong to it. The weights stay where they are. Each launch of few tokens has programs for
the parts beside those for the chosen experts, and a part's result is rounded and added as that of
an expert, behind all of them. docs/kernels.md, "A shared expert", has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.packings import RUN, Rows
from shmllm_kernels.gpu.products import check_rows, memory_of, strides_of

MOST_PARTS = 16
"""The most parts, for each of which `combine` has its own instructions."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The weights of a shared expert.

    Attributes:
        gate_up: [2 * parts * inner, hidden], gate before up, or up alone [parts * inner, hidden];
            contiguous, or packed.
        down: [hidden, parts * inner], likewise.
        parts: the number of experts that are as wide.
    """

    gate_up: Rows
    down: Rows
    parts: int


class SharedRows(NamedTuple):
    """What kernels read of a matrix of a shared expert: pointers, the elements from one row to the
    next, those from one part of a row to the next, and the number of tokens that it multiplies
    with."""

    weight: Any
    parameters: Any
    stride: Any
    parameters_stride: Any
    part_stride: Any
    parameters_part_stride: Any
    num_tokens: Any


def joined(gate_up: Rows, down: Rows, of_experts: tuple[Rows, Rows]) -> SharedExpert | None:
    """Returns a shared expert that the launches of other experts can compute, or None.

    Args:
        gate_up: [2 * width, hidden], or [width, hidden], of the shared expert.
        down: [hidden, width], of the shared expert.
        of_experts: gate and up, and down, of the others: [experts, ...] of them.
    """
    inner = of_experts[1].shape[-1]
    parts, rest = divmod(down.shape[-1], inner)
    rows = parts * of_experts[0].shape[-2]
    if rest or not 1 <= parts <= MOST_PARTS or gate_up.shape[-2] != rows:
        return None
    if _format(gate_up) != _format(of_experts[0]) or _format(down) != _format(of_experts[1]):
        return None
    if not isinstance(down, Tensor) and parts > 1 and inner % RUN:
        return None  # a part would begin within a run
    return SharedExpert(gate_up, down, parts)


def _format(weight: Rows) -> object:
    return weight.dtype if isinstance(weight, Tensor) else weight.packing


def rows_of_gate_and_up(shared: SharedExpert | None, num_tokens: int) -> SharedRows | None:
    """Returns what kernels read of gate and up; None: there is no shared expert."""
    if shared is None:
        return None
    check_rows(shared.gate_up)
    return SharedRows(*memory_of(shared.gate_up), *strides_of(shared.gate_up), 0, 0, num_tokens)


def rows_of_down(shared: SharedExpert | None, num_tokens: int) -> SharedRows | None:
    """Returns what kernels read of down; None: there is no shared expert."""
    if shared is None:
        return None
    check_rows(shared.down)
    strides = strides_of(shared.down)
    # If a row has one parameter, that is 0: all parts have it.
    step, parameters_step = (stride // shared.parts for stride in strides)
    return SharedRows(*memory_of(shared.down), *strides, step, parameters_step, num_tokens)


def parts_of(shared: SharedExpert | None) -> int:
    """Returns the number of parts, or 0."""
    return 0 if shared is None else shared.parts


@triton.jit
def choice_of_part(choice, first_row, n, weight_ptr, parameters_ptr, shared, CHOICES: tl.constexpr):
    """Returns the pointers to gate and up that a program of one token multiplies with, its first
    row, int64, and the rows from a column's gate to its up: those that are given, or, for the
    choices behind the experts, of a part."""
    between = n
    if shared is not None:
        part = choice - CHOICES
        is_part = part >= 0
        first_row = tl.where(is_part, part.to(tl.int64) * n, first_row)
        between = tl.where(is_part, (tl.num_programs(1) - CHOICES) * n, n)
        weight_ptr = tl.where(is_part, shared.weight, weight_ptr)
        parameters_ptr = tl.where(is_part, shared.parameters, parameters_ptr)
    return weight_ptr, parameters_ptr, first_row, between


@triton.jit
def block_of_part(
    is_part, part, tokens, rows, is_row, num_tokens, BLOCK_M: tl.constexpr, TOP_K: tl.constexpr
):
    """Returns [BLOCK_M] the tokens of a program, the places of their results, behind those of the
    sorted pairs, and which there are: of a part all tokens, else those that are given."""
    own = tl.arange(0, BLOCK_M)
    tokens = tl.where(is_part, own, tokens)
    rows = tl.where(is_part, (TOP_K + part) * num_tokens + own, rows)
    return tokens, rows, tl.where(is_part, own < num_tokens, is_row)


@triton.jit
def matrix_of_part(is_part, part, weight_ptr, parameters_ptr, stride, parameters_stride, shared):
    """Returns the pointers and strides of the matrix that a program multiplies with: of a part of
    the shared expert, or those that are given."""
    weight = shared.weight + part * shared.part_stride
    parameters = shared.parameters + part * shared.parameters_part_stride
    return (
        tl.where(is_part, weight, weight_ptr),
        tl.where(is_part, parameters, parameters_ptr),
        tl.where(is_part, shared.stride, stride),
        tl.where(is_part, shared.parameters_stride, parameters_stride),
    )
