"""CUDA IPC handles of torch's tensors as plain values, which JSON can hold.

A handle is what `torch.multiprocessing.reductions.reduce_tensor` makes: the arguments of
`rebuild_cuda_tensor`. Its classes are left out, because they are always Tensor and UntypedStorage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmllm.errors import RequestError

FIELDS: tuple[tuple[str, type], ...] = (
    ("tensor_class", object),
    ("size", list),
    ("stride", list),
    ("offset", int),
    ("storage_class", object),
    ("dtype", str),
    ("device", int),
    ("handle", bytes),
    ("storage_bytes", int),
    ("storage_offset_bytes", int),
    ("requires_grad", bool),
    ("counter_handle", bytes),
    ("counter_offset", int),
    ("event_handle", bytes),
    ("event_sync", bool),
)
"""The arguments of rebuild_cuda_tensor in their order, with the kinds of their plain values."""

_DEVICE = 6


def plain_handles(handles: object) -> Any:
    """IPC handles without torch's objects, for a message.

    Args:
        handles: a dict of GPU uuid -> arguments of rebuild_cuda_tensor, or a list of such dicts.

    Raises:
        RequestError: they are something else.
    """
    if isinstance(handles, Mapping):
        return {str(uuid): _plain(uuid, arguments) for uuid, arguments in handles.items()}
    if isinstance(handles, list | tuple) and all(isinstance(each, Mapping) for each in handles):
        return [plain_handles(each) for each in handles]
    raise RequestError("ipc_handles must be a dict of GPU uuids and handles, or a list of such")


def handle_on(handles: object, uuid: str, device_index: int) -> tuple[Any, ...]:
    """The arguments with which an engine rebuilds a tensor.

    Args:
        handles: a plain dict of GPU uuid -> handle.
        uuid: the engine's GPU.
        device_index: its index in this process.

    Raises:
        RequestError: none of the handles is of this GPU, or it is not valid.
    """
    if not isinstance(handles, Mapping):
        raise RequestError(f"an IPC handle must be a dict by GPU uuid, got {handles!r:.80}")
    if uuid not in handles:
        known = ", ".join(map(str, handles)) or "none"
        raise RequestError(f"no IPC handle is of the engine's GPU {uuid}; they are of: {known}")
    import torch

    values = [_value(*each) for each in zip(FIELDS, _checked(uuid, handles[uuid]), strict=True)]
    dtype = getattr(torch, values[5].removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(f"the dtype of an IPC handle is not one of torch: {values[5]!r}")
    values[0], values[4], values[5] = torch.Tensor, torch.UntypedStorage, dtype
    values[_DEVICE] = device_index
    return tuple(values)


def _checked(uuid: object, arguments: object) -> Sequence[Any]:
    if not isinstance(arguments, list | tuple) or len(arguments) != len(FIELDS):
        raise RequestError(
            f"the IPC handle of {uuid} must be the {len(FIELDS)} arguments of rebuild_cuda_tensor"
        )
    return arguments


def _plain(uuid: object, arguments: object) -> list[Any]:
    plain: list[Any] = []
    for (_, kind), value in zip(FIELDS, _checked(uuid, arguments), strict=True):
        if kind is object:
            plain.append(None)
        elif kind is bytes:
            plain.append(value.hex() if isinstance(value, bytes) else value)
        elif kind is list:
            plain.append([*value])
        else:
            plain.append(str(value) if kind is str else value)
    return plain


def _value(field: tuple[str, type], value: Any) -> Any:
    """A field's value of a plain one. Raises RequestError if that is not valid: torch would read
    memory that it has not mapped."""
    name, kind = field
    try:
        if kind is object:
            return None
        if kind is bytes:
            return bytes.fromhex(value)
        is_valid = isinstance(value, kind)
        if kind is list:
            is_valid = is_valid and all(type(each) is int and each >= 0 for each in value)
        elif kind is int:
            is_valid = type(value) is int and value >= 0
        if is_valid:
            return tuple(value) if kind is list else value
    except (TypeError, ValueError):
        pass
    raise RequestError(f"the {name} of an IPC handle is not valid: {value!r:.80}")
