"""Reads safetensors files: one file, or shards with an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.tensor_files import UnchangedFile, find_shards, reading, release_pages

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64")
_NUMBERS = ".tid2eid"
"""The end of the names of tensors that have numbers of experts, which may be of type I32."""


class SafetensorsFile(UnchangedFile):
    """One file; see `checkpoint.CheckpointFile`.

    Args:
        path: the file.
        prefix: what stands before the names that the file has, in all names here.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        super().__init__(path)
        self._prefix = prefix
        self._file: Any = None

    def _open(self) -> None:
        try:
            self._file = safe_open(self.path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise self._damaged(error) from None

    def _close(self) -> None:
        self._file = None

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
        if dtype not in _DTYPES and not (dtype == "I32" and name.endswith(_NUMBERS)):
            raise EngineStartError(
                f"{self.path}: {name} has type {dtype}; supported: {', '.join(_DTYPES)}"
            )

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
    return [SafetensorsFile(path) for path in find_shards(directory, SINGLE_FILE, INDEX_FILE)]
