"""What loading needs of a checkpoint's files, whatever their format."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

from torch import Tensor


class CheckpointFile(Protocol):
    """One file of a checkpoint, open inside of a `with` block. Names and shapes of its tensors are
    those of a Hugging Face checkpoint.

    Attributes:
        path: the file.
        num_bytes: its size.
        num_bytes_read: the stored size of the tensors that were read since it was opened.
    """

    path: Path
    num_bytes: int
    num_bytes_read: int

    def __enter__(self) -> Self:
        """Opens the file.

        Raises:
            EngineStartError: the file cannot be read, or is damaged.
        """
        ...

    def __exit__(self, *_: object) -> None: ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the tensors by name, in the order in which they are best read."""
        ...

    def tensor(self, name: str) -> AbstractContextManager[Tensor]:
        """Reads one tensor, on the CPU. It must not be used after the `with` block, which releases
        the memory: a file of gigabytes would count as the process's memory otherwise."""
        ...
