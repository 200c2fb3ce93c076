"""The tensors that one quantized weight consists of: its numbers, its scales, and others.

This module must not know methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.checkpoint_formats.stored import StoredMatrix

FLOATS = ("F16", "BF16", "F32")
"""The dtypes of scales, as safetensors files name them."""
FLOAT8 = "F8_E4M3"
POWER = "F8_E8M0"
"""The dtype of scales that are powers of two, a byte each."""
_NO_POWER = 255


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about a tensor.

    Attributes:
        shape: its shape.
        dtype: its dtype, in the format's words: "I32", "BF16", "F8_E4M3".
        path: the file that it lies in.
    """

    shape: tuple[int, ...]
    dtype: str
    path: Path


Read = Callable[[str], AbstractContextManager[Tensor]]
"""Reads a tensor by its name, from whichever file it lies in."""


class Components:
    """The tensors whose names begin with that of one module.

    Attributes:
        module: the module's name in the checkpoint.
        path: the file with the weight's main component.
    """

    def __init__(
        self, module: str, main: str, headers: dict[str, Header], read: Read | None
    ) -> None:
        self.module = module
        self.path = headers[main].path
        self._headers = headers
        self._read = read

    def __contains__(self, part: str) -> bool:
        return self._name(part) in self._headers

    def error(self, part: str, message: str) -> EngineStartError:
        """Returns an error about one of the tensors; the caller raises it."""
        header = self._headers.get(self._name(part))
        path = self.path if header is None else header.path
        return EngineStartError(f"{path}: {self._name(part)} {message}")

    def header(
        self, part: str, dtypes: Collection[str], shape: Sequence[int | None] | None = None
    ) -> Header:
        """Returns what the file says about a tensor, after checks.

        Args:
            part: the end of its name.
            dtypes: those that it may have.
            shape: the shape that it must have; None in it: any size.

        Raises:
            EngineStartError: it is missing, or has another shape or dtype.
        """
        if part not in self:
            raise EngineStartError(
                f"{self.path}: {self._name(part)} is missing, a component of {self.module}.weight"
            )
        header = self._headers[self._name(part)]
        if header.dtype not in dtypes:
            raise self.error(part, f"has dtype {header.dtype}; supported: {', '.join(dtypes)}")
        if shape is not None and not _fits(header.shape, shape):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.error(part, f"has shape {list(header.shape)}, it must have [{wanted}]")
        return header

    def tensor(
        self, part: str, dtypes: Collection[str], shape: Sequence[int | None] | None = None
    ) -> Tensor:
        """Reads a small tensor, after the checks of `header`."""
        self.header(part, dtypes, shape)
        assert self._read is not None, "only headers can be read"
        with self._read(self._name(part)) as tensor:
            return tensor.clone()

    def scales(self, part: str, shape: Sequence[int | None] | None = None) -> Tensor:
        """Reads a tensor of scales, which must be finite."""
        scales = self.tensor(part, (*FLOATS, POWER), shape)
        if self.header(part, (*FLOATS, POWER)).dtype == POWER:
            scales = scales.float()
        if not scales.isfinite().all():
            raise self.error(part, "has scales that are not finite")
        return scales

    def powers(self, part: str, shape: Sequence[int | None]) -> Tensor:
        """Reads scales that are powers of two, uint8, each by 127 more than the power."""
        powers = self.tensor(part, ("U8", POWER), shape).view(torch.uint8)
        if bool((powers == _NO_POWER).any()):
            raise self.error(part, "has scales that are not finite")
        return powers

    def factors(self, part: str, shape: Sequence[int | None]) -> Tensor:
        """Reads scales in the format e4m3, which must be finite."""
        factors = self.tensor(part, (FLOAT8,), shape)
        if bool((factors.view(torch.uint8) & 127 == 127).any()):
            raise self.error(part, "has scales that are not finite")
        return factors

    def _name(self, part: str) -> str:
        return f"{self.module}{part}"


class Method(ABC):
    """How a checkpoint's tensors are quantized.

    Attributes:
        components: the ends of the names of tensors that belong to a weight, or that are not
            weights: none of them is read by itself.
        weight: the end of a weight's name.
        beside: further such ends, which belong to a weight if there is one beside that has numbers.
    """

    components: tuple[str, ...]
    beside: tuple[str, ...] = ()
    weight: str = ".weight"

    @abstractmethod
    def main(self, dtype: str, name: str) -> str | None:
        """Returns the end of a tensor's name if it is the main component of a weight: that with
        the weight's numbers."""

    @abstractmethod
    def shape(self, parts: Components) -> tuple[int, ...]:
        """Returns the shape of a weight, from as little as possible."""

    @abstractmethod
    def matrix(self, parts: Components) -> StoredMatrix:
        """Returns a weight, all of whose components but the main one are read."""


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        size is None or size == own for own, size in zip(shape, wanted, strict=True)
    )


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the numbers in words [rows, words] int32, from the lowest bits on, as [rows, numbers]
    uint8."""
    # `contiguous` keeps the strides of a column, by which no row of bytes can be viewed.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], -1).flatten(1)
