"""Packed weights on their way into tiles: a panel of columns, unpacked while they are multiplied.

A panel stays in the L1 cache. It has the columns of one or two tiles of weights, over a part of k;
of a longer part it has the runs that are multiplied next. The first rows of activations that pass
it have it filled, run by run: vector units unpack the next run while the tile unit multiplies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shmllm_kernels.cpu.codes import RUN
from shmllm_kernels.cpu.language import compiled
from shmllm_kernels.cpu.memory import itemsize
from shmllm_kernels.cpu.tile_instructions import LINE_BYTES
from shmllm_kernels.cpu.tile_rounding import digit
from shmllm_kernels.cpu.unpacking import (
    SCALES_BYTES,
    prefetch,
    row_bytes,
    run_scales_bytes,
    scale_bytes,
    unpack_run,
    widen_scales,
)

PART_BYTES = 8 * LINE_BYTES
"""The part of the rows of two tiles of weights that stays in the L1 cache while several blocks of
activations pass it, beside two of these."""

PANEL_STRIDE = PART_BYTES + LINE_BYTES
"""The bytes from one column of a panel to the next."""


class Stored(NamedTuple):
    """Columns of weights as they are stored, from the first element of a part of k on.

    address, ahead: the first column, and the first of those that are prefetched.
    stride: the bytes from one column to the next.
    scales: the parameters of packed ones as `widen_columns` writes them; others have none.
    kind: the dtype name, or how they are packed.
    """

    address: Any
    ahead: Any
    stride: Any
    scales: Any
    kind: str


@compiled
def place_in_panel(at):
    """Returns where a panel has a byte of the part."""
    return at % PART_BYTES


@compiled
def widen_columns(job, weights, column, following, begin, depth, out, num_w):
    """Converts the parameters of the columns of `num_w` tiles to float32, and prefetches others.

    Args:
        job: the `tile_products.Job`.
        weights: the `products.Weights`.
        column, following: the first column of the first tile, and of those that are prefetched.
        begin, depth: the first element, and how many; at most `unpacking.MAX_DEPTH`.
        out: memory for SCALES_BYTES of each column.
    """
    stride = scale_bytes(weights.k, weights.kind)
    first = weights.scale + column * stride + scale_bytes(begin, weights.kind)
    ahead = (following - column) * stride
    for tile in range(num_w):
        for i in range(job.columns):
            own, place = tile * max(job.apart, job.columns) + i, tile * job.columns + i
            prefetch(first + ahead + own * stride)
            widen_scales(first + own * stride, depth, out + place * SCALES_BYTES, weights.kind)


@compiled
def _unpack(job, stored, at, num_bytes, panel, num_w):
    """Unpacks the run of the columns of `num_w` tiles that begins at a byte of the part."""
    size, kind, apart = itemsize(digit(job.kind)), stored.kind, max(job.apart, job.columns)
    element = at // size
    codes, scales = row_bytes(element, kind), element // RUN * run_scales_bytes(kind)
    for tile in range(num_w):
        first = codes + tile * apart * stored.stride
        unpack_run(
            stored.address + first, stored.ahead + first, stored.stride,
            stored.scales + scales + tile * job.columns * SCALES_BYTES, job.columns,
            (num_bytes - at) // size, panel + tile * job.second + place_in_panel(at), PANEL_STRIDE,
            kind, job.kind,
        )  # fmt: skip


@compiled
def unpack_ahead(job, stored, at, num_bytes, panel, num_w):
    """Before the first products with a run, unpacks the next one; the first run just before.

    Args:
        job: the `tile_products.Job`.
        stored: the packed columns, `Stored`.
        at, num_bytes: the byte of the part at which products are; the size of the part.
        panel: the panel.
        num_w: the number of tiles.
    """
    run_bytes = RUN * itemsize(digit(job.kind))
    if at == 0:
        _unpack(job, stored, 0, num_bytes, panel, num_w)
    if (at % run_bytes == 0) & (at + run_bytes < num_bytes):
        _unpack(job, stored, at + run_bytes, num_bytes, panel, num_w)
