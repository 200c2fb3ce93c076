"""Intercepts the operations of torch and the kernel launches that concern a `FakeGpu`.

This module owns which tensors are on the device, and whether CUDA would queue a call, make the host
wait, or refuse it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

if TYPE_CHECKING:
    from support.fake_gpu import FakeGpu

HOST = torch.device("cpu")
_aten = torch.ops.aten
_DEVICE_OF = torch.Tensor.device.__get__
_EMPTY = (
    *("aten::empty", "aten::empty_like", "aten::empty_strided"),
    *("aten::new_empty", "aten::new_empty_strided"),
)
CONTAINERS = tuple, list, dict
"""Kinds whose subclasses, such as the results of `torch.max`, are left to `pytree`."""
_SAME_MEMORY = ("aten::lift_fresh", "aten::_unsafe_view", "aten::detach", "aten::alias")


@dataclass(slots=True)
class Operation:
    """An operation for the device's queue.

    Attributes:
        name: the name for `FakeGpu.launched`.
        run: executes the operation.
    """

    name: str
    run: Callable[[], object]


def mark(tensor: Tensor) -> Tensor:
    """Put a tensor, and all tensors that share its memory, on the device."""
    tensor.untyped_storage().is_on_device = True  # type: ignore[attr-defined]
    return tensor


def is_on_device(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "is_on_device", False)


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "is_pinned_host", False)


def tensors_in(*trees: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in leaves_of(trees) if isinstance(leaf, Tensor)]


def leaves_of(tree: Any) -> list[Any]:
    """Return what is in nested tuples, lists and dicts, as `pytree.tree_leaves` does in ten times
    the time."""
    leaves: list[Any] = []
    rest = [tree]
    while rest:
        part = rest.pop()
        kind = part.__class__
        if kind is tuple or kind is list:
            rest.extend(part[::-1])
        elif kind is dict:
            rest.extend([*part.values()][::-1])
        elif isinstance(part, CONTAINERS):
            leaves.extend(pytree.tree_leaves(part))
        else:
            leaves.append(part)
    return leaves


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return nested tuples, lists and dicts with other tensors."""
    kind = tree.__class__
    if kind is tuple:
        return tuple([map_tensors(function, part) for part in tree])
    if kind is list:
        return [map_tensors(function, part) for part in tree]
    if kind is dict:
        return {name: map_tensors(function, part) for name, part in tree.items()}
    if isinstance(tree, CONTAINERS):
        return pytree.tree_map_only(Tensor, function, tree)
    return function(tree) if isinstance(tree, Tensor) else tree


class Intercept:
    """Intercepts calls from `open` to `close`."""

    def __init__(self, device: FakeGpu) -> None:
        self._device = device
        self._stack = contextlib.ExitStack()

    def open(self) -> None:
        self._stack.enter_context(Reads(self._device))
        self._stack.enter_context(Operations(self._device))
        original = GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._launch(lambda *a, **k: original(executor, *a, **k), executor, args, kwargs)

        self._stack.callback(setattr, GridExecutor, "__call__", original)
        GridExecutor.__call__ = launch

    def close(self) -> None:
        self._stack.close()

    def _launch(self, run: Callable[..., None], executor: Any, args: Any, kwargs: Any) -> None:
        devices = {is_on_device(tensor) for tensor in tensors_in(args, kwargs)}
        if self._device.is_bypassed or True not in devices:
            run(*args, **kwargs)
            return
        if False in devices:
            raise ValueError(f"{executor.fn.__name__}: a pointer is the host's (cpu tensor?)")
        _submit(self._device, executor.fn.__name__, run, args, kwargs)


