"""Encodes and decodes remote procedure calls on the engine's worker, and their results.

The name of a method, its arguments and its result are sent as plain values and tensors. A function
is sent as a pickle, and its result may be a pickle, too: a front end that may run code in the
engine already has to be trusted. All other pickles are refused. This module must not know how the
encoded calls are transmitted.
"""

from __future__ import annotations

import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmllm.errors import CallError, ProtocolMismatchError, RequestError
from shmllm.wire.values import Tree, flatten, restore

Flat = tuple[Tree, list[Any]]
"""The result of `flatten`: a tree and its tensors."""


_by_value_lock = threading.Lock()
"""Held while modules are registered with cloudpickle, which has one registry for all threads."""


@dataclass(slots=True)
class RpcCall:
    """A call on the engine's worker.

    Attributes:
        method: the name of a method in the worker's `METHODS`, or a function, which gets the
            worker as its first argument.
    """

    method: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_function(self) -> bool:
        return not isinstance(self.method, str)


def call_on_model(worker: Any, function: Callable[[Any], Any]) -> Any:
    """Call a function with the worker's model. `LLM.apply_model` sends this function."""
    return function(worker.model)


def call_method(worker: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the worker's extension. `LLM.collective_rpc` sends this function."""
    return getattr(worker, method)(*args, **kwargs)


def encode_call(call: RpcCall) -> Flat:
    """Encode a call.

    Raises:
        RequestError: an argument of a method cannot be sent, or a function cannot be pickled.
    """
    if call.is_function:
        return flatten({"function": pickle_call(call)})
    try:
        return flatten({"method": call.method, "args": [*call.args], "kwargs": call.kwargs})
    except TypeError as problem:
        raise RequestError(
            f"the arguments of {call.method!r}: {problem}; pass a function instead"
        ) from None


def decode_call(tree: Tree, tensors: Sequence[Any], allow_functions: bool) -> RpcCall:
    """Decode a call.

    Args:
        tree: the tree of the call.
        tensors: the tensors of the call.
        allow_functions: whether the call may be a function.

    Raises:
        RequestError: the call is a function, which is not allowed, or which cannot be loaded in
            this process.
    """
    if not isinstance(tree, dict):
        raise ProtocolMismatchError("a call on the worker must be a JSON object")
    if "function" not in tree:
        content = restore(tree, tensors)
        return RpcCall(content["method"], tuple(content["args"]), content["kwargs"])
    if not allow_functions:
        raise RequestError(
            "this engine runs no functions of its front ends; start it with --allow-callables "
            "(allow_callables=True) if all of them may run any code in it"
        )
    try:
        method, args, kwargs = _cloudpickle().loads(restore(tree, tensors)["function"])
    except Exception as problem:
        raise RequestError(
            f"the function cannot be loaded in the engine: {type(problem).__name__}: {problem}"
        ) from problem
    return RpcCall(method, args, kwargs)


def encode_result(result: Any, call: RpcCall) -> Flat:
    """Encode the result of a call.

    Raises:
        TypeError: the result of a method cannot be sent.
    """
    try:
        return flatten({"value": result})
    except TypeError:
        if not call.is_function:
            raise
    return flatten({"pickle": _cloudpickle().dumps(result)})


def decode_result(tree: Tree, tensors: Sequence[Any], call: RpcCall) -> Any:
    """Decode the result of a call.

    Raises:
        CallError: the result is a pickle that cannot be loaded in this process.
    """
    content = restore(tree, tensors)
    if not isinstance(content, dict) or len(content) != 1:
        raise ProtocolMismatchError("a result of the worker must be a JSON object with one entry")
    if "value" in content:
        return content["value"]
    if not call.is_function or "pickle" not in content:
        kind = next(iter(content))
        raise ProtocolMismatchError(f"the engine sent a result of an unexpected kind: {kind!r}")
    try:
        return _cloudpickle().loads(content["pickle"])
    except Exception as problem:
        raise CallError(f"the result cannot be loaded here: {problem}") from problem


def pickle_call(call: RpcCall) -> bytes:
    """Pickle a function with its arguments and keyword arguments, for a process that may not be
    able to import its module.

    Raises:
        RequestError: it cannot be pickled.
    """
    try:
        with _by_value_lock, _by_value([call.method, *call.args]):
            data: bytes = _cloudpickle().dumps((call.method, call.args, call.kwargs))
            return data
    except Exception as problem:
        raise RequestError(
            f"the function or its arguments cannot be pickled: {type(problem).__name__}: {problem}"
        ) from problem


@contextmanager
def _by_value(values: Sequence[Any]) -> Iterator[None]:
    """Within the `with` block, pickle functions together with their modules, unless the engine can
    import those modules."""
    names = {getattr(value, "__module__", None) for value in values if callable(value)}
    modules = [sys.modules[name] for name in names - {None, "__main__"} if name in sys.modules]
    own = [module for module in modules if not _is_installed(module)]
    for module in own:
        _cloudpickle().register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            _cloudpickle().unregister_pickle_by_value(module)


def _is_installed(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return True
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    roots += [site.getusersitepackages(), str(Path(__file__).parents[2] / "shmllm")]
    return any(Path(file).is_relative_to(root) for root in roots)


def _cloudpickle() -> Any:
    """Import cloudpickle. The import takes 60 ms, and few front ends send functions."""
    import cloudpickle  # type: ignore[import-untyped]

    return cloudpickle
