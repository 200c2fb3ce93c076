"""The names that a checkpoint's files have for parts of a module's parameters.

transformers turns parameters back into the tensors of files when it saves a model: it renames them,
and takes those of many experts apart. This module lets it do so with tensors that have addresses
and no memory, and so learns which part of which parameter each name means. It must not know
families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a parameter.

    Attributes:
        parameter: the parameter's name.
        begin: the index of its first element among those of the parameter.
        shape: its shape.
        stride: the steps between neighbours in each dimension, in elements.
    """

    parameter: str
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the view of the part."""
        return parameter.as_strided(
            self.shape, self.stride, parameter.storage_offset() + self.begin
        )


class _Traced(torch.Tensor):
    """A tensor of which the operations that would only copy it return the view itself."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.contiguous:
            return args[0]
        result: Any = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result


def names_in_files(module: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    """Returns the parts of parameters by their names in files. A parameter that files have in a
    form that is no part of it has its own name.

    Args:
        module: transformers' module.
        shapes: the shapes of its parameters by name.
    """
    base = torch.empty(2**48, device="meta")
    memory = base.as_subclass(_Traced)
    begins: dict[str, int] = {}
    end, traced = 0, {}
    for name, shape in shapes.items():
        begins[name] = end
        traced[name] = memory[end : end + prod(shape)].view(shape)
        end += prod(shape)
    found = dict(_parts(revert_weight_conversion(module, traced), base, begins))
    whole = {part.parameter for part in found.values()}
    for name, shape in shapes.items():
        if name not in whole:
            found[name] = Part(name, 0, shape, torch.empty(shape, device="meta").stride())
    return found


def _parts(
    tensors: Mapping[str, Tensor], base: Tensor, begins: Mapping[str, int]
) -> Iterator[tuple[str, Part]]:
    ordered = list(begins.items())
    for name, tensor in tensors.items():
        if tensor._base is not base:
            continue
        offset = int(tensor.storage_offset())
        parameter, begin = max((pair for pair in ordered if pair[1] <= offset), key=lambda p: p[1])
        yield name, Part(parameter, offset - begin, tuple(tensor.shape), tensor.stride())
