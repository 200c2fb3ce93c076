"""Makes matrices whose parts a checkpoint stores in formats of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shmllm.models.matrices import FORMATS, Matrix, MixedMatrix, WholeMatrix
from shmllm.models.quantized import Allocate


@dataclass(frozen=True, slots=True)
class Part:
    """Some consecutive rows of a matrix, as a checkpoint stores them.

    Attributes:
        num_rows: the number of rows.
        kind: one of FORMATS; None: floating numbers.
    """

    num_rows: int
    kind: str | None


def make_matrix(
    shape: tuple[int, ...], parts: Sequence[Part], dtype: torch.dtype, allocate: Allocate
) -> Matrix:
    """Allocates a matrix [..., out, in] whose parts have formats of their own. A matrix of more
    than two dimensions has one part."""
    if len(parts) == 1:
        return _make(shape, parts[0].kind, dtype, allocate)
    width = shape[-1]
    return MixedMatrix(
        [_make((part.num_rows, width), part.kind, dtype, allocate) for part in parts]
    )


def _make(
    shape: tuple[int, ...], kind: str | None, dtype: torch.dtype, allocate: Allocate
) -> WholeMatrix:
    if kind is None:
        return allocate(shape, dtype)
    return FORMATS[kind].make(shape, dtype, allocate)
