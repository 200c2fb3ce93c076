"""Reads safetensors files that have low-rank adapters beside their weights, one for each task.

Such a weight W of shape [out, in] is the tensor `parametrizations.weight.original` of its module,
and adapters are A [tasks, rank, in] and B [tasks, out, rank], which add scale * B A. Of a table of
embeddings [in, out] it is A B, with A [tasks, in, rank] and B [tasks, rank, out].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.checkpoint import CheckpointFile, PackedTarget
from shmllm.models.quantized import one_thread
from shmllm.models.task_adapters import TaskAdapters

_ORIGINAL = ".parametrizations.weight.original"
_MATRICES = tuple(f".parametrizations.weight.0.lora_{each}" for each in "AB")
_TABLES = "embeddings."


class WrappedFile:
    """A file some of whose weights are other ones; see `checkpoint.CheckpointFile`.

    Args:
        file: the file.
    """

    def __init__(self, file: CheckpointFile) -> None:
        self.path = file.path
        self._file = file

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    @property
    def num_bytes_read(self) -> int:
        return self._file.num_bytes_read

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def kinds(self) -> Mapping[str, str]:
        return self._file.kinds()

    def read_packed(self, name: str, matrix: PackedTarget) -> None:
        self._file.read_packed(name, matrix)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._file.shapes()


class AdaptedFile(WrappedFile):
    """One file. Its weights are those with the chosen adapters.

    Args:
        file: the file.
        adapters: which adapters it has.
    """

    def __init__(self, file: CheckpointFile, adapters: TaskAdapters) -> None:
        super().__init__(file)
        self._adapters = adapters

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            _weight_of(name): shape
            for name, shape in self._shapes.items()
            if not name.endswith(_MATRICES)
        }

    def check(self, name: str) -> None:
        if name in self._shapes:
            self._file.check(name)
            return
        module = name.removesuffix(".weight")
        self._file.check(f"{module}{_ORIGINAL}")
        for part, wanted in zip(_MATRICES, self._matrix_shapes(module), strict=True):
            found = self._shapes.get(f"{module}{part}")
            if found is None:
                raise EngineStartError(f"{self.path}: {module}{part} is missing")
            if found != wanted:
                raise EngineStartError(
                    f"{self.path}: {module}{part} has shape {list(found)}, it must have "
                    f"{list(wanted)}"
                )
            self._file.check(f"{module}{part}")

    def _matrix_shapes(self, module: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes that both matrices of a module's adapters must have."""
        rows, columns = self._shapes[f"{module}{_ORIGINAL}"]
        count, rank = self._adapters.count, self._adapters.rank
        if _TABLES in module:
            return (count, rows, rank), (count, rank, columns)
        return (count, rank, columns), (count, rows, rank)

    @contextmanager
    def tensor(self, name: str) -> Iterator[Tensor]:
        if name in self._shapes:
            with self._file.tensor(name) as tensor:
                yield tensor
            return
        module, chosen = name.removesuffix(".weight"), self._adapters.chosen
        with self._file.tensor(f"{module}{_ORIGINAL}") as tensor:
            if chosen is None:
                yield tensor
                return
            values = tensor.to(torch.float32, copy=True)
        first, second = (self._of_task(f"{module}{part}", chosen) for part in _MATRICES)
        if _TABLES not in module:
            first, second = second, first
        with one_thread():
            values.addmm_(first, second, alpha=self._adapters.scale)
        yield values

    def _of_task(self, name: str, task: int) -> Tensor:
        with self._file.tensor(name) as tensor:
            return tensor[task].to(torch.float32, copy=True)


def _weight_of(name: str) -> str:
    return f"{name.removesuffix(_ORIGINAL)}.weight" if name.endswith(_ORIGINAL) else name
