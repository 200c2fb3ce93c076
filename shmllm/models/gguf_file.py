"""Reads the weights in a GGUF file under the names of a Hugging Face checkpoint.

Quantised tensors become packed matrices; where a model has none, the `gguf` package dequantises
them. This module must not know config.json or tokenizers, nor which tensors a family has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import TENSOR_TYPES, TensorEntry
from shmllm.formats.gguf_directory import LINK, PROJECTOR_LINK, SourceFile, check_source
from shmllm.formats.gguf_pieces import label, models_in, pieces_of, read_pieces
from shmllm.models.checkpoint import PackedTarget, changed
from shmllm.models.gguf_blocks import BLOCK_TYPES
from shmllm.models.gguf_grids import dequantize
from shmllm.models.gguf_tensors import FilePart, StoredTensor, part_of, stored_tensors
from shmllm.models.mapped_file import MappedFile

ELEMENTS_AT_ONCE = 2**18
"""About how many elements are dequantised at a time: `gguf` needs several temporaries of them."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile:
    """One file; see `checkpoint.CheckpointFile`.

    Args:
        path: the file.
        pieces: all files of the model, of which this one is a piece; none: it has the whole model.
    """

    def __init__(self, path: Path, pieces: Sequence[Path] = ()) -> None:
        self.path = path
        self.num_bytes = 0
        self.num_bytes_read = 0
        self._pieces = tuple(pieces) or (path,)
        self._sources: tuple[SourceFile, ...] = ()
        self._files: dict[Path, MappedFile] = {}
        self._stored: dict[str, StoredTensor] = {}
        self._floats = torch.empty(0, dtype=torch.float32)

    def __enter__(self) -> Self:
        self._sources = self._sources or tuple(map(SourceFile.of, self._pieces))
        self._check_unchanged()
        every = stored_tensors(self._pieces)
        # A tensor whose parts are in several files belongs to the file with the first one.
        self._stored = {
            name: stored for name, stored in every.items() if stored.parts[0].path == self.path
        }
        self.num_bytes, self.num_bytes_read = len(self._file(self.path).content), 0
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._files = {}
        self._floats = torch.empty(0, dtype=torch.float32)
        # An error may come from what the file contains now.
        if kind is None or issubclass(kind, Exception):
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Checks that the files are those that were opened first."""
        for path, source in zip(self._pieces, self._sources, strict=True):
            if SourceFile.of(path) != source:
                raise changed(path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def check(self, name: str) -> None:
        """All types that `read_header` accepts can be read."""

    def kinds(self) -> dict[str, str]:
        return {
            name: BLOCK_TYPES[stored.type_name].kind
            for name, stored in self._stored.items()
            if stored.type_name in BLOCK_TYPES and not stored.offset
        }

    def read_packed(self, name: str, matrix: PackedTarget) -> None:
        stored = self._stored[name]
        assert stored.type_name is not None, "`kinds` has no others"
        repack = BLOCK_TYPES[stored.type_name].repack
        parts = [self._blocks(part) for part in stored.parts]
        if stored.heads:
            order = stored.in_order(torch.arange(len(parts[0])))
            matrix.write(lambda some: repack(parts[0][order[some]]))
        elif len(parts) == 1:
            matrix.write(lambda some: repack(parts[0][some]))
        else:
            matrix.write(lambda some: repack(_joined_rows(parts, some, stored.stretch)))
        self._finish(stored)

    @contextmanager
    def tensor(self, name: str) -> Iterator[Tensor]:
        stored = self._stored[name]
        yield stored.arranged(self._joined(stored))
        self._finish(stored)

    def _joined(self, stored: StoredTensor) -> Tensor:
        """The values of all parts together."""
        first = self._read(stored.parts[0])
        if len(stored.parts) == 1:
            return first
        joined = torch.empty(stored.joined_shape, dtype=first.dtype)
        for number, part in enumerate(stored.parts):
            part_of(joined, stored.place, number).copy_(self._read(part))
        return joined

    def _file(self, path: Path) -> MappedFile:
        if path not in self._files:
            try:
                with open(path, "rb") as file:
                    self._files[path] = MappedFile(file, path)
            except OSError as error:
                raise EngineStartError(f"cannot read {path}: {error}") from None
        return self._files[path]

    def _blocks(self, part: FilePart) -> Tensor:
        """The stored bytes, [rows, blocks, block bytes] uint8."""
        entry, kind = part.entry, TENSOR_TYPES[part.entry.type_number]
        content = torch.frombuffer(
            self._file(part.path).content,
            dtype=torch.uint8,
            count=entry.num_bytes,
            offset=entry.begin,
        )
        return content.view(-1, entry.shape[-1] // kind.block_elements, kind.block_bytes)

    def _read(self, part: FilePart) -> Tensor:
        entry, content = part.entry, self._file(part.path).content
        dtype = _DTYPES.get(entry.type_name)
        if dtype is not None:
            count = entry.num_bytes // dtype.itemsize
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=entry.begin)
            return flat.view(entry.shape)
        blocks = np.frombuffer(content, np.uint8, entry.num_bytes, entry.begin)
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

    def _finish(self, stored: StoredTensor) -> None:
        """Releases the pages of the files that contain nothing but this tensor."""
        for part in stored.parts:
            entry = part.entry
            self.num_bytes_read += entry.num_bytes if part.path == self.path else 0
            self._file(part.path).finish(entry.begin, entry.num_bytes)


def _joined_rows(parts: Sequence[Tensor], some: slice, stretch: int) -> Tensor:
    """Some of the rows of tensors of equal shapes, which take turns after so many rows."""
    begin, end, _ = some.indices(len(parts) * len(parts[0]))
    rounds, rest = np.divmod(np.arange(begin, end), len(parts) * stretch)
    owners, offsets = np.divmod(rest, stretch)
    rows = np.empty((end - begin, *parts[0].shape[1:]), np.uint8)
    for number, part in enumerate(parts):
        mine = np.flatnonzero(owners == number)
        rows[mine] = part.numpy()[rounds[mine] * stretch + offsets[mine]]
    return torch.from_numpy(rows)


def find_gguf(directory: Path) -> list[GgufFile]:
    """The GGUF file of a directory that was made from it, or the only one in any other directory,
    or its pieces, and the file with its tower; none if there is no such file.

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
    files = [GgufFile(piece, pieces) for piece in pieces]
    projector = directory / PROJECTOR_LINK
    return [*files, GgufFile(projector)] if projector.is_file() else files


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
    kind = TENSOR_TYPES[entry.type_number]
    width = entry.shape[-1]
    rows = values.view(-1, width)
    stored = blocks.reshape(-1, width // kind.block_elements * kind.block_bytes)
    step = max(ELEMENTS_AT_ONCE // width, 1)
    for begin in range(0, len(rows), step):
        part = dequantize(stored[begin : begin + step], kind.name)
        rows[begin : begin + step] = torch.from_numpy(part)
    return values
