"""Reads safetensors files whose matrices are quantized.

The components of a weight may lie in different files; the file that has the numbers has the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from shmllm.models.checkpoint import PackedTarget
from shmllm.models.checkpoint_formats.components import Components, Header, Method
from shmllm.models.checkpoint_formats.stored import StoredMatrix
from shmllm.models.config_file import read_config, text_fields
from shmllm.models.fields import Fields
from shmllm.models.quantization_methods import method_module, quantization_fields
from shmllm.models.quantized import ROUNDED_AT_ONCE, one_thread
from shmllm.models.safetensors_file import SafetensorsFile


class Headers:
    """What all files of a checkpoint say about their tensors."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    @cached_property
    def all(self) -> dict[str, Header]:
        """By name."""
        found: dict[str, Header] = {}
        for path in self._paths:
            with SafetensorsFile(path) as file:
                shapes, dtypes = file.shapes(), file.dtypes()
            found |= {name: Header(shapes[name], dtypes[name], path) for name in shapes}
        return found


class QuantizedFile:
    """One file; see `checkpoint.CheckpointFile`.

    Args:
        file: the file.
        method: how its tensors are quantized.
        headers: those of all files.
    """

    def __init__(self, file: SafetensorsFile, method: Method, headers: Headers) -> None:
        self.path = file.path
        self._file = file
        self._method = method
        self._headers = headers
        self._others: dict[Path, SafetensorsFile] = {}
        self._opened = ExitStack()

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
        try:
            self._opened.__exit__(*error)
        finally:
            self._others.clear()
            self._file.__exit__(*error)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        stored = self._weights
        plain = self._file.shapes()
        found = {}
        for name, shape in plain.items():
            if not self._is_component(name) and name not in stored:
                found[name] = shape
        return found | {name: self._method.shape(self._parts(name)) for name in stored}

    def _is_component(self, name: str) -> bool:
        """Whether a tensor belongs to a weight and is not its main component."""
        if name.endswith(self._method.components):
            return True
        weights = [name.removesuffix(end) for end in self._method.beside if name.endswith(end)]
        beside = [f"{module}{self._method.weight}" for module in weights]
        headers = [(self._headers.all.get(weight), weight) for weight in beside]
        return any(each and self._method.main(each.dtype, weight) for each, weight in headers)

    def check(self, name: str) -> None:
        if name not in self._weights:
            self._file.check(name)

    def kinds(self) -> dict[str, str]:
        found = {}
        for name in self._weights:
            kind = self._matrix(name).kind
            if kind is not None:
                found[name] = kind
        return found

    def read_packed(self, name: str, matrix: PackedTarget) -> None:
        stored = self._matrix(name)
        with self._main(name) as main:
            matrix.write(lambda some: stored.packed(main, some))

    @contextmanager
    def tensor(self, name: str) -> Iterator[Tensor]:
        if name not in self._weights:
            with self._file.tensor(name) as tensor:
                yield tensor
            return
        yield self._values(name)

    def _values(self, name: str) -> Tensor:
        stored = self._matrix(name)
        values = torch.empty(stored.num_rows, stored.width)
        step = max(ROUNDED_AT_ONCE // stored.width, 1)
        with self._main(name) as main, one_thread():
            for begin in range(0, stored.num_rows, step):
                some = slice(begin, min(begin + step, stored.num_rows))
                values[some] = stored.values(main, some)
        if stored.transposed:
            *others, width, rows = stored.shape
            return values.view(*others, rows, width).transpose(-2, -1)
        return values.view(stored.shape)

    @cached_property
    def _weights(self) -> dict[str, tuple[str, str]]:
        """For each quantized weight its module, and its main component."""
        found = {}
        for name, header in self._headers.all.items():
            if header.path == self.path:
                part = self._method.main(header.dtype, name)
                if part is not None:
                    module = name.removesuffix(part)
                    found[module + self._method.weight] = module, name
        return found

    def _parts(self, name: str) -> Components:
        module, main = self._weights[name]
        return Components(module, main, self._headers.all, self._read)

    def _matrix(self, name: str) -> StoredMatrix:
        return self._method.matrix(self._parts(name))

    def _main(self, name: str) -> AbstractContextManager[Tensor]:
        return self._file.component(self._weights[name][1])

    def _read(self, name: str) -> AbstractContextManager[Tensor]:
        path = self._headers.all[name].path
        if path == self.path:
            return self._file.component(name)
        if path not in self._others:
            self._others[path] = self._opened.enter_context(SafetensorsFile(path))
        return self._others[path].component(name)


def quantized_files(files: Sequence[SafetensorsFile], method: Method) -> list[QuantizedFile]:
    """Returns the files of a quantized checkpoint."""
    headers = Headers([file.path for file in files])
    return [QuantizedFile(file, method, headers) for file in files]


def find_method(directory: Path) -> Method | None:
    """Returns how a checkpoint is quantized; None: it is not, or it has no config.json.

    Raises:
        EngineStartError: the method is not supported, or an option of it.
    """
    path = directory / "config.json"
    if not path.is_file():
        return None
    fields = quantization_fields(text_fields(Fields(read_config(directory), str(path))))
    if fields is None:
        return None
    method: Method = method_module(fields).configure(fields)
    return method
