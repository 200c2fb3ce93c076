"""Values are encoded as a tree and tensors, and decoded without a change."""

from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmllm.errors import ProtocolMismatchError
from shmllm.wire.values import flatten, restore, tensor_kinds

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    plain | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$") | st.integers(), inner)
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


def encode_and_decode(value):
    tree, tensors = flatten(value)
    tree = json.loads(json.dumps(tree))
    kinds = tensor_kinds(tree, len(tensors))
    received = [
        each.tobytes() if kind == "bytes" else each
        for kind, each in zip(kinds, tensors, strict=True)
    ]
    return restore(tree, received)


def types_of(value):
    """The types in a value. A comparison of values alone would not distinguish True and 1."""
    if isinstance(value, dict):
        return "dict", sorted((repr(k), types_of(k), types_of(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, [types_of(item) for item in value]
    return type(value).__name__


@given(values)
def test_a_decoded_value_has_the_same_types(value):
    assert encode_and_decode(value) == value
    assert types_of(encode_and_decode(value)) == types_of(value)


def test_arrays_and_tensors_are_replaced_by_their_index():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(2))
    tree, tensors = flatten({"a": [np.arange(3), parameter], "b": np.float32(2)})
    assert tensor_kinds(tree, 3) == ["array", "tensor", "array"]
    assert restore(tree, tensors)["a"][1] is parameter


@pytest.mark.parametrize("value", [object(), OrderedDict(a=1), [1, {2: lambda: 0}], 1j, range(3)])
def test_values_of_other_types_are_refused(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        flatten(value)


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "function", "of": []},
        {"$": "tuple"},
        {"$": "tensor", "at": 7},
        {"$": "dict", "of": [[1]]},
        {"$": "set", "of": [[]]},
    ],
)
def test_invalid_trees_are_refused(tree):
    with pytest.raises(ProtocolMismatchError):
        restore(tree, [])


@pytest.mark.parametrize(
    ("tree", "count"),
    [
        ([{"$": "array", "at": 0}, {"$": "array", "at": 0}], 1),
        ([{"$": "array", "at": 1}], 1),
        ([], 1),
        ({"$": "bytes", "at": "0"}, 1),
    ],
)
def test_a_tree_must_refer_to_every_tensor_once(tree, count):
    with pytest.raises(ProtocolMismatchError):
        tensor_kinds(tree, count)
