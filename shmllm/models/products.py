"""How activations are multiplied with a weight matrix.

Owns the ways of doing it, and what each of them derives from the weights. Must not know which
layer a matrix belongs to, or when weights change: whoever changes them calls ``derive``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shmllm.models.row_tiles import RowTiles

PACKED_FOR_ROWS = 512
"""oneDNN lays a pack out for a number of rows. One made for 16 or more serves every other
number from 2 on as fast as one of its own; one made for a single row is slow for all others."""

PLAIN_ROW_ELEMENTS = 400_000
"""A float32 matrix below this size meets a single row without its pack: it stays in the cache,
where the call of the packed product costs more (10 us) than it gains."""

PACKED_ROW_COUNTS = (
    *range(1, 17),
    *range(24, 65, 8),
    *range(80, 129, 16),
    *range(160, 257, 32),
    *range(320, 513, 64),
    1024,
    2048,
)
"""oneDNN compiles code for every number of rows it meets, in some milliseconds, and keeps that
with its buffers, up to 5 MB: so it meets these numbers alone."""

PADDED_ROWS_LIMIT = 1.125

CHECKED_ROWS = 3
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class Product(Protocol):
    """``x @ weight`` for one matrix of the model.

    What it derives from the weight (a packed copy, say) lies outside the arenas, can be dropped
    while the engine sleeps, and is made again when the weight has changed.
    """

    @property
    def derived_bytes(self) -> int:
        """Memory that is held besides the weight."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] in x's dtype."""

    def derive(self) -> None:
        """Make anew what is derived from the weight as it is now."""

    def drop(self) -> None:
        """Give back the memory of what is derived; no call before the next ``derive``."""


MakeProduct = Callable[[Tensor], Product]
"""The product of a weight stored as [in, out], contiguous or the transpose of such."""


class PlainProduct:
    """torch's own product; derives nothing."""

    derived_bytes = 0

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self._weight)

    def derive(self) -> None:
        pass

    def drop(self) -> None:
        pass


class PackedProduct:
    """oneDNN's product with a weight that is packed once, on a CPU.

    Two to four times as fast as torch's own for 2 rows and more, and for a single one where the
    weight comes from memory (docs/benchmarks.md). A pack holds as many bytes as the weight.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._pack: Tensor | None = None
        self._can_pack: bool | None = None
        self._plain_rows = 1 if _is_small(weight.numel(), weight.dtype) else 0
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._tiles = RowTiles(self._multiply_pack, PACKED_ROW_COUNTS, PADDED_ROWS_LIMIT)

    @property
    def derived_bytes(self) -> int:
        return 0 if self._pack is None else self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self._pack is None or x.shape[0] <= self._plain_rows:
            return torch.mm(x, self._weight)
        return self._tiles(x)

    def _multiply_pack(self, x: Tensor) -> Tensor:
        out: Tensor = self._multiply(x, self._pack, None, "none", [], "")
        return out

    def derive(self) -> None:
        self._pack = None
        if self._can_pack is False:
            return
        pack = torch.ops.mkldnn._reorder_linear_weight(self._weight.t(), PACKED_FOR_ROWS)
        if self._can_pack is None:  # once: packing does not depend on the values
            self._can_pack = self._agrees(pack)
        self._pack = pack if self._can_pack else None

    def drop(self) -> None:
        self._pack = None

    def _agrees(self, pack: Tensor) -> bool:
        """Whether the pack, which is opaque, gives what torch's own product gives."""
        x = torch.ones(CHECKED_ROWS, self._weight.shape[0], dtype=self._weight.dtype)
        x[1:, ::2] = -0.5
        x[2:, ::3] = 2.0
        expected = torch.mm(x, self._weight).float()
        found = self._multiply(x, pack, None, "none", [], "").float()
        bound = CHECK_TOLERANCE[self._weight.dtype]
        scale = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
        return torch.allclose(found, expected, rtol=bound, atol=bound * scale, equal_nan=True)


def fastest_product(weight: Tensor) -> Product:
    """The fastest way of multiplying with `weight` on the CPU that this machine has."""
    return PackedProduct(weight) if _is_packable(weight.dtype) else PlainProduct(weight)


def only_packed(num_elements: int, dtype: torch.dtype) -> bool:
    """Whether the fastest product of such a matrix reads nothing but its pack."""
    return _is_packable(dtype) and not _is_small(num_elements, dtype)


def _is_packable(dtype: torch.dtype) -> bool:
    has_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    is_known = dtype is torch.float32 or (dtype is torch.bfloat16 and has_bfloat16)
    return bool(is_known and torch._C._has_mkldnn)


def _is_small(num_elements: int, dtype: torch.dtype) -> bool:
    return dtype is torch.float32 and num_elements < PLAIN_ROW_ELEMENTS