def _submit(device: FakeGpu, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
    args, kwargs = map_tensors(device.borrowed, (args, kwargs))
    device.submit(Operation(name, lambda: run(*args, **kwargs)))


class Reads(TorchFunctionMode):
    """Intercepts methods that read or make tensors without an operation that `Operations` sees."""

    def __init__(self, device: FakeGpu) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if self._device.is_bypassed:
            return function(*args, **kwargs)
        if name in ("tensor", "as_tensor") and kwargs.get("device") == self._device.torch_device:
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if args and isinstance(args[0], Tensor) and is_on_device(args[0]):
            if function == _DEVICE_OF:
                return self._device.torch_device
            if name in ("numpy", "__array__"):
                raise TypeError("a tensor of the device has no numpy array: .cpu() first")
            if name == "tolist":
                self._device.wait_implicitly("tolist")
            if name == "cpu" or (name == "to" and _goes_to_host(args[1:], kwargs)):
                self._device.wait_implicitly(name)
                with self._device.bypassed():
                    copy = args[0].clone()
                    return function(copy, *args[1:], **kwargs)
        return function(*args, **kwargs)


def _goes_to_host(args: Any, kwargs: Any) -> bool:
    return any(
        value == "cpu" or (isinstance(value, torch.device) and value == HOST)
        for value in (*args, kwargs.get("device"))
        if isinstance(value, str | torch.device)
    )


class Operations(TorchDispatchMode):
    """Intercepts operations on tensors of the device."""

    def __init__(self, device: FakeGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo, which takes seconds

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._device.is_bypassed or not self._concerns_device(args, kwargs):
            return function(*args, **kwargs)
        with self:  # in inference mode, composite operations arrive undecomposed
            result = function.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if function is _aten.copy_.default:
            return self._copy(*args, **kwargs)
        if function is _aten._to_copy.default:
            return self._to_copy(args[0], kwargs)
        if function.is_view or _name(function) in _SAME_MEMORY or _has(function, "inplace_view"):
            return function(*args, **kwargs)
        if _is_decided_by_values(function, args):
            self._device.wait_implicitly(_name(function))
            return map_tensors(mark, function(*args, **kwargs))
        args, kwargs = map_tensors(self._as_constant, (args, kwargs))
        if any(argument.is_write for argument in _aliases(function)):
            _submit(self._device, _name(function), function, args, kwargs)
            return _written(function, args, kwargs)
        return self._compute(function, args, kwargs)

    def _concerns_device(self, args: Any, kwargs: Any) -> bool:
        return any(
            is_on_device(leaf) if isinstance(leaf, Tensor) else leaf == self._device.torch_device
            for leaf in leaves_of((args, kwargs))
            if isinstance(leaf, Tensor | torch.device)
        )

    def _as_constant(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor that is one number, as CUDA does; refuse other host tensors."""
        if is_on_device(tensor):
            return tensor
        if tensor.dim():
            raise RuntimeError(
                f"expected all tensors to be on the same device, found one of shape "
                f"{list(tensor.shape)} on the host"
            )
        return tensor.clone()

    def _compute(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Queue a function whose results are new tensors."""
        meta_kwargs = dict(kwargs)
        if "device" in kwargs:
            meta_kwargs["device"] = torch.device("meta")
        meta_args, meta_kwargs = map_tensors(_meta, (args, meta_kwargs))
        shapes = function(*meta_args, **meta_kwargs)
        results = map_tensors(self._device.allocate, shapes)
        targets = tensors_in(results)
        if targets and _name(function) not in _EMPTY:

            def run(targets: Any, args: Any, kwargs: Any) -> None:
                values = tensors_in(function(*args, **kwargs))
                for target, value in zip(targets, values, strict=True):
                    target.copy_(value)

            _submit(self._device, _name(function), run, (targets, args, kwargs), {})
        return results

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        ends = target, source
        is_pinned_or_there = all(is_on_device(end) or is_pinned(end) for end in ends)
        is_from_host = not is_on_device(source)
        if all(map(is_on_device, ends)) or (non_blocking and is_pinned_or_there):
            _submit(self._device, "copy", _aten.copy_.default, ends, {})
        elif non_blocking and is_from_host:
            self._device.refuse_in_capture("a copy from memory of the host that is not pinned")
            _submit(self._device, "copy", _aten.copy_.default, (target, source.clone()), {})
        else:
            self._device.wait_implicitly("a copy that blocks")
            self._device.launched.append("copy")
            target.copy_(source)
        return target

    def _to_copy(self, source: Tensor, kwargs: Any) -> Tensor:
        non_blocking = kwargs.get("non_blocking", False)
        kwargs = {name: value for name, value in kwargs.items() if name != "non_blocking"}
        if kwargs.get("device") == HOST:
            self._device.wait_implicitly("a copy to the host")
            on_host: Tensor = _aten._to_copy.default(source, **kwargs)
            return on_host
        if is_on_device(source):
            if "device" in kwargs and kwargs.get("dtype", source.dtype) == source.dtype:
                return source  # the tensor is on the device already
            converted: Tensor = self._compute(_aten._to_copy.default, (source,), kwargs)
            return converted
        shape = _aten._to_copy.default(_meta(source), **kwargs | {"device": torch.device("meta")})
        return self._copy(self._device.allocate(shape), source, non_blocking)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _name(function: Any) -> str:
    return str(function._schema.name)


def _has(function: Any, tag: str) -> bool:
    return getattr(torch.Tag, tag) in function.tags


def _is_decided_by_values(function: Any, args: Any) -> bool:
    """Return whether the host needs the values of a tensor to continue; CUDA waits then."""
    if function in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default):
        kinds = {index.dtype for index in args[1] if index is not None}
        return bool(kinds & {torch.bool, torch.uint8})
    return _has(function, "data_dependent_output") or _has(function, "dynamic_output_shape")


def _aliases(function: Any) -> list[Any]:
    arguments = function._schema.arguments
    return [argument.alias_info for argument in arguments if argument.alias_info is not None]


def _written(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments that an operation writes to, which are its results."""
    schema = function._schema
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    by_alias = {
        frozenset(argument.alias_info.before_set): given[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.name in given
    }
    results = tuple(by_alias[frozenset(r.alias_info.before_set)] for r in schema.returns)
    return results[0] if len(results) == 1 else results or None
