"""Reads the weights in a GGUF file under the names of a Hugging Face checkpoint.

This module owns the order of the rows of queries and keys, and dequantisation, which the `gguf`
package computes. It must not know config.json or tokenizers, nor any family by its name.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import TENSOR_TYPES, GgufHeader, TensorEntry, read_header
from shmllm.formats.gguf_directory import LINK, check_source
from shmllm.formats.gguf_families import family_of

ELEMENTS_AT_ONCE = 2**18
"""About how many elements are dequantised at a time: `gguf` needs several temporaries of them."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IGNORED = "rope_freqs.weight"  # the model directory's config.json has parameters that give it
_PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.\w+")
_NUM_HEADS = {"q": "attention.head_count", "k": "attention.head_count_kv"}
_NORM = re.compile(r".*norm\.weight")


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
    """One file; see `checkpoint.CheckpointFile`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self.num_bytes_read = 0
        self._content: Any = None
        self._stored: dict[str, _Stored] = {}
        self._floats = torch.empty(0, dtype=torch.float32)

    def __enter__(self) -> Self:
        self._stored = _stored_tensors(read_header(self.path))
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
    """The GGUF file of a directory that was made from it, or the only one in any other directory;
    none if there is no such file.

    Raises:
        EngineStartError: the file that the directory was made from is gone or has changed.
    """
    check_source(directory)
    if (directory / LINK).is_file():
        return [GgufFile(directory / LINK)]
    files = sorted(directory.glob("*.gguf"))
    return [GgufFile(files[0])] if len(files) == 1 else []


def _stored_tensors(header: GgufHeader) -> dict[str, _Stored]:
    """The tensors of a file by their names in a checkpoint."""
    family = family_of(header)
    found = {}
    for name, entry in header.tensors.items():
        if name == _IGNORED:
            continue
        num_heads = _num_permuted_heads(header, name) if family.is_permuted else 0
        offset = family.norm_offset if _NORM.fullmatch(name) else 0.0
        target = family.checkpoint_name(name)
        parts = _experts(entry) if "{}" in target else [entry]
        for number, part in enumerate(parts):
            found[target.format(number)] = _Stored(part, num_heads, offset)
    return found


def _experts(entry: TensorEntry) -> list[TensorEntry]:
    """The parts of a tensor of shape [experts, ...]."""
    num_experts, *shape = entry.shape
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


def _num_permuted_heads(header: GgufHeader, stored: str) -> int:
    """The number of heads in the rows of queries or keys; 0 for all other tensors."""
    found = _PERMUTED.fullmatch(stored)
    if found is None:
        return 0
    prefix = header.architecture
    num_heads = header.metadata.get(f"{prefix}.{_NUM_HEADS[found[1]]}")
    if num_heads is None:  # as many key heads as query heads
        num_heads = header.metadata.get(f"{prefix}.{_NUM_HEADS['q']}")
    num_heads = num_heads[0] if isinstance(num_heads, list) and num_heads else num_heads
    num_rows = header.tensors[stored].shape[0]
    if type(num_heads) is not int or num_heads < 1 or num_rows % (2 * num_heads):
        raise header.error(f"{stored} has {num_rows} rows for {num_heads!r} heads")
    return num_heads


def _unpermuted(tensor: Tensor, num_heads: int) -> Tensor:
    """The rows of each head with the first of all pairs before the second of all pairs."""
    pairs = tensor.view(num_heads, len(tensor) // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
