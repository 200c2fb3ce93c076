"""Embeddings that users give in place of items, which need no tower: reads the forms that vLLM has
for them.

This module must not read the embeddings themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from shmllm.errors import RequestError
from shmllm.params.items import Grid, Modality

_SECONDS = "second_per_grid_ts"


@dataclass(frozen=True, slots=True)
class GivenEmbeds:
    """The embeddings of an item.

    Attributes:
        rows: a tensor or an array, [embeddings, width].
        grid: the frames, and the rows and columns of patches before they are merged; None: the user
            gives none.
        frame_seconds: of a video the time between two frames of its grid.
    """

    rows: Any
    grid: Grid | None = None
    frame_seconds: float = 1.0


def is_floating(value: Any, num_axes: int) -> bool:
    """Whether a value is a tensor or an array of floating numbers with so many axes."""
    kind = str(getattr(value, "dtype", ""))
    return getattr(value, "ndim", None) == num_axes and "float" in kind


def name_of(modality: Modality) -> str:
    """What the embeddings of such items are called, as a key and in messages."""
    return f"{modality}_embeds"


def find_embeds(name: str, modality: Modality, data: Any) -> list[GivenEmbeds] | None:
    """The embeddings in what a prompt has of a modality; None: it has something else, or a list.

    Args:
        name: what errors call the prompt.
        modality: the modality.
        data: floating numbers [items, embeddings, width]; or a dict with these, with a list of
            [embeddings, width], or with all embeddings one after the other, [embeddings, width],
            as "image_embeds", and perhaps "image_grid_thw" and, of videos, "second_per_grid_ts".

    Raises:
        RequestError: the dict has other keys, or they do not suit each other.
    """
    key = name_of(modality)
    if is_floating(data, 3):
        return [GivenEmbeds(rows) for rows in data]
    if not isinstance(data, Mapping) or key not in data:
        return None
    known = {key, f"{modality}_grid_thw", *([_SECONDS] if modality == "video" else [])}
    if unknown := sorted(map(str, data.keys() - known)):
        raise RequestError(f"{name}: {key!r} has {unknown} beside it; known are {sorted(known)}")
    grids = _grids(name, f"{modality}_grid_thw", data.get(f"{modality}_grid_thw"))
    rows = _rows(name, key, data[key], grids)
    seconds = _numbers(data.get(_SECONDS)) or [1.0] * len(rows)
    places: Sequence[Grid | None] = grids or [None] * len(rows)
    if not len(rows) == len(places) == len(seconds):
        raise RequestError(
            f"{name}: {key!r} has {len(rows)} items, {len(places)} grids and {len(seconds)} times"
        )
    return [GivenEmbeds(*each) for each in zip(rows, places, map(float, seconds), strict=True)]


def _rows(name: str, key: str, value: Any, grids: Sequence[Grid]) -> list[Any]:
    """The embeddings of each item."""
    if is_floating(value, 3) or isinstance(value, list | tuple):
        return list(value)
    if len(grids) < 2 or not is_floating(value, 2):
        return [value]
    # Each embedding stands for as many patches.
    sizes, total = [prod(grid) for grid in grids], len(value)
    ends = [sum(sizes[: end + 1]) * total for end in range(len(sizes))]
    if any(end % sum(sizes) for end in ends):
        raise RequestError(
            f"{name}: {key!r} has {total} embeddings, which the grids {list(grids)} do not divide"
        )
    starts = [0, *(end // sum(sizes) for end in ends)]
    return [value[start:end] for start, end in pairwise(starts)]


def _grids(name: str, key: str, value: Any) -> list[Grid]:
    found = _numbers(value)
    if found and not isinstance(found[0], list | tuple):
        found = [found]
    for grid in found:
        is_grid = isinstance(grid, list | tuple) and len(grid) == 3
        if not is_grid or any(type(side) is not int or side < 1 for side in grid):
            raise RequestError(
                f"{name}: {key!r} must be whole numbers of at least 1, [items, 3], got {value!r}"
            )
    return [(frames, rows, columns) for frames, rows, columns in found]


def _numbers(value: Any) -> list[Any]:
    """A tensor, an array or a sequence as a list; None as an empty one."""
    found = value.tolist() if hasattr(value, "tolist") else value
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]
