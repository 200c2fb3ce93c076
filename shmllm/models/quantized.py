"""Weights as 8-bit integers, for decoding that waits for memory.

Owns what is derived from a matrix for that: integers with a scale for each output channel, which
few rows are multiplied with as they are, and their values in bfloat16, packed, for more rows,
where reading weights is not what takes the time. Both mean the same matrix. Activations are
rounded to bfloat16. Must not know which matrices a model has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.products import Product, fastest_product

INTEGER_ROWS = 2
"""Up to here the integers are faster than the pack: 43 us against 51 for 576 x 3,072 and one row,
58 against 52 for two in the cache, and they are half the bytes; 90 against 54 for four."""

LARGEST = 127

KERNEL_WIDTH = 16
"""torch's kernel reads beyond rows of integers that are no multiple of this, and crashes."""


class Int8Product:
    """``x @ weight`` with the weight rounded to 8 bits per channel.

    Holds three bytes per element besides the weight, which stays where it is: updates are
    written there and quantized by ``derive``.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._integer_rows = 0 if weight.shape[0] % KERNEL_WIDTH else INTEGER_ROWS
        self._integers: Tensor | None = None
        self._scales: Tensor | None = None
        self._many_rows: Product | None = None

    @property
    def derived_bytes(self) -> int:
        integers = 0 if self._integers is None else self._integers.nbytes
        many_rows = 0 if self._many_rows is None else self._many_rows.derived_bytes
        return integers + many_rows

    def __call__(self, x: Tensor) -> Tensor:
        narrow = x.to(torch.bfloat16)
        product = self._few_rows if x.shape[0] <= self._integer_rows else self._many_rows
        assert product is not None
        return product(narrow).to(x.dtype)

    def derive(self) -> None:
        self.drop()
        integers, scales = quantize(self._weight.t())
        rounded = (integers * scales[:, None]).to(torch.bfloat16)
        product = fastest_product(rounded.t())
        product.derive()
        if self._integer_rows:
            self._integers, self._scales = integers, scales.to(torch.bfloat16)
        self._many_rows = product

    def drop(self) -> None:
        self._integers = self._scales = self._many_rows = None

    def _few_rows(self, x: Tensor) -> Tensor:
        assert self._integers is not None
        assert self._scales is not None
        return torch._weight_int8pack_mm(x, self._integers, self._scales)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 of that shape and [out] float32 scales that bfloat16 can hold, so that
    both ways of multiplying mean the same numbers."""
    largest = weight.abs().amax(1).float().clamp_min(torch.finfo(torch.float32).tiny)
    scales = (largest / LARGEST).to(torch.bfloat16).float()
    integers = (weight.float() / scales[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return integers.to(torch.int8).contiguous(), scales
