"""Python values as a JSON tree and a list of tensors, and back, without pickles.

Owns which values can cross a process boundary and how each is spelled; must not know how
the text and the tensors travel. What is no plain JSON value is an object with the key "$":

    {"$": "tuple" | "set" | "dict", "of": [...]}    a dict's items as [key, value]
    {"$": "bytes" | "array" | "tensor", "at": i}    the i-th tensor of the list

torch is not imported: a tensor of the list comes back as whatever the list holds there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shmllm.errors import ProtocolMismatchError

Tree = Any
_PLAIN = (bool, int, float, str, type(None))
_KEY = "$"


def is_torch_tensor(value: object) -> bool:
    """Whether it is a tensor or a parameter of torch's; does not import torch."""
    return any(
        base.__module__.startswith("torch") and base.__name__ == "Tensor"
        for base in type(value).__mro__
    )


def flatten(value: Any) -> tuple[Tree, list[Any]]:
    """The tree of a value, and the tensors and arrays in it in the order of their numbers.

    Raises:
        TypeError: it contains what is none of: None, bool, int, float, str, bytes, list,
            tuple, set, dict, numpy array, torch tensor. Subclasses of these count as
            something else.
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
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot cross to another process")


def _flatten_dict(value: dict[Any, Any], tensors: list[Any]) -> Tree:
    if _KEY not in value and all(type(key) is str for key in value):
        return {key: _flatten(item, tensors) for key, item in value.items()}
    items = [[_flatten(key, tensors), _flatten(item, tensors)] for key, item in value.items()]
    return {_KEY: "dict", "of": items}


def _put(kind: str, source: Any, tensors: list[Any]) -> Tree:
    tensors.append(source)
    return {_KEY: kind, "at": len(tensors) - 1}


def is_bytes(tree: Tree) -> bool:
    """Whether the tree is that of a bytes object."""
    return isinstance(tree, dict) and tree.get(_KEY) == "bytes"


def tensor_kinds(tree: Tree, count: int) -> list[str]:
    """ "bytes", "array" or "tensor" for each of the `count` tensors of a tree.

    Raises:
        ProtocolMismatchError: the tree names others, or one twice, or not all.
    """
    kinds: dict[int, str] = {}
    _collect(tree, kinds)
    if sorted(kinds) != list(range(count)):
        raise ProtocolMismatchError(f"a value names tensors {sorted(kinds)} of {count}")
    return [kinds[index] for index in range(count)]


def _collect(tree: Tree, kinds: dict[int, str]) -> None:
    if isinstance(tree, list):
        for item in tree:
            _collect(item, kinds)
    elif isinstance(tree, dict):
        if "at" in tree and tree.get(_KEY) in ("bytes", "array", "tensor"):
            if not isinstance(tree["at"], int) or tree["at"] in kinds:
                raise ProtocolMismatchError(f"a value names tensor {tree['at']!r} twice or wrongly")
            kinds[tree["at"]] = tree[_KEY]
        else:
            for item in tree.values():
                _collect(item, kinds)


def restore(tree: Tree, tensors: Sequence[Any]) -> Any:
    """The value again.

    Args:
        tree: as `flatten` made it.
        tensors: for each number what is to stand there.

    Raises:
        ProtocolMismatchError: it is no such tree.
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
        raise ProtocolMismatchError(f"no value: {problem!r}") from problem


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
            raise ProtocolMismatchError(f"no value is spelled {other!r}")
