"""The weights of a shard: which elements of a checkpoint's tensors a rank keeps.

A family's names, transpositions and fused projections are code, so nobody could list what each name
of a shard means. It is found by addresses instead: `find_shares` builds the whole model and the
shard without memory, and follows each name's views to the weights that they are views of, whose
dimensions say how the ranks divide them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shmllm.models.arranged import Arranged
from shmllm.models.build import without_memory
from shmllm.models.config import ModelConfig
from shmllm.models.layers import Allocation, Dimension, sizes_of
from shmllm.models.matrices import Destination, Elsewhere, parts_of
from shmllm.models.shard import Shard
from shmllm.models.shares import Division, Share


def find_division(whole: ModelConfig, part: ModelConfig) -> Division:
    """Compares a rank's part of a model with the model.

    Args:
        whole: the configuration of the model.
        part: what `shard_config` returned for it.
    """
    (model, made), (own, own_made) = without_memory(whole), without_memory(part)
    source, target = _Weights(made), _Weights(own_made)
    maps = [
        _Map(all_of.dimensions, some.dimensions, part.shard)
        for all_of, some in zip(made, own_made, strict=True)
    ]
    every, shares = model.destinations(), {}
    for name, views in own.destinations().items():
        pairs = zip(every[name], views, strict=True)
        shares[name] = tuple(_share(source, target, maps, *pair) for pair in pairs)
    matrices = [move.share for move, all_of in zip(maps, made, strict=True) if all_of.is_matrix]
    return Division(shares, matrices)


class _Map:
    """The elements of a weight of a shard among those of the model's."""

    def __init__(self, whole: Sequence[Dimension], own: Sequence[Dimension], shard: Shard) -> None:
        self._indices = [_indices(*pair, shard) for pair in zip(whole, own, strict=True)]
        self._sizes, self._own_sizes = sizes_of(whole), sizes_of(own)

    @property
    def share(self) -> Share:
        """The share of the model's weight that the shard's is."""
        return Share(self._sizes, self._indices)

    def __call__(self, offsets: Tensor) -> Tensor:
        """Returns the offsets of elements in the model's weight by those in the shard's."""
        found, step = torch.zeros_like(offsets), 1
        for size, own, indices in zip(
            reversed(self._sizes), reversed(self._own_sizes), reversed(self._indices), strict=True
        ):
            found += indices[offsets % own] * step
            offsets, step = offsets // own, step * size
        return found


def _indices(whole: Dimension, own: Dimension, shard: Shard) -> Tensor:
    parts = [(each,) if isinstance(each, int) else each for each in (whole, own)]
    found, begin = [], 0
    for count, some in zip(*parts, strict=True):
        part = shard.find(some, count)
        found.append(torch.arange(begin + part.start, begin + part.stop))
        begin += count
    return torch.cat(found)


@dataclass(frozen=True, slots=True)
class _View:
    """A view of one weight.

    Attributes:
        weight: the number of the weight.
        offset: of the view's first element, in the weight.
        shape, strides: those of the view.
    """

    weight: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Weights:
    """Finds the weights that tensors without memory are views of."""

    def __init__(self, made: Sequence[Allocation]) -> None:
        self._begins = [int(_tensor(each.weight).storage_offset()) for each in made]

    def view_of(self, tensor: Destination) -> _View:
        found = _tensor(tensor)
        at = int(found.storage_offset())
        weight = bisect_right(self._begins, at) - 1
        return _View(weight, at - self._begins[weight], tuple(found.shape), found.stride())


def _tensor(view: Destination) -> Tensor:
    assert isinstance(view, Tensor), "a model without memory has no packed matrices"
    return view


def _share(
    source: _Weights,
    target: _Weights,
    maps: Sequence[_Map],
    whole: Destination,
    own: Destination,
) -> Share:
    if isinstance(own, Elsewhere):  # of the rows of another rank
        return Share(own.shape, [torch.arange(size) for size in own.shape])
    if isinstance(whole, Arranged) and isinstance(own, Arranged):
        return _share(source, target, maps, whole.own, own.own)
    if isinstance(whole, Tensor) and isinstance(own, Tensor):
        view = target.view_of(own)
        of_whole = source.view_of(whole)
        return Share(of_whole.shape, _places(of_whole, view, maps[view.weight]))
    return _share_of_rows(
        [source.view_of(part) for part in parts_of(whole)],
        [target.view_of(part) for part in parts_of(own)],
        maps,
    )


def _places(whole: _View, own: _View, move: _Map) -> tuple[Tensor, ...]:
    """Returns, for each dimension of a view, the indices of its elements in the model's view."""
    first = int(move(torch.tensor([own.offset])))
    begins, rest = [0] * len(whole.shape), first - whole.offset
    order = sorted(range(len(whole.shape)), key=lambda d: -whole.strides[d])
    for dimension in order:
        if whole.shape[dimension] > 1:
            begins[dimension], rest = divmod(rest, whole.strides[dimension])
    assert rest == 0, "the views differ in more than their sizes"
    places = []
    for size, stride, step, begin in zip(
        own.shape, own.strides, whole.strides, begins, strict=True
    ):
        moved = move(own.offset + stride * torch.arange(size)) - first
        places.append(begin + (moved // step if size > 1 else moved))
    return tuple(places)


def _share_of_rows(whole: Sequence[_View], own: Sequence[_View], maps: Sequence[_Map]) -> Share:
    """Returns the share of a matrix, or of a vector, that consists of rows of several weights. All
    of its columns are whole."""
    columns = whole[0].shape[1:]
    assert all(view.shape[1:] == columns for view in own), "the columns are whole"
    by_weight: dict[int, list[tuple[int, int, int]]] = {}  # by offset: stride, and first row
    begin = 0
    for view in whole:
        by_weight.setdefault(view.weight, []).append((view.offset, view.strides[0], begin))
        begin += view.shape[0]
    tables = {
        weight: torch.tensor(sorted(parts)).t().contiguous() for weight, parts in by_weight.items()
    }
    rows = []
    for view in own:
        offsets, strides, firsts = tables[view.weight]
        at = maps[view.weight](view.offset + view.strides[0] * torch.arange(view.shape[0]))
        part = torch.searchsorted(offsets, at, right=True) - 1
        rows.append(firsts[part] + (at - offsets[part]) // strides[part])
    return Share((begin, *columns), (torch.cat(rows), *map(torch.arange, columns)))
