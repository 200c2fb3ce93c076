"""The matrices of matrix products: tensors, quantized ones, and rows of several formats together.

This module owns which formats there are, and views of consecutive rows. It must not know which
matrices a model has, nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from shmllm.models.arranged import Arranged, StackedMatrix, UnstackedMatrix
from shmllm.models.packed import PACKINGS, Packing
from shmllm.models.quantized import Int8Matrix, QuantizedMatrix
from shmllm.models.shares import Share
from shmllm.models.table_rows import RowsOfTable

QUANTIZATIONS: dict[str, type[Int8Matrix] | Packing] = {
    "int8": Int8Matrix,
    **{kind: PACKINGS[kind] for kind in ("int4", "int4-g64")},
}
"""What matrices can be rounded to while they are loaded, by the value of the option."""
HEAD_QUANTIZATION = "int8"
"""The quantization of the LM head of such a model, which 4 bits would harm the most."""
FORMATS: dict[str, type[Int8Matrix] | Packing] = {"int8": Int8Matrix, **PACKINGS}
"""What a checkpoint can store matrices in."""


WholeMatrix = Tensor | QuantizedMatrix
"""A matrix of one format."""


class MixedMatrix:
    """Consecutive rows of several matrices, whose formats differ.

    Attributes:
        parts: the matrices [rows, in], in their order.
    """

    def __init__(self, parts: Sequence[WholeMatrix]) -> None:
        self.parts = tuple(parts)
        self.dtype = parts[0].dtype
        self.device = parts[0].device

    @property
    def shape(self) -> torch.Size:
        return torch.Size([sum(len_of(part) for part in self.parts), *self.parts[0].shape[1:]])

    def numel(self) -> int:
        return self.shape.numel()

    def split_with_sizes(self, sizes: Sequence[int]) -> tuple[Matrix, ...]:
        """Returns views of consecutive rows."""
        found, parts = [], list(self.parts)
        for size in sizes:
            some: list[WholeMatrix] = []
            while size:
                first, rest = _split(parts.pop(0), size)
                some.append(first)
                size -= len_of(first)
                parts[:0] = rest
            found.append(joined(some))
        return tuple(found)

    def copy_(self, values: Tensor, /) -> MixedMatrix:
        """Writes ``values`` [rows, in], rounded to each part's format."""
        if values.shape != self.shape:
            raise ValueError(f"cannot write {list(values.shape)} to {list(self.shape)}")
        begin = 0
        for part in self.parts:
            part.copy_(values[begin : begin + len_of(part)])
            begin += len_of(part)
        return self

    def clone(self) -> Tensor:
        """Returns the values as a new tensor."""
        return torch.cat([part.clone() for part in self.parts])


class TransposedMatrix:
    """A packed matrix [..., out, in] as what a checkpoint has as [..., in, out].

    Attributes:
        packed: the matrix.
    """

    def __init__(self, packed: QuantizedMatrix) -> None:
        self.packed = packed
        self.dtype = packed.dtype
        self.device = packed.device

    @property
    def shape(self) -> torch.Size:
        *others, rows, width = self.packed.shape
        return torch.Size([*others, width, rows])

    def numel(self) -> int:
        return self.packed.numel()

    def copy_(self, values: Tensor, /) -> TransposedMatrix:
        """Rounds ``values`` [..., in, out]."""
        if values.shape != self.shape:
            raise ValueError(f"cannot write {list(values.shape)} to {list(self.shape)}")
        for one, some in _one_by_one(self.packed, values.transpose(-2, -1)):
            one.copy_(some)
        return self

    def clone(self) -> Tensor:
        """Returns the values as a new tensor."""
        return self.packed.clone().transpose(-2, -1)


class ShardedMatrix:
    """A rank's share of what a checkpoint has in one tensor, of any number of dimensions.

    Attributes:
        own: the share.
        share: which elements of the tensor it has.
    """

    def __init__(self, own: Matrix | TransposedMatrix, share: Share) -> None:
        self.own = own
        self.share = share
        self.dtype = own.dtype
        self.device = own.device

    @property
    def shape(self) -> torch.Size:
        return self.share.shape

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, values: Tensor, /) -> ShardedMatrix:
        """Writes the share of ``values``, a whole tensor. Rows are rounded before their columns are
        divided."""
        if values.shape != self.shape:
            raise ValueError(f"cannot write {list(values.shape)} to {list(self.shape)}")
        own, share = _untransposed(self)
        if not isinstance(own, QuantizedMatrix):
            own.copy_(share.of(values))
            return self
        rows = share.rows_of(values if own is self.own else values.transpose(-2, -1))
        for one, some in _one_by_one(own, rows):
            one.copy_columns(some, share.columns)
        return self

    def clone(self) -> Tensor:
        """Returns a whole tensor with the values of the share, and zeros in the other places."""
        values = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        self.share.put(self.own.clone(), values)
        return values


