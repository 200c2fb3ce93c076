"""Matrices as 8-bit integers, for decoding that waits for memory.

Owns a matrix's integers and the scale of each output channel, and the rounding. Must not know
which matrices a model has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

LARGEST = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
ELEMENTS_AT_ONCE = 2**18
"""What is rounded at a time, about: its temporaries are a few times 1 MiB."""


class Int8Matrix:
    """Rows of a matrix, rounded to 8 bits each by its own scale. There is no other copy.

    It is written and read like a tensor of `dtype`, by `copy_` and `clone`, and is none.
    Writing what was read changes nothing, to the last bit.

    Args:
        integers: [out, in] int8.
        scales: [out] float32; ``integers * scales`` is what the matrix was rounded to.
        dtype: of the matrix that it stands for.
    """

    def __init__(self, integers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.integers = integers
        self.scales = scales
        self.dtype = dtype

    @classmethod
    def make(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> Int8Matrix:
        """One that is not set. Takes a byte per element and four per output channel."""
        return cls(allocate(shape, torch.int8), allocate(shape[:1], torch.float32), dtype)

    @property
    def shape(self) -> torch.Size:
        return self.integers.shape

    @property
    def device(self) -> torch.device:
        return self.integers.device

    def numel(self) -> int:
        return self.integers.numel()

    def split_with_sizes(self, sizes: Sequence[int]) -> tuple[Int8Matrix, ...]:
        """Views of consecutive rows."""
        pairs = zip(
            self.integers.split_with_sizes(sizes),
            self.scales.split_with_sizes(sizes),
            strict=True,
        )
        return tuple(Int8Matrix(integers, scales, self.dtype) for integers, scales in pairs)

    @torch.no_grad()
    def copy_(self, values: Tensor, /) -> Int8Matrix:
        """Round other values, [out, in], into the same memory."""
        if values.shape != self.shape:
            raise ValueError(f"cannot write {list(values.shape)} to {list(self.shape)}")
        num_rows = max(ELEMENTS_AT_ONCE // max(self.shape[1], 1), 1)
        with _one_thread():
            for begin in range(0, len(values), num_rows):
                rows = slice(begin, begin + num_rows)
                self._round(values[rows], self.integers[rows], self.scales[rows])
        return self

    @torch.no_grad()
    def clone(self) -> Tensor:
        """What is computed with, as a tensor of its own."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.mul(self.integers, self.scales[:, None], out=values)

    def _round(self, values: Tensor, integers: Tensor, scales: Tensor) -> None:
        # As the matrix's dtype has them, or what was read and is written would round elsewhere.
        wide = values.to(self.device, self.dtype).float()
        torch.amax(wide.abs(), 1, out=scales)
        scales.clamp_min_(SMALLEST_SCALE * LARGEST).div_(LARGEST)
        integers.copy_((wide / scales[:, None]).round_().clamp_(-LARGEST, LARGEST))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Each operation on a piece would wait for all threads: on two cores that others keep busy a
    hundredth of one thread's 7 GB/s was left, where quiet ones gave 10."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
