"""The tensors of a checkpoint, as the GGUF files of a model have them.

This module owns the order of the rows of queries and keys, and which tensors of a file make one of
a checkpoint. It must not know config.json, nor any family by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shmllm.formats.gguf import GgufHeader, TensorEntry, shown
from shmllm.formats.gguf_directory import SourceFile
from shmllm.formats.gguf_family import NUM_HEADS, GgufFamily, Layout, Place
from shmllm.formats.gguf_model import family_of, further_prefixes
from shmllm.formats.gguf_pieces import read_pieces

_IGNORED = (
    *("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
    "v.token_embd.img_break",
)
"""The model directory's config.json has parameters that give these, or their values; or they are
rows of the table of embeddings."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """A tensor of a file, or the part of it that is one expert's or one projection's.

    Attributes:
        path: the file.
        entry: where it lies.
        number: the number of what it is a part of, among `Place.names`.
    """

    path: Path
    entry: TensorEntry
    number: int = 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        parts: what files have of it, each with the same shape.
        heads: the numbers of heads whose rows have another order; empty if they have not.
        offset: what the values of the file have more than a checkpoint's.
        place: the place of the first part.
    """

    parts: tuple[FilePart, ...]
    heads: tuple[int, ...]
    offset: float
    place: Place

    @property
    def layout(self) -> Layout:
        """See `gguf_family.Place`."""
        return self.place.layout

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """The shape of all parts together, in the file's layout."""
        shape = [*self.parts[0].entry.shape]
        if len(self.parts) > 1:
            shape[1 if self.place.in_turn else max(-2, -len(shape))] *= len(self.parts)
        return tuple(shape)

    @property
    def stretch(self) -> int:
        """How many rows of one part lie together, before those of the next."""
        return 1 if self.place.in_turn else self.parts[0].entry.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint."""
        shape = self.joined_shape
        if self.layout == "row" and len(shape) == 1:
            return (1, *shape)
        if self.layout == "flat":
            return (prod(shape),)
        if self.layout == "channels" and len(shape) > 1:
            return (shape[0], 1, *shape[1:])
        if self.layout == "transposed" and len(shape) > 1:
            return (*shape[:-2], shape[-1], shape[-2])
        if self.layout == "frames" and len(shape) == 4:
            frames = self.place.num_parts
            return (shape[0], shape[1] // frames, frames, *shape[2:])
        return shape

    @property
    def type_name(self) -> str | None:
        """The type of all parts; None: their types differ."""
        name, *others = {part.entry.type_name for part in self.parts}
        return None if others else name

    def arranged(self, tensor: Tensor) -> Tensor:
        """Returns the checkpoint's values of those of all parts, [joined_shape]."""
        tensor = self.in_order(tensor)
        if self.offset:
            tensor = tensor - self.offset
        if self.place.is_decay:
            tensor = (-tensor).log()
        return in_layout(tensor, self.layout).reshape(self.shape)

    def in_order(self, rows: Tensor) -> Tensor:
        """Returns what there is of each row of the file in the order of the checkpoint's rows."""
        if not self.heads:
            return rows
        order = by_head if self.layout == "heads" else unpermuted
        return order(rows, *self.heads)


