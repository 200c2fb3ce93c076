"""Matrices quantized to 8-bit integers, which speed up decoding that memory bandwidth limits.

This module owns a matrix's integers, the scale of each output channel, and the rounding. It must
not know which matrices a model has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

LARGEST = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
ELEMENTS_AT_ONCE = 2**18
"""About how many elements are rounded at a time, which needs temporaries of a few MiB."""


class Int8Matrix:
    """A matrix whose rows are rounded to 8 bits, each with its own scale.

    It has no unrounded copy. `copy_` writes it and `clone` reads it, as with a tensor of `dtype`,
    but it is not a tensor. Writing the values that `clone` returned changes no bit of it.

    Args:
        integers: [out, in] int8; or [..., out, in], several matrices.
        scales: [..., out] float32; ``integers * scales[..., None]`` are the rounded values.
        dtype: the dtype of the values that are written and read.
    """

    def __init__(self, integers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.integers = integers
        self.scales = scales
        self.dtype = dtype

    @classmethod
    def make(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> Int8Matrix:
        """Allocates a matrix whose values are not set: one byte for each element and four for
        each output channel."""
        return cls(allocate(shape, torch.int8), allocate(shape[:-1], torch.float32), dtype)

    @property
    def shape(self) -> torch.Size:
        return self.integers.shape

    @property
    def device(self) -> torch.device:
        return self.integers.device

    def numel(self) -> int:
        return self.integers.numel()

    def view(self, *shape: int) -> Int8Matrix:
        """Returns a view of another shape whose rows are the same."""
        return Int8Matrix(self.integers.view(shape), self.scales.view(shape[:-1]), self.dtype)

    def split_with_sizes(self, sizes: Sequence[int]) -> tuple[Int8Matrix, ...]:
        """Returns views of consecutive rows."""
        pairs = zip(
            self.integers.split_with_sizes(sizes),
            self.scales.split_with_sizes(sizes),
            strict=True,
        )
        return tuple(Int8Matrix(integers, scales, self.dtype) for integers, scales in pairs)

    @torch.no_grad()
    def copy_(self, values: Tensor, /) -> Int8Matrix:
        """Rounds ``values`` [..., out, in] into this matrix's memory."""
        if values.shape != self.shape:
            raise ValueError(f"cannot write {list(values.shape)} to {list(self.shape)}")
        width = self.shape[-1]
        source, integers, scales = (
            values.reshape(-1, width), self.integers.view(-1, width), self.scales.view(-1),
        )  # fmt: skip
        num_rows = max(ELEMENTS_AT_ONCE // max(width, 1), 1)
        with _one_thread():
            for begin in range(0, len(source), num_rows):
                rows = slice(begin, begin + num_rows)
                self._round(source[rows], integers[rows], scales[rows])
        return self

    @torch.no_grad()
    def clone(self) -> Tensor:
        """Returns the rounded values as a new [..., out, in] tensor of `dtype`."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.mul(self.integers, self.scales[..., None], out=values)

    def _round(self, values: Tensor, integers: Tensor, scales: Tensor) -> None:
        # Round to the matrix's dtype first: otherwise writing the values that `clone` returned
        # could give other integers.
        wide = values.to(self.device, self.dtype).float()
        torch.amax(wide.abs(), 1, out=scales)
        scales.clamp_min_(SMALLEST_SCALE * LARGEST).div_(LARGEST)
        integers.copy_((wide / scales[:, None]).round_().clamp_(-LARGEST, LARGEST))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread.

    With more threads each operation on a piece waits for all of them. On two cores that other
    processes kept busy, all threads together reached a hundredth of one thread's 7 GB/s; on idle
    cores they reached 10 GB/s.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
