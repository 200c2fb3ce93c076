"""Encodes Python values as a JSON tree and a list of tensors, and decodes them, without pickle.

This module owns the set of values that can be sent to another process, and their encoding. It must
not know how the tree and the tensors are transmitted. A value without an equal in JSON is an object
with the key "$":

    {"$": "tuple" | "set" | "dict", "of": [...]}    a dict's items are [key, value] lists
    {"$": "bytes" | "array" | "tensor", "at": i}    the i-th element of the list of tensors

This module does not import torch. The receiver decides which Python objects the list of tensors
holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shmllm.errors import ProtocolMismatchError

Tree = Any
"""A JSON tree."""
_PLAIN = (bool, int, float, str, type(None))
_KEY = "$"


def is_torch_tensor(value: object) -> bool:
    """Whether a value is a torch tensor or parameter. Does not import torch."""
    return any(
        base.__module__.startswith("torch") and base.__name__ == "Tensor"
        for base in type(value).__mro__
    )


def flatten(value: Any) -> tuple[Tree, list[Any]]:
    """Encode a value.

    Args:
        value: it may consist of None, bool, int, float, str, bytes, list, tuple, set, dict, numpy
            arrays and torch tensors. Subclasses of the Python types are not valid.

    Returns:
        The tree, and the list of tensors to which it refers.

    Raises:
        TypeError: the value contains an object of another type.
    """
    tensors: list[Any] = []
    return _flatten(value, tensors), tensors


def _flatten(value: Any, tensors: list[Any]) -> Tree:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_flatten(item, tensors) for item in value]
    if kind in (tuple, set):
        return {_KEY: kind.__name__, "of": [_flatten(item, tensors) for item in value]}
    if kind is dict:
        return _flatten_dict(value, tensors)
    if kind is bytes:
        return _put("bytes", np.frombuffer(value, np.uint8), tensors)
    if isinstance(value, np.ndarray | np.generic):
        return _put("array", value, tensors)
    if is_torch_tensor(value):
        return _put("tensor", value, tensors)
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be sent to another process")


def _flatten_dict(value: dict[Any, Any], tensors: list[Any]) -> Tree:
    if _KEY not in value and all(type(key) is str for key in value):
        return {key: _flatten(item, tensors) for key, item in value.items()}
    items = [[_flatten(key, tensors), _flatten(item, tensors)] for key, item in value.items()]
    return {_KEY: "dict", "of": items}


def _put(kind: str, source: Any, tensors: list[Any]) -> Tree:
    tensors.append(source)
    return {_KEY: kind, "at": len(tensors) - 1}


def tensor_kinds(tree: Tree, count: int) -> list[str]:
    """The kind of each of the `count` tensors of a tree: "bytes", "array" or "tensor".

    Raises:
        ProtocolMismatchError: the tree does not refer to each of the tensors exactly once.
    """
    kinds: dict[int, str] = {}
    _collect(tree, kinds)
    if sorted(kinds) != list(range(count)):
        raise ProtocolMismatchError(f"a value refers to tensors {sorted(kinds)} of {count}")
    return [kinds[index] for index in range(count)]


def _collect(tree: Tree, kinds: dict[int, str]) -> None:
    if isinstance(tree, list):
        for item in tree:
            _collect(item, kinds)
    elif isinstance(tree, dict):
        if "at" in tree and tree.get(_KEY) in ("bytes", "array", "tensor"):
            if not isinstance(tree["at"], int) or tree["at"] in kinds:
                raise ProtocolMismatchError(
                    f"a value refers twice to tensor {tree['at']!r}, or that is not an index"
                )
            kinds[tree["at"]] = tree[_KEY]
        else:
            for item in tree.values():
                _collect(item, kinds)


def restore(tree: Tree, tensors: Sequence[Any]) -> Any:
    """Decode a value.

    Args:
        tree: the tree that `flatten` returned.
        tensors: the object that replaces each tensor.

    Raises:
        ProtocolMismatchError: the tree is not valid.
    """
    if isinstance(tree, list):
        return [restore(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _KEY not in tree:
        return {key: restore(item, tensors) for key, item in tree.items()}
    try:
        return _restore_marked(tree, tensors)
    except (KeyError, IndexError, TypeError, ValueError) as problem:
        raise ProtocolMismatchError(f"not a valid value: {problem!r}") from problem


def _restore_marked(tree: dict[str, Any], tensors: Sequence[Any]) -> Any:
    match tree[_KEY]:
        case "tuple":
            return tuple(restore(tree["of"], tensors))
        case "set":
            return set(restore(tree["of"], tensors))
        case "dict":
            return {restore(k, tensors): restore(v, tensors) for k, v in tree["of"]}
        case "bytes" | "array" | "tensor":
            return tensors[tree["at"]]
        case other:
            raise ProtocolMismatchError(f"{other!r} is not a kind of value")
