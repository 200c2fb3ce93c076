"""Which elements of whole tensors a rank of a group keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    def columns(self) -> slice:
        """The chosen indices of the last dimension, which follow each other."""
        place = self._places[-1]
        assert isinstance(place, slice), "a rank reads consecutive columns"
        return place

    def rows_of(self, values: Tensor) -> Tensor:
        """Returns the share of a whole tensor, but with all columns."""
        return self._take(values, self._places[:-1])

    def of(self, values: Tensor) -> Tensor:
        """Returns the share of a whole tensor; a view of it where that is possible."""
        return self._take(values, self._places)

    def put(self, own: Tensor, values: Tensor) -> None:
        """Writes the share into a whole tensor."""
        grids = []
        for dimension, (place, size) in enumerate(zip(self._places, self.shape, strict=True)):
            index = torch.arange(size)[place] if isinstance(place, slice) else place
            index = index.to(values.device)
            grids.append(index.view([-1 if d == dimension else 1 for d in range(own.dim())]))
        values[tuple(grids)] = own

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
        partial: for each matrix of products in the order of their allocation, whether it has a part
            of the columns only, so that its products are parts of a sum.
    """

    shares: Mapping[str, tuple[Share, ...]]
    partial: Sequence[bool]


def _as_index(places: Tensor) -> Index:
    """Returns consecutive indices as a slice."""
    count, begin = len(places), int(places[0]) if len(places) else 0
    if torch.equal(places, torch.arange(begin, begin + count)):
        return slice(begin, begin + count)
    return places
