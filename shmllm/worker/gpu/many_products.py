"""Products of steps of many requests, where a kernel of ours is faster than torch.

The table of tiles says where that has been measured. This module must not know what the products
are for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.layers import Allocator
from shmllm_kernels.gpu.configs import device_key, has_dependent_launches, num_multiprocessors
from shmllm_kernels.gpu.many_rows import (
    LEAST_ROWS,
    MOST_ROWS,
    ManyRowsScratch,
    multiply_rows,
    takes,
)
from shmllm_kernels.gpu.row_configs import MANY_ROWS, ManyRowsConfig, many_rows_config
from shmllm_kernels.gpu.row_operands import Activation

LEAST_COLUMNS = 2048
"""Of matrices with fewer rows, such as those of routers, no product has been measured."""


def default_tiles(device: torch.device) -> list[ManyRowsConfig]:
    """Return the tile sizes that a device uses in place of torch. The kernel needs compute
    capability 9.0."""
    if not has_dependent_launches(device):
        return []
    return [tile for tile in MANY_ROWS.sizes(device_key(device)).values() if tile.is_default]


class ManyProducts:
    """Launches products of LEAST_ROWS to MOST_ROWS rows with matrices that are not packed.

    Args:
        device: the device.
        allocate: allocates the scratch memory, whose contents are 0 at first.
        is_possible: whether the model can have such launches at all.
    """

    def __init__(self, device: torch.device, allocate: Allocator, is_possible: bool) -> None:
        self._device = device
        self._processors = num_multiprocessors(device)
        tiles = default_tiles(device) if is_possible else []
        programs = max((tile.programs * self._processors for tile in tiles), default=0)
        elements = max((tile.elements for tile in tiles), default=0)
        self._scratch = ManyRowsScratch(
            allocate((programs, elements), torch.float32), allocate((programs,), torch.int32)
        )

    def are_for(self, num_rows: int) -> bool:
        """Return whether some products of so many rows are launched here."""
        return LEAST_ROWS <= num_rows <= MOST_ROWS and len(self._scratch.counters) > 0

    def take(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether a product of rows [rows, in] with a matrix [out, in] is launched here."""
        return (
            self.are_for(len(x))
            and len(weight) >= LEAST_COLUMNS
            and x.dtype is not torch.float32
            and bool(self._tile(weight).is_default)
            and takes(x, weight)
        )

    def multiply(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None = None,
    ) -> None:
        """Compute ``x @ weight.T + bias`` and the activation of it, of operands that `take` takes.

        Args:
            out: [rows, out], or [rows, out / 2] for a gated activation.
            x: [rows, in].
            weight: [out, in].
            bias: [out], or None.
            activation: the activation, or None.
        """
        tile = self._tile(weight)
        multiply_rows(
            out, x, weight, tile, self._scratch, self._processors, bias, activation,
            is_dependent=has_dependent_launches(self._device),
        )  # fmt: skip

    def _tile(self, weight: Tensor) -> ManyRowsConfig:
        return many_rows_config(len(weight), device_key(self._device))
