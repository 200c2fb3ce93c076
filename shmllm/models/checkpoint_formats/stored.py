"""Quantized weights between a checkpoint's components and packed matrices.

A weight keeps the same bits if one of the kinds in `packed` can hold them; otherwise it becomes
floating numbers. This module must not know methods or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from shmllm.models.codes import RUN, nibble_bytes
from shmllm.models.packed import PACKINGS

_KINDS: dict[tuple[int, bool, int, torch.dtype], str] = {
    (4, False, 32, torch.float16): "int4",
    (4, False, 64, torch.float16): "int4-g64",
    (8, False, 32, torch.float16): "q8_0",
    (8, False, 64, torch.float16): "w8-g64-f16",
    **{
        (bits, False, group, dtype): f"w{bits}-g{group}-{name}"
        for bits in (4, 8)
        for group in (32, 64)
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "f32"))
    },
    **{
        (4, True, group, dtype): f"w4z-g{group}-{name}"
        for group in (32, 64)
        for dtype, name in (
            (torch.float16, "f16"),
            (torch.bfloat16, "bf16"),
            (torch.float32, "f32"),
        )
    },
}
"""By bits, whether there are zeros, the group, and the dtype of scales."""

ZERO = {4: 8, 8: 0}
"""The number that stands for zero where a weight has no zeros, by bits."""

Numbers = Callable[[Tensor, slice], Tensor]
"""(the main component, some rows) -> the numbers [rows, in]: of 4 bits uint8, of 8 bits int8."""


class StoredMatrix(ABC):
    """A weight in a checkpoint.

    Attributes:
        shape: the weight's shape, [..., out, in], or [..., in, out].
        transposed: whether it is the latter.
        kind: the format that holds the same values, one of `matrices.FORMATS`; None: there is none.
    """

    kind: str | None

    def __init__(self, shape: tuple[int, ...], transposed: bool = False) -> None:
        self.shape = shape
        self.transposed = transposed
        self.width = shape[-2] if transposed else shape[-1]
        self.num_rows = prod(shape) // self.width

    @abstractmethod
    def packed(self, main: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        """Returns the integers and the scales of some rows.

        Args:
            main: the component that has the numbers.
            some: which rows.
        """

    @abstractmethod
    def values(self, main: Tensor, some: slice) -> Tensor:
        """Returns the values of some rows, [rows, in] float32."""


class GroupedMatrix(StoredMatrix):
    """A matrix of 4 or 8 bits with the values ``(number - zero) * scale``.

    Args:
        shape: [out, in].
        bits: 4 or 8.
        group: the number of elements of a row that share a scale.
        numbers: returns numbers.
        scales: [out, groups], of a floating dtype.
        zeros: [out, groups] int16, or None: `ZERO`.
        places: [in], the group of each column, if these are not in order.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        bits: int,
        group: int,
        numbers: Numbers,
        scales: Tensor,
        zeros: Tensor | None = None,
        places: Tensor | None = None,
    ) -> None:
        super().__init__(shape)
        self._group = group
        self._numbers = numbers
        self._zero = ZERO[bits]
        self._zeros = None if zeros is None or bool((zeros == self._zero).all()) else zeros
        if places is not None and bool((places == torch.arange(self.width) // group).all()):
            places = None
        self._places = None if places is None else places.long()
        self._scales = _narrow(scales)
        self.kind = self._find_kind(bits) if places is None else None

    def _find_kind(self, bits: int) -> str | None:
        has_zeros, is_one = self._zeros is not None, self._scales.shape[1] == 1
        if bits == 8 and is_one and not has_zeros:
            return "int8"
        unit = 64 if is_one or self._group % 64 == 0 else 32
        if not is_one and self._group % unit:
            return None
        return _KINDS.get((bits, has_zeros, unit, self._scales.dtype))

    def packed(self, main: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        assert self.kind is not None
        numbers = self._numbers(main, some)
        if self.kind == "int8":
            return numbers, self._scales[some, 0].float()
        unit = PACKINGS[self.kind].group
        parameters = [self._of_units(self._scales[some], unit)]
        if self._zeros is not None:
            parameters.append(self._of_units(self._zeros[some].to(self._scales.dtype), unit))
        scales = torch.cat([part.unflatten(1, (-1, RUN // unit)) for part in parameters], 2)
        numbers = _padded(numbers)
        if numbers.dtype == torch.uint8:
            numbers = nibble_bytes(numbers.unflatten(1, (-1, RUN))).flatten(1)
        return numbers, scales.flatten(1)

    def _of_units(self, parameters: Tensor, unit: int) -> Tensor:
        """[rows, groups] -> [rows, units]: each group's parameter for all of its units, zero for
        those behind the row."""
        begins = torch.arange(0, -(-self.width // RUN) * RUN, unit)
        groups = (begins // self._group).clamp_max(parameters.shape[1] - 1)
        return parameters[:, groups].masked_fill_(begins >= self.width, 0)

    def values(self, main: Tensor, some: slice) -> Tensor:
        numbers = self._numbers(main, some).float()
        if self._zeros is None:
            numbers -= self._zero
        else:
            numbers -= self._of_elements(self._zeros[some])
        return numbers.mul_(self._of_elements(self._scales[some].float()))

    def _of_elements(self, parameters: Tensor) -> Tensor:
        if self._places is None:
            return _repeated(parameters, self._group, self.width)
        return parameters[:, self._places]


class Float8Matrix(StoredMatrix):
    """A matrix of numbers in the format e4m3 with a scale for each block of rows and columns.

    Args:
        shape: [out, in].
        block: the rows and the columns of a block.
        scales: [row blocks, column blocks], of a floating dtype.
        error: returns the error for numbers that are NaN.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        block: tuple[int, int],
        scales: Tensor,
        error: Callable[[], Exception],
    ) -> None:
        super().__init__(shape)
        self._error = error
        self._block = block
        self._scales = scales.float()
        fits = block[1] % RUN == 0 or scales.shape[1] == 1
        self.kind = "fp8" if fits else None

    def packed(self, main: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        codes = self._checked(main[some]).view(torch.uint8)
        columns = torch.arange(0, self.width, RUN) // self._block[1]
        return _padded(codes), self._scales_of(some)[:, columns]

    def values(self, main: Tensor, some: slice) -> Tensor:
        numbers = self._checked(main[some]).float()
        return numbers.mul_(_repeated(self._scales_of(some), self._block[1], self.width))

    def _checked(self, numbers: Tensor) -> Tensor:
        if bool((numbers.view(torch.uint8) & 127 == 127).any()):
            raise self._error()
        return numbers

    def _scales_of(self, some: slice) -> Tensor:
        return self._scales[torch.arange(some.start, some.stop) // self._block[0]]


class NibbleMatrix(StoredMatrix):
    """Matrices of codes of 4 bits, two neighbours in a byte. The main component is uint8 and has
    rows, one after the other, in any shape.

    Args:
        kind: one of `packed.PACKINGS`.
        shape: [..., out, in], or [..., in, out].
        parameters: [out, ...] of all matrices, as the kind stores a row's.
        transposed: whether the shape is [..., in, out].
        high_first: whether the first of two neighbours is in the upper half.
    """

    def __init__(
        self,
        kind: str,
        shape: tuple[int, ...],
        parameters: Tensor,
        transposed: bool = False,
        high_first: bool = False,
    ) -> None:
        super().__init__(shape, transposed)
        self.kind: str = kind
        self._parameters = parameters
        self._high_first = high_first

    def packed(self, main: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        octets = main.reshape(self.num_rows, -1)[some]
        halves = [octets & 15, octets >> 4]
        codes = torch.stack(halves[::-1] if self._high_first else halves, 2).flatten(1)
        runs = _padded(codes).unflatten(1, (-1, RUN))
        return nibble_bytes(runs).flatten(1), self._parameters[some]

    def values(self, main: Tensor, some: slice) -> Tensor:
        return PACKINGS[self.kind].values(*self.packed(main, some))[:, : self.width]


def powers_of_runs(powers: Tensor) -> Tensor:
    """Returns the parameters of "mxfp4": powers [..., out, in / 32] uint8, each by 127 more, in
    whole runs."""
    rows = powers.flatten(0, -2)
    return pad(rows, (0, rows.shape[1] % 2))


def float8_of_runs(factors: Tensor, scale: Tensor) -> Tensor:
    """Returns the parameters of "nvfp4".

    Args:
        factors: [out, in / 16] float8_e4m3fn.
        scale: one number or [out, 1], float32, that these are multiplied by.
    """
    octets = factors.view(torch.uint8)
    octets = pad(octets, (0, -octets.shape[1] % 4)).unflatten(1, (-1, 4))
    scales = scale.float().view(-1, 1, 1).expand(*octets.shape[:2], 1).contiguous()
    return torch.cat([scales.view(torch.uint8), octets], 2).flatten(1)


class FloatingMatrix(StoredMatrix):
    """A matrix that no kind holds.

    Args:
        shape: [out, in].
        values_of: (the main component, some rows) -> their values.
    """

    kind = None

    def __init__(self, shape: tuple[int, int], values_of: Numbers) -> None:
        super().__init__(shape)
        self._values_of = values_of

    def packed(self, main: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        raise AssertionError("the matrix has no kind")

    def values(self, main: Tensor, some: slice) -> Tensor:
        return self._values_of(main, some)


def _narrow(scales: Tensor) -> Tensor:
    """Returns scales in a dtype of 16 bits if this changes none of them."""
    if scales.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            narrow = scales.to(dtype)
            if torch.equal(narrow.float(), scales):
                return narrow
    return scales


def _repeated(parameters: Tensor, count: int, width: int) -> Tensor:
    """Returns rows in which each parameter stands `count` times."""
    return parameters.repeat_interleave(count, 1)[:, :width]


def _padded(numbers: Tensor) -> Tensor:
    """Returns rows of whole runs; zeros fill the last run."""
    return pad(numbers, (0, -numbers.shape[1] % RUN))