class PackedShare:
    """A packed matrix of a rank's share of what a file has packed as well.

    Args:
        own: the matrix.
        share: which rows and columns of the file's it has.

    Attributes:
        kind: the format.
    """

    def __init__(self, own: QuantizedMatrix, share: Share) -> None:
        self._own = own
        self._share = share
        self.kind = own.kind

    def write(self, packed: Callable[[slice], tuple[Tensor, Tensor]]) -> None:
        """Writes rows that are packed already; see `QuantizedMatrix.write`."""
        shape = self._own.shape
        rows = self._own.view(prod(shape[:-1]), shape[-1])
        for some, of_file in self._share.row_runs():
            run = rows.of_parts(rows.integers[some], rows.scales[some])
            run.write(partial(self._columns, packed, of_file.start))

    def _columns(
        self, packed: Callable[[slice], tuple[Tensor, Tensor]], first: int, some: slice
    ) -> tuple[Tensor, Tensor]:
        """Returns the share's columns of some rows behind the file's row `first`."""
        rows = packed(slice(first + some.start, first + some.stop))
        return self._own.columns_of(*rows, self._share.columns.start)


class Elsewhere:
    """What a checkpoint has in one tensor, in a process that does not keep it.

    Attributes:
        own: a tensor, or a matrix, without memory.
    """

    def __init__(self, own: Matrix | TransposedMatrix | Arranged) -> None:
        self.own = own
        self.dtype = own.dtype
        self.device = torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return self.own.shape

    def numel(self) -> int:
        return self.own.numel()

    def copy_(self, values: Tensor, /) -> Elsewhere:
        """Writes nothing. Raises ValueError if ``values`` has another shape."""
        if values.shape != self.shape:
            raise ValueError(f"cannot write {list(values.shape)} to {list(self.shape)}")
        return self

    def clone(self) -> Tensor:
        """Returns a tensor of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype)


Matrix = WholeMatrix | MixedMatrix
Destination = Matrix | TransposedMatrix | Arranged | ShardedMatrix | Elsewhere | RowsOfTable
"""What a tensor of a checkpoint is written to."""


def sharded(views: Sequence[Destination], shares: Sequence[Share]) -> tuple[Destination, ...]:
    """Returns the destinations of a whole tensor from those of a rank's shares of it.

    Args:
        views: those of the shares. A quantized tied model has one more than `shares`: the rounded
            copy of the embedding table.
        shares: which elements each has.
    """
    every = [*shares, *(shares[-1] for _ in views[len(shares) :])]
    found: list[Destination] = []
    for view, share in zip(views, every, strict=True):
        assert not isinstance(view, ShardedMatrix), "it is a share of a share"
        # Each rank has the whole head, and another rank's rows are not here.
        if isinstance(view, RowsOfTable | Elsewhere) or share.is_whole:
            found.append(view)
        elif isinstance(view, Arranged):
            found.extend(map(view.of, sharded([view.own], [share])))
        else:
            found.append(ShardedMatrix(view, share))
    return tuple(found)


def elsewhere_or(view: Destination) -> Destination:
    """Returns a view; if it has no memory, what stands for it."""
    if isinstance(view, ShardedMatrix | Elsewhere | RowsOfTable) or view.device.type != "meta":
        return view
    return Elsewhere(view)


def parts_of(matrix: Destination) -> tuple[WholeMatrix, ...]:
    """Returns the parts whose formats differ, or the matrix itself."""
    if isinstance(matrix, Arranged | ShardedMatrix | Elsewhere | RowsOfTable):
        return parts_of(matrix.own)
    if isinstance(matrix, TransposedMatrix):
        return (matrix.packed,)
    return matrix.parts if isinstance(matrix, MixedMatrix) else (matrix,)


def packed_of(view: Destination) -> QuantizedMatrix | PackedShare | None:
    """Returns the packed matrix that a checkpoint's tensor goes to; None: it is another."""
    if isinstance(view, ShardedMatrix):
        own, share = _untransposed(view)
        return PackedShare(own, share) if isinstance(own, QuantizedMatrix) else None
    if isinstance(view, TransposedMatrix):
        return view.packed
    return view if isinstance(view, QuantizedMatrix) else None


