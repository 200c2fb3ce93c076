"""Matrices quantized to integers, which take less memory and speed up what its bandwidth limits.

This module owns a matrix's integers, their scales, and the rounding. It must not know which
matrices a model has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

LARGEST = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
ROUNDED_AT_ONCE = 2**18
"""About how many elements a thread rounds at a time, which needs temporaries of a few MiB."""
MOVED_AT_ONCE = 2**20
"""About how many packed elements a thread writes at a time. Fewer make operations so short that
the threads wait for Python's lock."""

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


class QuantizedMatrix(ABC):
    """A matrix whose rows are rounded to integers of few bits, with scales.

    It has no unrounded copy. `copy_` writes it and `clone` reads it, as with a tensor of `dtype`,
    but it is not a tensor. Writing the values that `clone` returned changes no bit of it.

    Args:
        integers: [..., out, ...], the memory of each row's integers.
        scales: [..., out, ...], those of each row.
        width: the number of elements of a row.
        dtype: the dtype of the values that are written and read.
    """

    def __init__(self, integers: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> None:
        self.integers = integers
        self.scales = scales
        self.dtype = dtype
        self._width = width
        self._rank = integers.dim()

    @property
    @abstractmethod
    def kind(self) -> str:
        """The name of the format, by which kernels are chosen."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.integers.shape[:-1], self._width])

    @property
    def device(self) -> torch.device:
        return self.integers.device

    def numel(self) -> int:
        return self.shape.numel()

    @abstractmethod
    def of_parts(self, integers: Tensor, scales: Tensor) -> Self:
        """Returns a matrix like this one that has other memory."""

    def view(self, *shape: int) -> Self:
        """Returns a view of another shape whose rows are the same."""
        assert shape[-1] == self._width, "a view has the same rows"
        own = self.scales.shape[self._rank - 1 :]
        integers = self.integers.view(*shape[:-1], self.integers.shape[-1])
        return self.of_parts(integers, self.scales.view(*shape[:-1], *own))

    def split_with_sizes(self, sizes: Sequence[int]) -> tuple[Self, ...]:
        """Returns views of consecutive rows."""
        pairs = zip(
            self.integers.split_with_sizes(sizes),
            self.scales.split_with_sizes(sizes),
            strict=True,
        )
        return tuple(self.of_parts(integers, scales) for integers, scales in pairs)

    @torch.no_grad()
    def write(self, packed: Callable[[slice], tuple[Tensor, Tensor]]) -> None:
        """Writes rows that are packed already.

        Args:
            packed: returns the integers and the scales of some of the rows.
        """
        rows = self._rows()

        def write(some: slice) -> None:
            rows.integers[some], rows.scales[some] = packed(some)

        self._for_each_piece(write, MOVED_AT_ONCE)

    @torch.no_grad()
    def copy_(self, values: Tensor, /) -> Self:
        """Rounds ``values`` [..., out, in] into this matrix's memory."""
        if values.shape != self.shape:
            raise ValueError(f"cannot write {list(values.shape)} to {list(self.shape)}")
        rows, source = self._rows(), values.reshape(-1, self._width)

        def write(some: slice) -> None:
            # Round to the matrix's dtype first: otherwise writing the values that `clone`
            # returned could give other integers.
            wide = source[some].to(self.device, self.dtype).float()
            self._round(wide, rows.integers[some], rows.scales[some])

        self._for_each_piece(write, ROUNDED_AT_ONCE)
        return self

    @abstractmethod
    def columns_of(self, integers: Tensor, scales: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """Returns the part of wider packed rows that this matrix has room for, from a column on.

        Raises:
            EngineStartError: the format does not store columns so that they can be divided there.
        """

    def copy_columns(self, values: Tensor, columns: slice) -> None:
        """Rounds the rows of ``values``, which are wider than this matrix's, and writes these of
        their columns into its memory. Columns have to begin and end where groups do."""
        self.copy_(values[..., columns])

    @torch.no_grad()
    def clone(self) -> Tensor:
        """Returns the rounded values as a new [..., out, in] tensor of `dtype`."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        rows, values = self._rows(), out.view(-1, self._width)

        def read(some: slice) -> None:
            values[some] = self._values(rows.integers[some], rows.scales[some])

        self._for_each_piece(read, ROUNDED_AT_ONCE)
        return out

    def _rows(self) -> Self:
        return self.view(self.shape[:-1].numel(), self._width)

    def _for_each_piece(self, work: Callable[[slice], None], num_elements: int) -> None:
        """Calls `work` for pieces of the rows of about `num_elements`; on a CPU by as many threads
        as torch has.

        Each thread computes its pieces by itself. If all threads shared each operation on a piece,
        every operation would wait for all of them: on two cores that other processes kept busy,
        they reached a hundredth of one thread's 7 GB/s.
        """
        num_rows, size = self.shape[:-1].numel(), max(num_elements // max(self._width, 1), 1)
        pieces = [slice(at, min(at + size, num_rows)) for at in range(0, num_rows, size)]
        num_threads = min(torch.get_num_threads(), len(pieces))
        with one_thread():
            if num_threads < 2 or self.device.type != "cpu":
                for piece in pieces:
                    work(piece)
                return
            with ThreadPoolExecutor(num_threads) as threads:
                for _ in threads.map(torch.no_grad()(work), pieces):
                    pass

    @abstractmethod
    def _round(self, values: Tensor, integers: Tensor, scales: Tensor) -> None:
        """Rounds rows [rows, in] of float32."""

    @abstractmethod
    def _values(self, integers: Tensor, scales: Tensor) -> Tensor:
        """Returns the values of rows, [rows, in] float32."""


class Int8Matrix(QuantizedMatrix):
    """A matrix whose rows are rounded to 8 bits, each with its own scale.

    integers: [..., out, in] int8. scales: [..., out] float32; ``integers * scales[..., None]`` are
    the rounded values.
    """

    kind = "int8"

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocate) -> Self:
        """Allocates a matrix [..., out, in] whose values are not set."""
        scales = allocate(shape[:-1], torch.float32)
        return cls(allocate(shape, torch.int8), scales, shape[-1], dtype)

    def of_parts(self, integers: Tensor, scales: Tensor) -> Self:
        return type(self)(integers, scales, self._width, self.dtype)

    def columns_of(self, integers: Tensor, scales: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        return integers[..., begin : begin + self._width], scales

    def copy_columns(self, values: Tensor, columns: slice) -> None:
        if columns == slice(0, values.shape[-1]):
            self.copy_(values)
            return

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        wide = Int8Matrix.make(tuple(values.shape), self.dtype, allocate).copy_(values)
        self.integers.copy_(wide.integers[..., columns])
        self.scales.copy_(wide.scales)

    def _round(self, values: Tensor, integers: Tensor, scales: Tensor) -> None:
        torch.amax(values.abs(), 1, out=scales)
        scales.clamp_min_(SMALLEST_SCALE * LARGEST).div_(LARGEST)
        integers.copy_((values / scales[:, None]).round_().clamp_(-LARGEST, LARGEST))

    def _values(self, integers: Tensor, scales: Tensor) -> Tensor:
        return integers * scales[:, None]


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, in this thread and in those that begin meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
