"""Reads the weights in a GGUF file under the names of a Hugging Face checkpoint.

Quantised tensors become packed matrices; where a model has none, the `gguf` package dequantises
them. This module owns the order of the rows of queries and keys. It must not know config.json or
tokenizers, nor any family by its name.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import TENSOR_TYPES, GgufHeader, TensorEntry, read_header, shown
from shmllm.formats.gguf_directory import LINK, SourceFile, check_source
from shmllm.formats.gguf_families import GgufFamily, family_of
from shmllm.formats.gguf_pieces import label, models_in, pieces_of, read_pieces
from shmllm.models.gguf_blocks import BLOCK_TYPES
from shmllm.models.quantized import QuantizedMatrix

ELEMENTS_AT_ONCE = 2**18
"""About how many elements are dequantised at a time: `gguf` needs several temporaries of them."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IGNORED = "rope_freqs.weight"  # the model directory's config.json has parameters that give it


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in the file, or the part of it that is one expert's.

    Attributes:
        entry: where it lies.
        num_heads: the number of heads whose rows are permuted; 0 if they are not.
        offset: what its values have more than a checkpoint's.
    """

    entry: TensorEntry
    num_heads: int
    offset: float


class GgufFile:
    """One file; see `checkpoint.CheckpointFile`.

    Attributes:
        first: the file with the model's metadata, of which this one may be a piece.
    """

    def __init__(self, path: Path, first: Path | None = None) -> None:
        self.path = path
        self.first = first or path
        self.num_bytes = 0
        self.num_bytes_read = 0
        self._content: Any = None
        self._stored: dict[str, _Stored] = {}
        self._floats = torch.empty(0, dtype=torch.float32)

    def __enter__(self) -> Self:
        files = self.path, self.first
        self._stored = _stored_tensors(*files, *map(SourceFile.of, files))
        try:
            with open(self.path, "rb") as file:
                # A private mapping counts as writable, without which torch warns.
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise EngineStartError(f"cannot read {self.path}: {error}") from None
        self.num_bytes, self.num_bytes_read = len(self._content), 0
        return self

    def __exit__(self, *_: object) -> None:
        self._content = None  # closing a map fails while tensors point into it
        self._floats = torch.empty(0, dtype=torch.float32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.entry.shape for name, stored in self._stored.items()}

    def kinds(self) -> dict[str, str]:
        return {
            name: BLOCK_TYPES[stored.entry.type_name].kind
            for name, stored in self._stored.items()
            if stored.entry.type_name in BLOCK_TYPES and not stored.offset
        }

    def read_packed(self, name: str, matrix: QuantizedMatrix) -> None:
        stored = self._stored[name]
        entry, repack = stored.entry, BLOCK_TYPES[stored.entry.type_name].repack
        kind = TENSOR_TYPES[entry.type_number]
        content = torch.frombuffer(
            self._content, dtype=torch.uint8, count=entry.num_bytes, offset=entry.begin
        )
        rows = content.view(-1, entry.shape[-1] // kind.block_elements, kind.block_bytes)
        if stored.num_heads:
            order = _unpermuted(torch.arange(len(rows)), stored.num_heads)
            matrix.write(lambda some: repack(rows[order[some]]))
        else:
            matrix.write(lambda some: repack(rows[some]))
        self.num_bytes_read += entry.num_bytes
        self._release_pages(entry)

    @contextmanager
    def tensor(self, name: str) -> Iterator[Tensor]:
        stored = self._stored[name]
        entry, tensor = stored.entry, self._read(stored.entry)
        if stored.num_heads:
            tensor = _unpermuted(tensor, stored.num_heads)
        yield tensor - stored.offset if stored.offset else tensor
        self.num_bytes_read += entry.num_bytes
        self._release_pages(entry)

    def _read(self, entry: TensorEntry) -> Tensor:
        dtype = _DTYPES.get(entry.type_name)
        if dtype is not None:
            count = entry.num_bytes // dtype.itemsize
            flat = torch.frombuffer(self._content, dtype=dtype, count=count, offset=entry.begin)
            return flat.view(entry.shape)
        blocks = np.frombuffer(self._content, np.uint8, entry.num_bytes, entry.begin)
        return dequantise(blocks, entry, self._floats_for(entry))

    def _floats_for(self, entry: TensorEntry) -> Tensor:
        """Memory for the values of a tensor, the same for all: what the allocator keeps of freed
        tensors would be as much again."""
        count = prod(entry.shape)
        if self._floats.numel() < count:
            # The memory is freed before more is allocated.
            self._floats = torch.empty(0, dtype=torch.float32)
            self._floats = torch.empty(count, dtype=torch.float32)
        return self._floats[:count].view(entry.shape)

    def _release_pages(self, entry: TensorEntry) -> None:
        """Releases the pages of the file that contain nothing but this tensor."""
        page = mmap.PAGESIZE
        begin = -(-entry.begin // page) * page
        end = (entry.begin + entry.num_bytes) // page * page
        if end > begin:
            self._content.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def find_gguf(directory: Path) -> list[GgufFile]:
    """The GGUF file of a directory that was made from it, or the only one in any other directory,
    or its pieces; none if there is no such file.

    Raises:
        EngineStartError: the file that the directory was made from is gone or has changed, a piece
            is missing or another model's, or there are several models.
    """
    check_source(directory)
    found = [directory / LINK] if (directory / LINK).is_file() else models_in(directory)
    if len(found) > 1:
        names = ", ".join(map(label, found))
        raise EngineStartError(f"no weights in {directory}: {len(found)} GGUF models ({names})")
    pieces = [piece for path in found for piece in pieces_of(path)]
    if len(pieces) > 1:
        read_pieces(pieces)  # checks that they belong together
    return [GgufFile(piece, pieces[0]) for piece in pieces]


@lru_cache(maxsize=16)
def _stored_tensors(
    path: Path, first: Path, _own: SourceFile, _of_first: SourceFile
) -> dict[str, _Stored]:
    """The tensors of a file by their names in a checkpoint, until it changes. A header of a large
    vocabulary takes a tenth of a second to read, and loading opens a file several times."""
    header = read_header(path)
    if first != path:
        header = replace(header, metadata=read_header(first).metadata)
    family = family_of(header)
    found = {}
    for name, entry in header.tensors.items():
        if name == _IGNORED:
            continue
        num_heads = _num_permuted_heads(header, family, name)
        offset = family.offset(name)
        target = family.checkpoint_name(name)
        if target == name or "{}" not in target:
            found[target] = _Stored(entry, num_heads, offset)
            continue
        for number, part in enumerate(_experts(header, name)):
            found[target.format(number)] = _Stored(part, num_heads, offset)
    return found


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


def dequantise(
    blocks: np.ndarray[Any, np.dtype[np.uint8]], entry: TensorEntry, values: Tensor
) -> Tensor:
    """Computes the values of quantised blocks.

    Args:
        blocks: the stored bytes of the tensor.
        entry: its shape and type.
        values: where the values go, of the same shape, float32.

    Returns:
        `values`.

    Raises:
        EngineStartError: the `gguf` package is not installed.
    """
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ModuleNotFoundError as error:
        raise EngineStartError(
            f"quantised GGUF files need a package that is missing ({error.name}): pip install gguf"
        ) from None
    kind = TENSOR_TYPES[entry.type_number]
    width = entry.shape[-1]
    rows = values.view(-1, width)
    stored = blocks.reshape(-1, width // kind.block_elements * kind.block_bytes)
    step = max(ELEMENTS_AT_ONCE // width, 1)
    for begin in range(0, len(rows), step):
        part = dequantize(stored[begin : begin + step], GGMLQuantizationType(entry.type_number))
        rows[begin : begin + step] = torch.from_numpy(part)
    return values


def _num_permuted_heads(header: GgufHeader, family: GgufFamily, stored: str) -> int:
    """The number of heads in the rows of queries or keys; 0 for all other tensors."""
    key = family.heads_key(stored)
    if key is None:
        return 0
    prefix = header.architecture
    num_heads = header.metadata.get(f"{prefix}.{key}")
    if num_heads is None:  # as many key heads as query heads
        num_heads = header.metadata.get(f"{prefix}.attention.head_count")
    num_heads = num_heads[0] if isinstance(num_heads, list) and num_heads else num_heads
    num_rows = header.tensors[stored].shape[0]
    if type(num_heads) is not int or num_heads < 1 or num_rows % (2 * num_heads):
        raise header.error(f"{stored} has {num_rows} rows for {shown(num_heads)} heads")
    return num_heads


def _unpermuted(tensor: Tensor, num_heads: int) -> Tensor:
    """The rows of each head with the first of all pairs before the second of all pairs."""
    pairs = tensor.view(num_heads, len(tensor) // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def permuted(tensor: Tensor, num_heads: int) -> Tensor:
    """The rows of queries or keys in llama.cpp's order, in which the two of each pair are
    neighbours: what `GgufFile` reverses."""
    halves = tensor.view(num_heads, 2, len(tensor) // num_heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
