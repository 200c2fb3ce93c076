"""What the front end has the engine's worker do, and its result, as something that can travel.

Owns the two crossings. A method's name, its arguments and the result are plain values and
tensors. A function crosses as a pickle, and so may what it returns: code runs in the engine
on behalf of who sent it, so whoever may send one may also be answered with one. Pickles in
any other place are refused.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmllm.errors import CallError, ProtocolMismatchError, RequestError
from shmllm.wire.values import Tree, flatten, restore

Flat = tuple[Tree, list[Any]]
"""A tree and its tensors, as `flatten` makes them."""


@dataclass(slots=True)
class RpcCall:
    """
    Attributes:
        method: a name of the worker's `METHODS`, or a function whose first argument is the
            worker.
    """

    method: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_function(self) -> bool:
        return not isinstance(self.method, str)


def call_on_model(worker: Any, function: Callable[[Any], Any]) -> Any:
    """Call a function with the worker's model: what `LLM.apply_model` sends to the engine."""
    return function(worker.model)


def encode_call(call: RpcCall) -> Flat:
    """
    Raises:
        RequestError: arguments of a method that cannot cross, or a function that cannot be
            pickled.
    """
    if call.is_function:
        return flatten({"function": _pickle(call)})
    try:
        return flatten({"method": call.method, "args": [*call.args], "kwargs": call.kwargs})
    except TypeError as problem:
        raise RequestError(
            f"the arguments of {call.method!r}: {problem}; pass a function instead"
        ) from None


def decode_call(tree: Tree, tensors: Sequence[Any], allow_functions: bool) -> RpcCall:
    """
    Raises:
        RequestError: a function where none is allowed, or one that this process cannot load.
    """
    if not isinstance(tree, dict):
        raise ProtocolMismatchError("a worker's call is an object")
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
    """
    Raises:
        TypeError: what a method returned cannot cross.
    """
    try:
        return flatten({"value": result})
    except TypeError:
        if not call.is_function:
            raise
    return flatten({"pickle": _cloudpickle().dumps(result)})


def decode_result(tree: Tree, tensors: Sequence[Any], call: RpcCall) -> Any:
    """
    Raises:
        CallError: a pickle that this process cannot load.
    """
    content = restore(tree, tensors)
    if not isinstance(content, dict) or len(content) != 1:
        raise ProtocolMismatchError("a worker's answer is an object with one entry")
    if "value" in content:
        return content["value"]
    if not call.is_function or "pickle" not in content:
        raise ProtocolMismatchError("the engine answered with a pickle that nobody asked for")
    try:
        return _cloudpickle().loads(content["pickle"])
    except Exception as problem:
        raise CallError(f"the result cannot be loaded here: {problem}") from problem


def _pickle(call: RpcCall) -> bytes:
    try:
        with _by_value([call.method, *call.args]):
            data: bytes = _cloudpickle().dumps((call.method, call.args, call.kwargs))
            return data
    except Exception as problem:
        raise RequestError(
            f"the function or its arguments cannot be pickled: {type(problem).__name__}: {problem}"
        ) from problem


@contextmanager
def _by_value(values: Sequence[Any]) -> Iterator[None]:
    """Has the modules of functions pickled with them, unless the engine can import those."""
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
    """Imported where it is needed: it takes 60 ms, and few front ends send functions."""
    import cloudpickle  # type: ignore[import-untyped]

    return cloudpickle