def stored_tensors(pieces: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Returns the tensors in the files of a model, by their names in a checkpoint.

    Raises:
        EngineStartError: a file cannot be read or is damaged, or they are of different models.
    """
    return _stored_tensors(pieces, tuple(map(SourceFile.of, pieces)))


@lru_cache(maxsize=16)
def _stored_tensors(
    pieces: tuple[Path, ...], _sources: tuple[SourceFile, ...]
) -> dict[str, StoredTensor]:
    """The tensors until a file changes. A header of a large vocabulary takes a tenth of a second to
    read, and loading opens a file several times."""
    header = read_pieces(list(pieces))
    family = family_of(header)
    ignored = (*_IGNORED, *further_prefixes(header))
    found: dict[str, list[tuple[int, str, FilePart]]] = {}
    for piece in header.pieces or (header,):
        for name, entry in piece.tensors.items():
            if name.startswith(ignored):
                continue
            place = family.place(name)
            for target, number, entry_of in _parts(header, place, name, entry):
                part = FilePart(piece.path, entry_of, number)
                found.setdefault(target, []).append((place.part, name, part))
    return {target: _stored(header, family, target, some) for target, some in found.items()}


def _stored(
    header: GgufHeader, family: GgufFamily, target: str, some: list[tuple[int, str, FilePart]]
) -> StoredTensor:
    """A tensor of a checkpoint, of what files have of it: the numbers of parts, and their names."""
    some = sorted(some, key=lambda each: each[0])
    names, parts = [name for _, name, _ in some], tuple(part for _, _, part in some)
    place = family.place(names[0])
    if len(names) > place.num_parts:
        raise header.error(f"{' and '.join(names)} have the same weights; the file is damaged")
    if len(names) < place.num_parts:
        needed = " and ".join(name for name, _, _ in family.stored_names(target))
        raise header.error(f"{' and '.join(names)} without {needed}; the file is damaged")
    shapes = [part.entry.shape for part in parts]
    fewest = 2 if place.in_turn else 1
    if len(parts) > 1 and (len(shapes[0]) < fewest or len(set(shapes)) > 1):
        listed = " and ".join(str([*shape]) for shape in shapes)
        raise header.error(f"{' and '.join(names)} have the shapes {listed}")
    heads = _heads_in_order(header, family, names[0], parts[0])
    return StoredTensor(parts, heads, family.offset(names[0]), place)


def _parts(
    header: GgufHeader, place: Place, name: str, entry: TensorEntry
) -> Iterator[tuple[str, int, TensorEntry]]:
    """The checkpoint's names of a tensor of a file, their numbers, and what they have of it."""
    is_of_experts = place.name != name and "{}" in place.name
    experts = _experts(header, name) if is_of_experts else [entry]
    for expert, whole in enumerate(experts):
        parts = _cut(header, name, whole, place)
        for number, (target, part) in enumerate(zip(place.names, parts, strict=True)):
            yield target.replace("{}", str(expert)) if is_of_experts else target, number, part


def _experts(header: GgufHeader, name: str) -> list[TensorEntry]:
    """The parts of a tensor of shape [experts, ...]."""
    entry = header.tensors[name]
    num_experts, *shape = entry.shape
    if not shape or not prod(entry.shape):
        raise header.error(f"{name} has the shape {[*entry.shape]}, which has no experts")
    num_bytes = entry.num_bytes // num_experts
    return [
        replace(
            entry, shape=tuple(shape), begin=entry.begin + expert * num_bytes, num_bytes=num_bytes
        )
        for expert in range(num_experts)
    ]


def _cut(header: GgufHeader, name: str, entry: TensorEntry, place: Place) -> list[TensorEntry]:
    """What each of the checkpoint's tensors at a place has of the rows of one tensor."""
    if len(place.names) == 1:
        return [entry]
    num_rows, shares = entry.shape[0], [1] * len(place.names)
    wanted = f"{len(shares)} projections of equal widths"
    if place.heads:
        shares = [_num_heads(header, name, each.key) * each.num_parts for each in place.heads]
        wanted = f"{' + '.join(map(str, shares))} heads of equal widths"
    if not num_rows or num_rows % sum(shares):
        raise header.error(f"{name} has {num_rows:,} rows for {wanted}")
    if entry.num_bytes % num_rows:
        raise header.error(f"{name} has type {entry.type_name}, and blocks of several rows")
    width = num_rows // sum(shares)
    return list(_row_parts(entry, [share * width for share in shares]))


def _row_parts(entry: TensorEntry, counts: Sequence[int]) -> Iterator[TensorEntry]:
    """The parts of a tensor of so many rows each, which lie one behind the other."""
    num_rows, *width = entry.shape
    begin, row_bytes = entry.begin, entry.num_bytes // num_rows
    for count in counts:
        shape, num_bytes = (count, *width), count * row_bytes
        yield replace(entry, shape=shape, begin=begin, num_bytes=num_bytes)
        begin += num_bytes


def _num_heads(header: GgufHeader, stored: str, key: str) -> int:
    """The number of heads in the layer of a tensor of a file, by its key."""
    known, prefix = header.metadata, header.architecture
    of_queries = known.get(f"{prefix}.{NUM_HEADS}")  # as many key heads as query heads
    value = known.get(f"{prefix}.{key}", of_queries)
    if isinstance(value, list):
        layer = int(stored.split(".")[1])
        value = value[layer] if layer < len(value) else None
    if type(value) is not int or value < 1:
        found = "nothing" if value is None else shown(value)
        raise header.error(
            f"{prefix}.{key} must be a positive whole number for {stored}, found {found}"
        )
    return value


def _heads_in_order(
    header: GgufHeader, family: GgufFamily, stored: str, part: FilePart
) -> tuple[int, ...]:
    """The numbers of heads whose rows have another order; empty for all other tensors."""
    keys, num_rows = family.heads_keys(stored, part.number), part.entry.shape[0]
    heads = tuple(_num_heads(header, stored, key) for key in keys)
    if len(heads) == 1 and num_rows % (2 * heads[0]):
        raise header.error(f"{stored} has {num_rows} rows for {heads[0]} heads")
    if len(heads) == 2 and (num_rows % (heads[0] + 2 * heads[1]) or heads[0] % heads[1]):
        raise header.error(
            f"{stored} has {num_rows} rows for {heads[0]} heads of queries and {heads[1]} of keys"
        )
    return heads


def unpermuted(tensor: Tensor, num_heads: int) -> Tensor:
    """The rows of each head with the first of all pairs before the second of all pairs."""
    pairs = tensor.view(num_heads, len(tensor) // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def permuted(tensor: Tensor, num_heads: int) -> Tensor:
    """The rows of queries or keys in llama.cpp's order, in which the two of each pair are
    neighbours: what `unpermuted` reverses."""
    halves = tensor.view(num_heads, 2, len(tensor) // num_heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def by_head(tensor: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """The rows of each key head behind those of its queries and before those of its value head, of
    those of all queries, keys and values."""
    width = len(tensor) // (num_heads + 2 * num_kv_heads)
    parts = tensor.split([num_heads * width, num_kv_heads * width, num_kv_heads * width])
    groups = [part.reshape(num_kv_heads, -1, *tensor.shape[1:]) for part in parts]
    return torch.cat(groups, 1).reshape(tensor.shape)


def in_file_order(tensor: Tensor, heads: tuple[int, ...], layout: Layout) -> Tensor:
    """A checkpoint's rows in the order of a file: what `StoredTensor.in_order` reverses."""
    if not heads:
        return tensor
    if layout != "heads":
        return permuted(tensor, *heads)
    num_heads, num_kv_heads = heads
    groups = tensor.view(num_kv_heads, -1, *tensor.shape[1:])
    width = len(tensor) // (num_heads + 2 * num_kv_heads)
    parts = groups.split([groups.shape[1] - 2 * width, width, width], 1)
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def in_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor of a file in a checkpoint's layout."""
    if layout == "row":
        return tensor.view(1, -1)
    if layout == "flat":
        return tensor.reshape(-1)
    if layout == "channels" and tensor.ndim > 1:
        return tensor.unsqueeze(1)
    return tensor.transpose(-1, -2) if layout == "transposed" and tensor.ndim > 1 else tensor


def of_place(tensor: Tensor, place: Place, num_rows: int = 0) -> Tensor:
    """A tensor of a checkpoint, or a part of it, in the layout of a file: `in_layout` reversed, and
    the values that it has.

    Args:
        tensor: the checkpoint's.
        place: where it is.
        num_rows: how many rows the file has of a vector that is "flat"; 0: one for each element.
    """
    if place.is_decay:
        tensor = -tensor.double().exp().float()
    if place.layout == "row":
        tensor = tensor[0]
    elif place.layout == "flat":
        tensor = tensor.reshape(num_rows or len(tensor), -1)
    elif place.layout == "channels" and tensor.ndim > 1:
        tensor = tensor[:, 0]
    elif place.layout == "transposed" and tensor.ndim > 1:
        tensor = tensor.transpose(-1, -2)
    return part_of(tensor, place, place.part)


def part_of(joined: Tensor, place: Place, part: int) -> Tensor:
    """The view of one part in a tensor of all parts together."""
    if place.num_parts == 1:
        return joined
    if place.in_turn:
        return joined[:, part :: place.num_parts]
    return joined.chunk(place.num_parts, max(-2, -joined.ndim))[part]
