"""Products whose rows do not depend on the batch, bit for bit.

Owns which numbers of rows this machine multiplies alike, by a matrix's shape, and finds out with
numbers whose exact product is zero: what comes out is rounding alone, so that another order of
additions cannot hide, not even behind bfloat16's eight bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.products import MakeProduct, Product
from shmllm.models.row_tiles import MARGIN, REFERENCES, ROW_COUNTS, RowTiles, find_row_counts

LARGEST_COPY_BYTES = 2**26
"""A larger matrix is tried as it is: its millions of sums show any other order, too."""

MOST_MULTIPLICATIONS = 5 * 10**10
"""For one shape: bounds the time of the search, about a second on two cores."""

SPREAD = 10
PATTERN_COLUMNS = 512


def uneven(generator: torch.Generator, *shape: int) -> Tensor:
    """Random float32 numbers of very different sizes, so that no sum of them is exact."""
    exponents = torch.randint(-SPREAD // 2, SPREAD // 2 + 1, shape, generator=generator)
    return torch.randn(*shape, generator=generator) * 2.0**exponents


def cancelling_factors(
    num_rows: int, width: int, columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[rows, width] and [width, columns] whose exact product is zero."""
    generator = torch.Generator().manual_seed(1)
    half = width // 2
    left = uneven(generator, num_rows, half).to(dtype)
    right = uneven(generator, half, columns).to(dtype)
    order = torch.randperm(2 * half, generator=generator)
    rows = torch.zeros(num_rows, width, dtype=dtype)
    matrix = torch.zeros(width, columns, dtype=dtype)
    rows[:, : 2 * half] = torch.cat([left, left], 1)[:, order]
    matrix[: 2 * half] = torch.cat([right, -right])[order]
    return rows, matrix


class TiledProduct:
    """A product that is called with proven numbers of rows alone.

    Args:
        weight: [in, out].
        products: knows what was proven, and which kinds there are.
    """

    def __init__(self, weight: Tensor, products: TiledProducts) -> None:
        self._weight = weight
        self._products = products
        self._kind = 0
        self._product = products.kinds[0](weight)
        self._tiles = RowTiles(self._product, ())

    @property
    def derived_bytes(self) -> int:
        return self._product.derived_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._tiles(x)

    def derive(self) -> None:
        self._product.derive()
        while not (counts := self._products.row_counts(self._kind, self._product, self._weight)):
            self._kind += 1
            if self._kind == len(self._products.kinds):
                raise EngineStartError(
                    f"deterministic=True cannot be held on this machine: torch multiplies "
                    f"{tuple(self._weight.shape)} matrices of {self._weight.dtype} with bits "
                    f"that depend on a row's place"
                )
            self._product = self._products.kinds[self._kind](self._weight)
            self._product.derive()
        self._tiles = RowTiles(self._product, counts)

    def drop(self) -> None:
        self._product.drop()


class TiledProducts:
    """Makes the products of a model; shapes that several matrices share are tried once.

    Args:
        kinds: of products, the preferred one first. The next one takes its place for a shape
            with which it does not hold.
    """

    def __init__(self, kinds: Sequence[MakeProduct]) -> None:
        self.kinds = tuple(kinds)
        self._found: dict[tuple[object, ...], tuple[int, ...]] = {}

    def __call__(self, weight: Tensor) -> TiledProduct:
        return TiledProduct(weight, self)

    def row_counts(self, kind: int, product: Product, weight: Tensor) -> tuple[int, ...]:
        """With how many rows this kind of product, derived, gives a row the same bits."""
        is_packed = product.derived_bytes > 0
        key = (kind, is_packed, weight.shape, weight.stride(), weight.dtype)
        if key not in self._found:
            self._found[key] = self._search(kind, product, weight)
        return self._found[key]

    def _search(self, kind: int, product: Product, weight: Tensor) -> tuple[int, ...]:
        width, columns = weight.shape
        num_rows = _largest_count(weight.numel()) + MARGIN
        pattern_columns = min(columns, PATTERN_COLUMNS)
        rows, pattern = cancelling_factors(num_rows, width, pattern_columns, weight.dtype)
        if weight.nbytes <= LARGEST_COPY_BYTES:
            matrix = torch.empty_like(weight)
            matrix.copy_(pattern[:, torch.arange(columns) % pattern_columns])
            tried = self.kinds[kind](matrix)
            tried.derive()
            if tried.derived_bytes != product.derived_bytes:  # multiplies in another way
                return ()
            product = tried
        return find_row_counts(product, rows)


def _largest_count(weight_elements: int) -> int:
    """The largest number of rows to try: what that and all below it cost is bounded."""
    total, largest = 0, REFERENCES[0]
    for count in ROW_COUNTS:
        total += 3 * count
        if (total + count + MARGIN) * weight_elements <= MOST_MULTIPLICATIONS:
            largest = max(largest, count)
    return largest
