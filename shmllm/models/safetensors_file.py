"""Reads safetensors files: one file, or shards with an index."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.checkpoint import PackedTarget, changed
from shmllm.models.fields import Fields, read_json_object
from shmllm.sigbus import bus_guard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LONGEST_FILE_NAME = 255
_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64")
_libc = ctypes.CDLL(None)


class SafetensorsFile:
    """One file; see `checkpoint.CheckpointFile`.

    Args:
        path: the file.
        prefix: what stands before the names that the file has, in all names here.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.path = path
        self._prefix = prefix
        self.num_bytes = 0
        self.num_bytes_read = 0
        self._file: Any = None
        self._identity: tuple[int, ...] = ()

    def __enter__(self) -> Self:
        try:
            status = self.path.stat()
            self._identity = self._identity or _identity_of(status)
            self._check_unchanged()
            self._file = safe_open(self.path, framework="pt", device="cpu")
        except OSError as error:
            raise EngineStartError(f"cannot read {self.path}: {error}") from None
        except SafetensorError as error:
            raise self._damaged(error) from None
        self.num_bytes, self.num_bytes_read = status.st_size, 0
        self._check_unchanged()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file = None
        # An error may come from what the file contains now.
        if kind is None or issubclass(kind, Exception):
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Checks that the file is the one that was opened first: what was read of its header is
        wrong of another one."""
        try:
            is_same = self._identity == _identity_of(self.path.stat())
        except OSError:
            is_same = False
        if not is_same:
            raise changed(self.path)

    def _damaged(self, error: SafetensorError) -> EngineStartError:
        text = "".join(each if each.isprintable() else "?" for each in str(error))
        return EngineStartError(
            f"{self.path} is damaged or not a safetensors file ({text}); copy or download it again"
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        unprintable = [name for name in self._names() if not name.isprintable()]
        if unprintable:
            raise EngineStartError(f"{self.path} has a tensor with the name {unprintable[0]!r}")
        return {name: tuple(self._slice(name).get_shape()) for name in self._names()}

    def dtypes(self) -> dict[str, str]:
        """The dtypes of the tensors by name, in the words of the format: "BF16", "F8_E4M3"."""
        return {name: self._slice(name).get_dtype() for name in self._names()}

    def check(self, name: str) -> None:
        dtype = self._slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise EngineStartError(
                f"{self.path}: {name} has type {dtype}; supported: {', '.join(_DTYPES)}"
            )

    def kinds(self) -> dict[str, str]:
        return {}

    def read_packed(self, name: str, matrix: PackedTarget) -> None:
        raise NotImplementedError("no tensor is packed")

    @contextmanager
    def tensor(self, name: str) -> Iterator[Tensor]:
        self.check(name)
        with self.component(name) as tensor:
            yield tensor

    @contextmanager
    def component(self, name: str) -> Iterator[Tensor]:
        """Reads a tensor of any dtype, such as the integers of a quantised weight; as `tensor`."""
        self._check_unchanged()  # the library reads a byte, before the memory can be protected
        try:
            tensor = self._file.get_tensor(name.removeprefix(self._prefix))
        except SafetensorError as error:
            raise self._damaged(error) from None
        with reading(tensor, f"{name} in {self.path}"):
            yield tensor
        self.num_bytes_read += tensor.nbytes
        release_pages(tensor)

    def _names(self) -> list[str]:
        return [f"{self._prefix}{name}" for name in self._file.keys()]  # noqa: SIM118

    def _slice(self, name: str) -> Any:
        return self._file.get_slice(name.removeprefix(self._prefix))


def find_safetensors(directory: Path) -> list[SafetensorsFile]:
    """The files of a checkpoint in a directory; none if it has no safetensors files.

    Raises:
        EngineStartError: the index is damaged, or a file that it lists is missing.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return [SafetensorsFile(single)]
    if not index.is_file():
        return []
    fields = Fields(read_json_object(index), str(index))
    names = fields.table("weight_map").values()
    if not names or not all(map(_is_file_name, names)):
        raise fields.error("'weight_map' must map tensor names to file names")
    files = [directory / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise EngineStartError(f"missing shard {file}, which {INDEX_FILE} lists")
    return [SafetensorsFile(file) for file in files]


def _identity_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_file_name(value: object) -> bool:
    """Whether a value can be the name of a file in the same directory."""
    if not isinstance(value, str) or not value.isprintable() or Path(value).name != value:
        return False
    return 0 < len(os.fsencode(value)) <= _LONGEST_FILE_NAME


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
    with bus_guard.guarded(tensor.data_ptr(), tensor.nbytes) as guard:
        yield
        if guard is not None and guard.is_lost:
            raise EngineStartError(f"cannot read {what}: {os.strerror(errno.EIO)}")


def release_pages(tensor: Tensor) -> None:
    """Releases the pages of a tensor in a mapped file, which is not read again."""
    # Only the pages that contain nothing else: safetensors may return a copy in ordinary memory.
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if end > begin:
        address, size = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
        _libc.madvise(address, size, mmap.MADV_DONTNEED)
