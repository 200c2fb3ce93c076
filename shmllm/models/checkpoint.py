"""What loading needs of a checkpoint's files, whatever their format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from shmllm.errors import EngineStartError


class PackedTarget(Protocol):
    """What packed rows are read into."""

    def write(self, packed: Callable[[slice], tuple[Tensor, Tensor]]) -> None:
        """Writes rows that are packed already; see `QuantizedMatrix.write`."""
        ...


def stored_twice(name: str, first: Path, second: Path) -> EngineStartError:
    """Returns the error about a tensor that two files have."""
    return EngineStartError(f"{first} and {second} both have {name}: remove one of them")


def changed(path: Path) -> EngineStartError:
    """Returns the error about a file that is not the one that was opened."""
    return EngineStartError(f"{path} has changed while it was read: load it again")


class CheckpointFile(Protocol):
    """One file of a checkpoint, open inside of a `with` block. Names and shapes of its tensors are
    those of a Hugging Face checkpoint.

    Attributes:
        path: the file.
        num_bytes: its size.
        num_bytes_read: the stored size of the tensors that were read since it was opened.
    """

    path: Path

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_bytes_read(self) -> int: ...

    def __enter__(self) -> Self:
        """Opens the file.

        Raises:
            EngineStartError: the file cannot be read, or is damaged.
        """
        ...

    def __exit__(self, *error: Any) -> None:
        """Closes the file.

        Raises:
            EngineStartError: the file has changed since it was opened first.
        """
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the tensors by name, in the order in which they are best read."""
        ...

    def check(self, name: str) -> None:
        """Checks that `tensor` can read a tensor, as far as the file's header says it.

        Raises:
            EngineStartError: its type is not one of weights.
        """
        ...

    def kinds(self) -> Mapping[str, str]:
        """The formats (`matrices.FORMATS`) of those tensors that `read_packed` reads."""
        ...

    def read_packed(self, name: str, matrix: PackedTarget) -> None:
        """Reads a packed tensor into a matrix of its format and shape, or a share of it."""
        ...

    def tensor(self, name: str) -> AbstractContextManager[Tensor]:
        """Reads one tensor, on the CPU. It must not be used after the `with` block, which releases
        the memory: a file of gigabytes would count as the process's memory otherwise."""
        ...
