"""What files of tensors have in common that other libraries map into memory: which ones a directory
has, that they stay as they are, and that their pages are released.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.formats.file_names import is_file_name
from shmllm.models.checkpoint import PackedTarget, changed
from shmllm.models.fields import Fields, read_json_object
from shmllm.sigbus import bus_guard

_libc = ctypes.CDLL(None)


class UnchangedFile(ABC):
    """A file that is read in `with` blocks and has to be the same in all of them; see
    `checkpoint.CheckpointFile`.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self.num_bytes_read = 0
        self._identity: tuple[int, ...] = ()

    @abstractmethod
    def _open(self) -> None:
        """Opens the file.

        Raises:
            EngineStartError: it is damaged.
            OSError: it cannot be read.
        """

    @abstractmethod
    def _close(self) -> None:
        """Closes the file."""

    def __enter__(self) -> Self:
        try:
            status = self.path.stat()
            if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
                raise EngineStartError(f"cannot read {self.path}: it is not a regular file")
            self._identity = self._identity or _identity_of(status)
            self._check_unchanged()
            self._open()
        except OSError as error:
            raise EngineStartError(f"cannot read {self.path}: {error}") from None
        self.num_bytes, self.num_bytes_read = status.st_size, 0
        self._check_unchanged()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close()
        # An error may come from what the file contains now.
        if kind is None or issubclass(kind, Exception):
            self._check_unchanged()

    def kinds(self) -> dict[str, str]:
        """No tensor is packed."""
        return {}

    def read_packed(self, name: str, matrix: PackedTarget) -> None:
        raise NotImplementedError("no tensor is packed")

    def _check_unchanged(self) -> None:
        """Checks that the file is the one that was opened first: what was read of its header is
        wrong of another one."""
        try:
            is_same = self._identity == _identity_of(self.path.stat())
        except OSError:
            is_same = False
        if not is_same:
            raise changed(self.path)


def find_shards(directory: Path, single_name: str, index_name: str) -> list[Path]:
    """Returns the files of a checkpoint in a directory: one, or those that an index lists; none if
    there is neither.

    Args:
        directory: the directory.
        single_name: the name of a checkpoint in one file, which has precedence.
        index_name: the name of an index.

    Raises:
        EngineStartError: the index is damaged, or a file that it lists is missing.
    """
    single, index = directory / single_name, directory / index_name
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    fields = Fields(read_json_object(index), str(index))
    names = fields.table("weight_map").values()
    if not names or not all(map(is_file_name, names)):
        raise fields.error("'weight_map' must map tensor names to file names")
    files = [directory / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise EngineStartError(f"missing shard {file}, which {index_name} lists")
    return files


def _identity_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def reading(tensor: Tensor, what: str) -> Iterator[None]:
    """Allows the file of a tensor of another library to be truncated inside of the `with` block.

    Args:
        tensor: it may lie in a mapped file.
        what: what a message calls it.

    Raises:
        EngineStartError: the tensor's memory was lost, because the file has become too short or
            its disk has an error. If it became too short, the end of the file's own `with` block
            says so.
    """
    with bus_guard.guarded(tensor.data_ptr(), _num_spanned_bytes(tensor)) as guard:
        yield
        if guard is not None and guard.is_lost:
            raise EngineStartError(f"cannot read {what}: {os.strerror(errno.EIO)}")


def release_pages(tensor: Tensor) -> None:
    """Releases the pages of a tensor in a mapped file, which is not read again."""
    # Only the pages that contain nothing else: safetensors may return a copy in ordinary memory.
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + _num_spanned_bytes(tensor)) // page * page
    if end > begin:
        address, size = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
        _libc.madvise(address, size, mmap.MADV_DONTNEED)


def _num_spanned_bytes(tensor: Tensor) -> int:
    """The number of bytes from the first to the last element of a tensor, which may be a view."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
