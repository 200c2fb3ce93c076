"""Buckets of weights: every element is sent once, for all sizes of tensors and buckets."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm.errors import ProtocolMismatchError, RequestError
from shmllm.wire.weight_bucket import (
    Bucket,
    Piece,
    Source,
    as_pieces,
    device_bucket_bytes,
    pieces_of,
)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def send(tensors, size, on_device=False):
    """Send tensors through buckets of `size` bytes, in memory of torch if `on_device`. Returns
    (dtype, shape, pieces) by name."""
    arrived = {}
    bucket = memory = None

    def deliver():
        for name, dtype, shape, begin, length, offset in pieces_of(bucket.to_json(), size):
            found = arrived.setdefault(name, (dtype, shape, []))
            assert begin == sum(map(len, found[2]))
            kind = getattr(torch, dtype)
            if length:
                piece = torch.frombuffer(memory, dtype=kind, count=length, offset=offset)
                found[2].append(piece.clone())

    for name, tensor in tensors.items():
        source = Source(name, tensor, on_device)
        while True:
            if bucket is None:
                memory = bytearray(size)
                on_gpu = torch.frombuffer(memory, dtype=torch.uint8)
                bucket = Bucket(on_gpu if on_device else memoryview(memory))
            bucket.fill(source)
            if bucket.is_full:
                deliver()
                bucket = None
            if source.is_sent:
                break
    if bucket is not None:
        deliver()
    return arrived


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(shapes, dtypes), max_size=6), st.sampled_from([64, 128, 1024]), st.booleans()
)
def test_every_element_arrives_once_and_in_order(kinds, size, on_device):
    tensors = {
        str(i): torch.arange(math.prod(shape)).to(dtype).reshape(shape)
        for i, (shape, dtype) in enumerate(kinds)
    }
    arrived = send(tensors, size, on_device)
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        dtype, shape, pieces = arrived[name]
        assert (getattr(torch, dtype), shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(torch.cat([tensor.new_empty(0), *pieces]), tensor.reshape(-1))


@pytest.mark.parametrize("on_device", [False, True])
def test_strided_tensors_gradients_and_arrays_can_be_sent(on_device):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "t": base.t(),
        "grad": base.clone().requires_grad_(),
        "half": base.bfloat16().t(),
        **({} if on_device else {"array": base.numpy()[:, ::2]}),
    }
    arrived = send(tensors, 64, on_device)
    for name, tensor in tensors.items():
        expected = torch.as_tensor(tensor).detach().reshape(-1)
        assert torch.equal(torch.cat(arrived[name][2]), expected)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (1, torch.ones(1)),
        ("a", [1.0]),
        ("a", None),
        ("a", np.array(["x"])),
        ("a", torch.ones(2, device="meta")),
        ("a", torch.ones(2).to_sparse()),
    ],
)
def test_an_invalid_weight_is_refused(name, tensor):
    with pytest.raises(RequestError):
        Source(name, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2).to_sparse(),
        torch.ones([1] * 9),
        torch.empty(1, dtype=torch.uint8).view(torch.bits8),
    ],
)
def test_an_invalid_weight_on_a_device_is_refused(tensor):
    with pytest.raises(RequestError, match="a: "):
        Source("a", tensor, on_device=True)


def test_a_source_on_a_device_copies_nothing_and_keeps_no_history():
    tensor = torch.ones(2, 3, requires_grad=True)
    flat = Source("a", tensor, on_device=True).flat
    assert flat.data_ptr() == tensor.data_ptr()
    assert not flat.requires_grad


MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "size"),
    [(0, 2 * MIB), (1, 2 * MIB), (2 * MIB + 1, 4 * MIB), (2**40, 256 * MIB)],
)
def test_a_bucket_on_a_device_is_as_large_as_the_tensors_and_no_larger_than_allowed(
    num_bytes, size
):
    assert device_bucket_bytes(num_bytes) == size


GOOD = ["a", "float32", [2, 2], 0, 4, 64]


def test_a_list_of_pieces_is_decoded():
    assert pieces_of(json.dumps([GOOD]), 128) == [Piece("a", "float32", (2, 2), 0, 4, 64)]


@pytest.mark.parametrize(
    "change",
    [
        *({0: 5}, {1: "int"}, {1: []}, {2: 4}, {2: [-1]}, {2: [1] * 9}),
        *({3: -1}, {3: 1.0}, {3: True}, {4: 17}, {4: 2**64}, {5: 65}, {5: 128}, {5: None}),
    ],
)
def test_an_inconsistent_list_of_pieces_is_refused(change):
    piece = [change.get(index, value) for index, value in enumerate(GOOD)]
    with pytest.raises(ProtocolMismatchError):
        pieces_of(json.dumps([piece]), 128)


@pytest.mark.parametrize("text", ["", "null", "3", "[1]", '["abcdef"]', "[[]]", "[" * 9999])
def test_a_text_that_is_not_a_list_of_pieces_is_refused(text):
    with pytest.raises(ProtocolMismatchError):
        pieces_of(text, 128)


@pytest.mark.parametrize("items", [None, 3, {"a": 1}, [3], ["abcdef"], [[]], [GOOD[:5]]])
def test_a_json_value_that_is_not_a_list_of_pieces_is_refused(items):
    with pytest.raises(ProtocolMismatchError, match="bucket of weights"):
        as_pieces(items, 128)
