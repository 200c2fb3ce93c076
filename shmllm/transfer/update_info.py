"""What a trainer says about the tensors of one call of `update_weights`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shmllm.errors import RequestError


@dataclass
class UpdateInfo:
    """The tensors of an update, in the order in which they are sent.

    Attributes:
        names: the names in the Hugging Face checkpoint.
        dtype_names: the names of torch's dtypes, such as "bfloat16".
        shapes: the whole shapes.

    Raises:
        RequestError: the lists are not valid, or differ in length.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        for key in ("names", "dtype_names", "shapes"):
            value = getattr(self, key)
            if not isinstance(value, list | tuple):
                raise RequestError(f"{key} must be a list, got {type(value).__name__}")
        self.check_lengths("dtype_names", "shapes")
        if not all(isinstance(name, str) for name in self.names):
            raise RequestError("names must be a list of texts")
        for name, shape in zip(self.names, self.shapes, strict=True):
            is_list = isinstance(shape, list | tuple)
            if not is_list or not all(type(size) is int and size >= 0 for size in shape):
                raise RequestError(f"the shape of {name} is not a list of sizes: {shape!r}")

    def check_lengths(self, *keys: str) -> None:
        """Raise RequestError unless the lists of these names are as long as `names`."""
        for key in keys:
            num, value = len(self.names), getattr(self, key)
            if len(value) != num:
                raise RequestError(f"names has {num} entries, but {key} has {len(value)}")

    @cached_property
    def dtypes(self) -> list[Any]:
        """The torch dtypes. Raises RequestError if a name is none of them."""
        import torch

        found = []
        for name, text in zip(self.names, self.dtype_names, strict=True):
            dtype = getattr(torch, str(text).removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise RequestError(f"the dtype of {name} is not one of torch: {text!r}")
            found.append(dtype)
        return found

    @cached_property
    def sizes(self) -> list[int]:
        """The sizes of the tensors in bytes."""
        shapes = zip(self.shapes, self.dtypes, strict=True)
        return [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]


def merged(entries: object) -> Mapping[str, Any]:
    """One update_info of a list with an entry for each worker.

    An engine receives whole tensors once, for all of its workers. So the entries must describe the
    same tensors; their IPC handles, which are of different GPUs, are put together.

    Raises:
        RequestError: it is no list of mappings, it is empty, or the entries differ.
    """
    if isinstance(entries, Mapping):
        return entries
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise RequestError(f"update_info must be a dict, got {type(entries).__name__}")
    if not entries or not all(isinstance(each, Mapping) for each in entries):
        raise RequestError("update_info must be a dict, or a list with one for each worker")
    first = dict(entries[0])
    handles = [each.get("ipc_handles") for each in entries]
    for each in entries[1:]:
        if {**each, "ipc_handles": None} != {**first, "ipc_handles": None}:
            raise RequestError(
                "the entries of update_info describe different tensors: a list has one entry for "
                "each worker; send parts of the weights by several calls of update_weights"
            )
    if "ipc_handles" in first:
        first["ipc_handles"] = _merged_handles(handles)
    return first


def _merged_handles(handles: Sequence[Any]) -> Any:
    if all(isinstance(each, Mapping) for each in handles):
        return {uuid: handle for each in handles for uuid, handle in each.items()}
    is_list = all(isinstance(each, list | tuple) for each in handles)
    if not is_list or len({len(each) for each in handles}) != 1:
        raise RequestError("the entries of update_info have different kinds of ipc_handles")
    return [_merged_handles(those) for those in zip(*handles, strict=True)]
