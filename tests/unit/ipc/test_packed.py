"""Several tensors in one slot: they arrive bit for bit, and invalid references are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from shmllm.errors import MessageTooLargeError, ProtocolMismatchError
from shmllm.ipc.layout import SlotClass, SlotLayout
from shmllm.ipc.packed import PackedRef, as_torch, try_put_all, view_all
from shmllm.ipc.slots import SlotReader, SlotWriter

SLOT = 64 * 1024
LAYOUT = SlotLayout(table_offset=0, classes=(SlotClass(4096, 2, SLOT, SLOT, True),))
TENSORS = [
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    torch.tensor(3.5, dtype=torch.float64),
    torch.zeros(0, 4),
    torch.tensor([True, False]),
    torch.randn(100),
]


class Ends:
    """Both ends of two slots in ordinary memory."""

    def __init__(self) -> None:
        memory = memoryview(bytearray(4096 + 2 * SLOT))
        self.writer = SlotWriter(memory, LAYOUT, lambda *_: None, lambda *_: None)
        self.reader = SlotReader(memory, LAYOUT)

    def send(self, sources: list[Any]) -> PackedRef:
        ref = try_put_all(self.writer, sources)
        assert ref is not None
        return PackedRef.from_json(json.loads(json.dumps(ref.to_json())))


def test_tensors_of_all_kinds_arrive_unchanged() -> None:
    ends = Ends()
    ref = ends.send(TENSORS)
    with view_all(ends.reader, ref) as arrays:
        received = [
            as_torch(array, packed.dtype).clone()
            for array, packed in zip(arrays, ref.tensors, strict=True)
        ]
    for sent, got in zip(TENSORS, received, strict=True):
        assert sent.dtype is got.dtype
        assert torch.equal(sent, got)
    assert ends.writer.num_free == 2


def test_arrays_arrive_with_their_shape() -> None:
    ends = Ends()
    sources = [np.arange(5, dtype=np.int64)[::2], np.float32(2), np.ones((2, 3), ">f8")]
    with view_all(ends.reader, ends.send(sources)) as arrays:
        for source, array in zip(sources, arrays, strict=True):
            assert array.shape == np.shape(source)
            assert np.array_equal(array, source)


def test_each_tensor_begins_at_an_aligned_offset() -> None:
    ref = Ends().send([np.zeros(n, np.uint8) for n in (1, 64, 65, 0, 3)])
    assert [tensor.offset for tensor in ref.tensors] == [0, 64, 128, 256, 256]


def test_the_reader_holds_the_slot_until_the_view_ends() -> None:
    ends = Ends()
    refs = [ends.send([torch.ones(4)]) for _ in range(2)]
    assert try_put_all(ends.writer, [torch.ones(4)]) is None
    for ref in refs:
        with pytest.raises(KeyError), view_all(ends.reader, ref):
            raise KeyError
    assert ends.writer.num_free == 2
    with (
        pytest.raises(ProtocolMismatchError, match="not published"),
        view_all(ends.reader, refs[0]),
    ):
        pass


def test_sources_that_cannot_be_sent_leave_the_slots_free() -> None:
    ends = Ends()
    for sources, kind in (
        ([torch.ones(4), object()], TypeError),
        ([torch.ones(SLOT)], MessageTooLargeError),
        ([np.array(["text"])], TypeError),
    ):
        with pytest.raises(kind):
            try_put_all(ends.writer, sources)
    assert ends.writer.num_free == 2


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [[0, 0], []],
        [[0, 0, -1], []],
        [[0, 0, True], []],
        [[0, 0, 64], [["float32", [17], 0]]],
        [[0, 0, 64], [["float32", [1], 64]]],
        [[0, 0, 64], [["float32", [1], 4]]],
        [[0, 0, 64], [["float99", [1], 0]]],
        [[0, 0, 64], [["float32", [-1], 0]]],
        [[0, 0, 64], [["float32", [0, 2**62], 0]]],
        [[0, 0, 64], [["uint8", [1] * 9, 0]]],
        [[0, 0, 64], [["uint8", 1, 0]]],
    ],
)
def test_a_reference_that_contradicts_itself_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolMismatchError):
        PackedRef.from_json(value)
