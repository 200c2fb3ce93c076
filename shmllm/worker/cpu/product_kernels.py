"""The kernels of matrix products on a CPU by what they multiply, and of the rounding before."""

from __future__ import annotations

from shmllm_kernels.cpu import (
    Kernel,
    group_products,
    group_rounding,
    matrix_tiles,
    norms,
    products,
    rounded_rows,
    rounding,
    rows,
    tile_rounding,
)
from shmllm_kernels.cpu.group_rounding import GROUPINGS
from shmllm_kernels.cpu.tile_rounding import BLOCK_ROWS, TILED, tiled

Kinds = tuple[str, str, str]
"""The dtype names of activations (or a name in GROUPINGS or TILED), weights and bias, by which
kernels are chosen."""


MULTIPLY = {**products.MULTIPLY, **group_products.MULTIPLY, **matrix_tiles.MULTIPLY}
ROUND = {**rounding.ROUND, **group_rounding.ROUND, **tile_rounding.ROUND}


ROUNDING: dict[tuple[Kernel, str], tuple[Kernel, int]] = {
    **{
        (norms.ADD_RMS_NORM[kind], x_kind): (joined, 4)
        for (kind, x_kind), joined in rounded_rows.ADD_RMS_NORM.items()
    },
    **{
        (rows.ACTIVATE[name, is_gated], x_kind): (joined, 2)
        for (name, is_gated, x_kind), joined in rounded_rows.ACTIVATE.items()
    },
}
"""By a kernel and the kind of activations, the kernel that does the same and rounds the result, and
which operand has its address."""


def row_bytes(k: int, kind: str) -> int:
    """Return the stride of rounded rows of k activations of a kind, the first of `Kinds`."""
    if kind in TILED:
        return tile_rounding.row_bytes(k, TILED[kind])
    owner = group_rounding if kind in GROUPINGS else rounding
    size: int = owner.row_bytes(k, kind)
    return size


def rounded_bytes(num_rows: int, k: int, activation_dtype: str) -> int:
    """Return the memory that rounded activations need in any layout, for rows of up to k."""
    layouts = [tiled(activation_dtype)]
    if activation_dtype == "int16":  # other weights get bfloat16
        layouts += ["bfloat16", tiled("bfloat16")]
    else:
        layouts.append(activation_dtype)
    layouts += [name for name, each in GROUPINGS.items() if each.dtype == activation_dtype]
    whole_rows = -(-num_rows // BLOCK_ROWS) * BLOCK_ROWS
    return whole_rows * max(row_bytes(k, kind) for kind in layouts)