def _untransposed(view: ShardedMatrix) -> tuple[Matrix, Share]:
    """Returns a view's memory and its share, of a transposed matrix both as [..., out, in]."""
    if isinstance(view.own, TransposedMatrix):
        return view.own.packed, view.share.transposed()
    return view.own, view.share


def _one_by_one(
    matrix: QuantizedMatrix, values: Tensor
) -> Iterator[tuple[QuantizedMatrix, Tensor]]:
    """Yields each [1, out, in] matrix of several [..., out, in], with its values. Writing
    transposed values copies them, so one at a time takes less memory."""
    *others, rows, width = matrix.shape
    every = matrix.view(-1, rows, width).split_with_sizes([1] * prod(others))
    return zip(every, values.reshape(-1, 1, *values.shape[-2:]), strict=True)


def matrix_of(views: Sequence[Destination]) -> Matrix:
    """Returns the only destination of a tensor that is not transposed."""
    (view,) = views
    assert isinstance(view, Tensor | QuantizedMatrix | MixedMatrix)
    return view


def stacked(view: Destination, *, transposed: bool = False) -> Destination:
    """Returns the destination of a tensor that has several matrices one below the other, each
    transposed or not, from that of [matrices, rows, columns]."""
    assert isinstance(view, Tensor | QuantizedMatrix), "a tensor of a file has one format"
    if not transposed:
        return StackedMatrix(view)
    own = view.transpose(1, 2) if isinstance(view, Tensor) else TransposedMatrix(view)
    return StackedMatrix(own)


def unstacked(view: Destination, count: int) -> Destination:
    """Returns the destination of a tensor [count, rows, columns] from that of its matrices one
    below the other."""
    return UnstackedMatrix(view, count)


def len_of(matrix: WholeMatrix) -> int:
    """Returns the number of rows."""
    return matrix.shape[0]


def _split(part: WholeMatrix, size: int) -> tuple[WholeMatrix, list[WholeMatrix]]:
    """Returns the first rows of a part, at most `size`, and the rest of it."""
    if len_of(part) <= size:
        return part, []
    first, rest = part.split_with_sizes([size, len_of(part) - size])
    return first, [rest]


def addresses(view: Destination) -> range:
    """Returns the addresses of a view's memory, which must be contiguous: of its first part, if it
    has several. Weights without memory have numbers that tell them apart likewise."""
    first = parts_of(view)[0]
    memory: Tensor = first if isinstance(first, Tensor) else first.integers
    begin = memory.data_ptr()
    if memory.is_meta:
        own = int(memory.untyped_storage()._cdata)
        begin = (own << 48) + int(memory.storage_offset()) * memory.itemsize
    return range(begin, begin + memory.nbytes)


def joined(parts: Sequence[Matrix]) -> Matrix:
    """Returns one view of rows of a fused matrix, or of a fused bias: the destination of a
    checkpoint's tensor that has several projections in one.

    Args:
        parts: the views of the rows, in their order.
    """
    whole: list[WholeMatrix] = []
    for part in (each for matrix in parts for each in parts_of(matrix)):
        last = whole[-1] if whole else None
        if isinstance(part, Tensor) and isinstance(last, Tensor) and _is_next(last, part):
            whole[-1] = _joined(last, part)
        elif (
            isinstance(part, QuantizedMatrix)
            and isinstance(last, QuantizedMatrix)
            and part.kind == last.kind
            and _is_next(last.integers, part.integers)
        ):
            integers = _joined(last.integers, part.integers)
            whole[-1] = last.of_parts(integers, _joined(last.scales, part.scales))
        else:
            whole.append(part)
    return whole[0] if len(whole) == 1 else MixedMatrix(whole)


def _is_next(first: Tensor, second: Tensor) -> bool:
    memory, other = first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()
    end = first.storage_offset() + first.numel()
    return memory == other and bool(second.storage_offset() == end)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    assert _is_next(first, second)
    return first.as_strided((len(first) + len(second), *first.shape[1:]), first.stride())
