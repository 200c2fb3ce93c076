"""Which elements of whole tensors a rank of a group keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Index = slice | Tensor


class Share:
    """A choice of indices in each dimension of a tensor.

    Args:
        shape: the shape of the whole tensor.
        places: for each dimension, the chosen indices, (n,) int64.

    Attributes:
        shape: as given.
    """

    def __init__(self, shape: Sequence[int], places: Sequence[Tensor]) -> None:
        self.shape = torch.Size(shape)
        self._places = tuple(map(_as_index, places))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return all(
            isinstance(place, slice) and place == slice(0, size)
            for place, size in zip(self._places, self.shape, strict=True)
        )

    @property
    def has_all_columns(self) -> bool:
        """Whether it is all of the last dimension."""
        return self._places[-1] == slice(0, self.shape[-1])

    @property
    def columns(self) -> slice:
        """The chosen indices of the last dimension, which follow each other."""
        place = self._places[-1]
        assert isinstance(place, slice), "a rank reads consecutive columns"
        return place

    @property
    def rows(self) -> Tensor:
        """The chosen indices of the last dimension but one, (n,) int64."""
        return self._indices(-2)

    def of_each(self) -> Share:
        """Returns the share of each item of the first dimension, all of which are chosen."""
        assert self._places[0] == slice(0, self.shape[0]), "a rank has a part of each item"
        dimensions = range(1, len(self.shape))
        return Share(self.shape[1:], [self._indices(dimension) for dimension in dimensions])

    def transposed(self) -> Share:
        """Returns the same share of a tensor whose last two dimensions are exchanged."""
        order = [*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2]
        share = Share([self.shape[each] for each in order], [])
        share._places = tuple(self._places[each] for each in order)
        return share

    def row_runs(self) -> Iterator[tuple[slice, slice]]:
        """Yields the runs of rows that follow each other in the share and in the tensor, of all
        dimensions but the last together: first in the share, then in the tensor."""
        rows = torch.zeros(1, dtype=torch.int64)
        for dimension, size in enumerate(self.shape[:-1]):
            rows = (rows[:, None] * size + self._indices(dimension)).flatten()
        ends = [*((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
        begin = 0
        for end in ends:
            first = int(rows[begin])
            yield slice(begin, end), slice(first, first + end - begin)
            begin = end

    def rows_of(self, values: Tensor) -> Tensor:
        """Returns the share of a whole tensor, but with all columns."""
        return self._take(values, self._places[:-1])

    def of(self, values: Tensor) -> Tensor:
        """Returns the share of a whole tensor; a view of it where that is possible."""
        return self._take(values, self._places)

    def put(self, own: Tensor, values: Tensor) -> None:
        """Writes the share into a whole tensor."""
        grids = []
        for dimension in range(own.dim()):
            shape = [-1 if d == dimension else 1 for d in range(own.dim())]
            grids.append(self._indices(dimension).to(values.device).view(shape))
        values[tuple(grids)] = own

    def _indices(self, dimension: int) -> Tensor:
        place = self._places[dimension]
        return torch.arange(place.start, place.stop) if isinstance(place, slice) else place

    @staticmethod
    def _take(values: Tensor, places: Sequence[Index]) -> Tensor:
        for dimension, place in enumerate(places):
            if isinstance(place, slice):
                values = values.narrow(dimension, place.start, place.stop - place.start)
            else:
                values = values.index_select(dimension, place.to(values.device))
        return values


@dataclass(frozen=True, slots=True)
class Division:
    """How a rank's part of a model corresponds to the model.

    Attributes:
        shares: by the name of a checkpoint's tensor, the share of each of its destinations.
        matrices: the share of each matrix of products [..., out, in], in the order of their
            allocation. If it does not have all columns, products with it are parts of a sum.
    """

    shares: Mapping[str, tuple[Share, ...]]
    matrices: Sequence[Share]


def _as_index(places: Tensor) -> Index:
    """Returns consecutive indices as a slice."""
    count, begin = len(places), int(places[0]) if len(places) else 0
    if torch.equal(places, torch.arange(begin, begin + count)):
        return slice(begin, begin + count)
    return places
