"""GGUF's types whose elements are looked up together, in the order of packed matrices.

A block of the types IQ1 to IQ3 has indices into grids of 4 or 8 elements, each of which is one of
few magnitudes; TQ1_0 has five elements in a byte. Packed matrices have each element by itself, in 2
to 4 bits, and the factors of its group, so that no value changes. The `gguf` package looks up: it
computes the values of blocks whose scale is 1. This module must not know files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.codes import RUN
from shmllm.models.packed import PACKINGS

Array = np.ndarray[Any, np.dtype[Any]]
_ELEMENTS = 256
_ONE = np.float16(1).view(np.uint16)


def dequantize(blocks: Array, type_name: str) -> Array:
    """Returns the values of blocks [..., bytes] uint8, float32, by the `gguf` package.

    Raises:
        EngineStartError: it is not installed.
    """
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize as of_package
    except ModuleNotFoundError as error:
        raise EngineStartError(
            f"quantised GGUF files need a package that is missing ({error.name}): pip install gguf"
        ) from None
    return of_package(blocks, GGMLQuantizationType[type_name])


@dataclass(frozen=True, slots=True)
class Grid:
    """A type of blocks with a scale d and factors ``2 * s + 1``.

    Attributes:
        type_name: the name in llama.cpp.
        kind: one of `packed.PACKINGS`, which has the same values.
        factors: blocks [rows, blocks, bytes] -> s of each group.
        scale: blocks -> (d [rows, blocks] as uint16, the same blocks with a d of 1).
    """

    type_name: str
    kind: str
    factors: Callable[[Array], Array]
    scale: Callable[[Array], tuple[Array, Array]]

    def repack(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """See `gguf_blocks.Repack`."""
        stored = blocks.numpy()
        scale, ones = self.scale(stored)
        factors = 2 * self.factors(stored).astype(np.uint8) + 1
        values = dequantize(ones, self.type_name).reshape(*factors.shape, -1)
        numbers = torch.from_numpy(values / factors[..., None].astype(np.float32))
        integers = _stored(numbers.flatten(1), self.kind)
        scales = np.concatenate([scale[..., None].view(np.uint8), factors], 2)
        return integers, torch.from_numpy(scales).flatten(1)


def _stored(numbers: Tensor, kind: str) -> Tensor:
    codes = PACKINGS[kind].codes
    num_bytes = numbers.shape[1] // RUN * codes.run_bytes
    integers = torch.empty(len(numbers), num_bytes, dtype=torch.uint8)
    codes.store(numbers, integers)
    return integers


def _words(blocks: Array, begin: int, end: int, dtype: str) -> Array:
    return np.ascontiguousarray(blocks[..., begin:end]).view(dtype)


def _first_half(begin: int) -> Callable[[Array], tuple[Array, Array]]:
    def scale(blocks: Array) -> tuple[Array, Array]:
        ones = blocks.copy()
        ones[..., begin : begin + 2] = np.array([_ONE], "<u2").view(np.uint8)
        return _words(blocks, begin, begin + 2, "<u2")[..., 0], ones

    return scale


def _spread(blocks: Array) -> tuple[Array, Array]:
    """The last four words have four bits of d each, above all others."""
    words = _words(blocks, 48, 56, "<u2")
    shifts = np.arange(0, 16, 4, dtype=np.uint16)
    scale = np.bitwise_or.reduce(words >> 12 << shifts, -1)
    ones = blocks.copy()
    ones[..., 48:] = (words & 0x0FFF | _ONE >> shifts << 12).astype("<u2").view(np.uint8)
    return scale, ones


def _highest_of_words(begin: int, step: int) -> Callable[[Array], Array]:
    """The highest four bits of every `step`-th word of 32 bits."""
    return lambda blocks: _words(blocks, begin, blocks.shape[2], "<u4")[..., step - 1 :: step] >> 28


def _halves_of_bytes(begin: int) -> Callable[[Array], Array]:
    return lambda blocks: _fields(blocks[..., begin:], (0, 4), 15)


def _fields(words: Array, shifts: tuple[int, ...], mask: int) -> Array:
    fields: Array = words[..., None] >> np.array(shifts, words.dtype) & mask
    return fields.reshape(*words.shape[:2], -1)


def _of_iq1_s(blocks: Array) -> Array:
    return _fields(_words(blocks, 34, 50, "<u2"), (12,), 7)


def _of_iq1_m(blocks: Array) -> Array:
    return _fields(_words(blocks, 48, 56, "<u2"), (0, 3, 6, 9), 7)


def _twice(factors: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Groups of 32 as pairs of 16."""
    return lambda blocks: factors(blocks).repeat(2, -1)


GRIDS = {
    grid.type_name: grid
    for grid in (
        Grid("IQ2_XXS", "iq2", _twice(_highest_of_words(2, 2)), _first_half(0)),
        Grid("IQ2_XS", "iq2", _halves_of_bytes(66), _first_half(0)),
        Grid("IQ2_S", "iq2", _halves_of_bytes(74), _first_half(0)),
        Grid("IQ3_XXS", "iq3_xxs", _highest_of_words(66, 1), _first_half(0)),
        Grid("IQ3_S", "iq3_s", _halves_of_bytes(106), _first_half(0)),
        Grid("IQ1_S", "iq1", _twice(_of_iq1_s), _first_half(0)),
        Grid("IQ1_M", "iq1", _of_iq1_m, _spread),
    )
}
"""By the name in `formats.gguf.TENSOR_TYPES`."""


def ternary(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Repacks blocks of TQ1_0."""
    scale, ones = _first_half(52)(blocks.numpy())
    numbers = torch.from_numpy(dequantize(ones, "TQ1_0")).flatten(1) + 1
    scales = torch.from_numpy(scale.repeat(_ELEMENTS // RUN, -1).view(np.float16))
    return _stored(numbers, "ternary"), scales
