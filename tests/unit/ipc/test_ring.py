from __future__ import annotations

import contextlib
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm.errors import MessageTooLargeError, ProtocolMismatchError
from shmllm.ipc.layout import PADDING_KIND, RECORD_HEADER
from shmllm.ipc.ring import RingWriter
from shmllm.ipc.ring_reader import RingReader
from shmllm.ipc.words import PlainWord

CAPACITY = 256


class Ring:
    """Both ends of a ring in ordinary memory."""

    def __init__(self, capacity: int = CAPACITY, start: int = 0) -> None:
        self.memory = bytearray(capacity)
        self.words = bytearray(16)
        self.published = PlainWord(memoryview(self.words), 0)
        self.consumed = PlainWord(memoryview(self.words), 8)
        self.published.store(start)
        self.consumed.store(start)
        self.writer = RingWriter(memoryview(self.memory), self.published, self.consumed)
        self.reader = RingReader(memoryview(self.memory), self.published, self.consumed)

    def take(self, limit: int = 0) -> list[tuple[int, bytes]]:
        got: list[tuple[int, bytes]] = []
        self.reader.drain(lambda kind, view: got.append((kind, bytes(view))), limit)
        return got

    def check(self) -> None:
        self.writer.check_integrity()
        self.reader.check_integrity()


def test_records_come_out_in_order_with_their_kinds() -> None:
    ring = Ring()
    assert ring.writer.try_write(1, b"one")
    assert ring.writer.try_write(2)
    assert ring.writer.try_write(3, b"a", bytearray(b"bc"), memoryview(b"d"))
    assert ring.reader.has_data()
    assert ring.take() == [(1, b"one"), (2, b""), (3, b"abcd")]
    assert not ring.reader.has_data()
    assert ring.take() == []
    ring.check()


def test_arrays_of_any_type_and_shape_are_parts() -> None:
    ring = Ring()
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert ring.writer.try_write(1, b"<", array, np.empty((0, 4)), memoryview(array[0]), b">")
    assert ring.take() == [(1, b"<" + array.tobytes() + array[0].tobytes() + b">")]


def test_a_limit_leaves_later_records_unread() -> None:
    ring = Ring()
    for kind in range(4):
        ring.writer.try_write(kind, b"x")
    assert [kind for kind, _ in ring.take(limit=3)] == [0, 1, 2]
    assert [kind for kind, _ in ring.take(limit=3)] == [3]


def test_a_write_to_a_full_ring_returns_false_and_changes_nothing() -> None:
    ring = Ring()
    while ring.writer.try_write(1, b"x" * 40):
        pass
    before = bytes(ring.memory), ring.published.load(), ring.writer.free_bytes
    assert not ring.writer.try_write(1, b"x" * 40)
    assert (bytes(ring.memory), ring.published.load(), ring.writer.free_bytes) == before
    assert ring.writer.statistics().times_full == 2
    ring.take(limit=1)
    assert ring.writer.try_write(1, b"x" * 40)
    ring.check()


def test_the_largest_message_fits_an_empty_ring_at_every_position() -> None:
    ring = Ring()
    payload = bytes(range(ring.writer.max_payload_bytes))
    for _ in range(CAPACITY):
        assert ring.writer.try_write(1, payload)
        assert ring.take() == [(1, payload)]
        assert ring.writer.try_write(2)
        assert ring.take() == [(2, b"")]
    ring.check()


def test_the_error_for_a_message_that_is_too_large_names_both_sizes() -> None:
    ring = Ring()
    with pytest.raises(MessageTooLargeError, match=r"113 bytes exceeds the 112 bytes"):
        ring.writer.try_write(1, bytes(113))
    with pytest.raises(MessageTooLargeError):
        ring.writer.try_write(1, bytes(10**6))
    ring.check()


@pytest.mark.parametrize("kind", [-1, PADDING_KIND, 2**16])
def test_a_kind_outside_its_range_is_refused(kind: int) -> None:
    with pytest.raises(ValueError, match="message kind"):
        Ring().writer.try_write(kind, b"x")


@pytest.mark.parametrize("capacity", [0, 32, 96, 255])
def test_a_capacity_that_is_no_power_of_two_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Ring(capacity)


def test_a_damaged_cursor_is_refused_at_each_write() -> None:
    """The writer must not keep it, or its next record would replace unread ones."""
    ring = Ring()
    while ring.writer.try_write(1, b"x" * 40):
        pass
    before = bytes(ring.memory)
    ring.consumed.store(2**63 - 16)
    for _ in range(2):
        with pytest.raises(ProtocolMismatchError, match="make no sense"):
            ring.writer.try_write(1, b"x" * 40)
    assert bytes(ring.memory) == before


class RecordingWord(PlainWord):
    """Keeps a copy of the ring's memory at each store."""

    __slots__ = ("memory", "snapshots")

    def store(self, value: int) -> None:
        self.snapshots.append((value, bytes(self.memory)))
        super().store(value)


def _recording_writer(start: int) -> tuple[RingWriter, RecordingWord, bytearray]:
    memory, words = bytearray(CAPACITY), bytearray(16)
    published = RecordingWord(memoryview(words), 0)
    published.memory, published.snapshots = memory, []
    consumed = PlainWord(memoryview(words), 8)
    consumed.store(start)
    PlainWord.store(published, start)
    return RingWriter(memoryview(memory), published, consumed), published, memory


@pytest.mark.parametrize("start", [0, CAPACITY - 32])
def test_everything_is_stored_before_the_cursor(start: int) -> None:
    writer, published, memory = _recording_writer(start)
    assert writer.try_write(9, b"head", b"body" * 10)
    ((end, snapshot),) = published.snapshots
    assert snapshot == memory
    reader_words = bytearray(16)
    words = [PlainWord(memoryview(reader_words), offset) for offset in (0, 8)]
    words[0].store(end)
    words[1].store(start)
    got: list[tuple[int, bytes]] = []
    reader = RingReader(memoryview(bytearray(snapshot)), *words)
    reader.drain(lambda kind, view: got.append((kind, bytes(view))))
    assert got == [(9, b"head" + b"body" * 10)]


def test_the_reader_moves_its_cursor_once_per_batch_after_the_last_read() -> None:
    ring = Ring()
    events: list[str] = []

    class Consumed(PlainWord):
        __slots__ = ()

        def store(self, value: int) -> None:
            events.append("consumed")
            super().store(value)

    reader = RingReader(
        memoryview(ring.memory), ring.published, Consumed(memoryview(ring.words), 8)
    )
    for _ in range(3):
        ring.writer.try_write(1, b"x")
    reader.drain(lambda kind, view: events.append("handled"))
    assert events == ["handled", "handled", "handled", "consumed"]


def test_a_handler_that_raises_loses_only_its_own_record() -> None:
    ring = Ring()
    for kind in range(3):
        ring.writer.try_write(kind, b"x" * 8)
    seen: list[int] = []

    def handler(kind: int, view: memoryview) -> None:
        seen.append(kind)
        array = np.frombuffer(view, dtype=np.uint8)
        if kind == 1:
            raise LookupError(f"no {array[0]}")

    with pytest.raises(LookupError, match="no 120"):
        ring.reader.drain(handler)
    ring.check()
    assert ring.reader.drain(handler) == 1
    assert seen == [0, 1, 2]


def test_a_payload_is_read_only_and_valid_only_in_the_handler() -> None:
    ring = Ring()
    ring.writer.try_write(1, b"x")
    kept: list[memoryview] = []

    def handler(kind: int, view: memoryview) -> None:
        with pytest.raises(TypeError):
            view[0] = 1
        kept.append(view)

    ring.reader.drain(handler)
    with pytest.raises(ValueError, match="released"):
        bytes(kept[0])


def test_drain_inside_drain_is_refused() -> None:
    ring = Ring()
    ring.writer.try_write(1, b"x")
    ring.writer.try_write(1, b"x")
    with pytest.raises(RuntimeError, match="own handler"):
        ring.reader.drain(lambda kind, view: ring.take() and None)


@pytest.mark.parametrize(
    "header",
    [
        (2**32 - 1, 1, 0, 0),
        (CAPACITY, 1, 0, 0),
        (17, 1, 0, 0),
        (1, 1, 0, 16),
        (1, 1, 1, 0),
        (CAPACITY, PADDING_KIND, 0, 0),
    ],
)
def test_a_damaged_header_is_reported_and_not_followed(header: tuple[int, ...]) -> None:
    ring = Ring()
    ring.writer.try_write(1, b"x")
    RECORD_HEADER.pack_into(ring.memory, 0, *header)
    for _ in range(2):
        with pytest.raises(ProtocolMismatchError, match="no record at ring position 0"):
            ring.take()
    assert ring.consumed.load() == 0


def test_a_record_that_would_leave_the_ring_at_its_end_is_reported() -> None:
    start = CAPACITY - 32
    ring = Ring(start=start)
    RECORD_HEADER.pack_into(ring.memory, start, 60, 1, 0, start)
    ring.published.store(start + 96)
    with pytest.raises(ProtocolMismatchError, match=f"no record at ring position {start}"):
        ring.take()
    with pytest.raises(ProtocolMismatchError, match=f"no record at ring position {start}"):
        ring.reader.check_integrity()


@given(garbage=st.binary(min_size=CAPACITY, max_size=CAPACITY), used=st.integers(1, 16))
@settings(deadline=None, derandomize=True, database=None)
def test_garbage_never_makes_the_reader_leave_the_ring(garbage: bytes, used: int) -> None:
    ring = Ring()
    ring.memory[:] = garbage
    ring.published.store(used * 16)
    sizes: list[int] = []
    with contextlib.suppress(ProtocolMismatchError):
        ring.reader.drain(lambda kind, view: sizes.append(len(view)))
    assert sum(sizes) <= CAPACITY
    assert ring.consumed.load() <= used * 16


@pytest.mark.parametrize("published", [CAPACITY + 16, 8, 2**64 - 16])
def test_an_invalid_cursor_is_reported_by_both_ends(published: int) -> None:
    ring = Ring()
    ring.published.store(published)
    with pytest.raises(ProtocolMismatchError, match="make no sense"):
        ring.take()
    with pytest.raises(ProtocolMismatchError, match="two writers"):
        ring.writer.check_integrity()


def test_a_reader_that_runs_ahead_is_reported_to_the_writer() -> None:
    ring = Ring()
    ring.consumed.store(2 * CAPACITY)
    for _ in range(CAPACITY // 64):
        assert ring.writer.try_write(1, b"x" * 40)
    with pytest.raises(ProtocolMismatchError, match="make no sense"):
        ring.writer.try_write(1, b"x" * 40)


def test_positions_exceed_32_bits() -> None:
    ring = Ring(start=2**32 - 64)
    for number in range(40):
        payload = bytes([number]) * number
        assert ring.writer.try_write(number, payload)
        assert ring.take() == [(number, payload)]
    assert ring.published.load() > 2**32


def test_statistics_count_messages_and_bytes() -> None:
    ring = Ring()
    ring.writer.try_write(1, b"abc")
    ring.writer.try_write(1, b"de")
    ring.take()
    for end in (ring.writer, ring.reader):
        assert (end.statistics().num_messages, end.statistics().num_bytes) == (2, 5)
    assert ring.writer.statistics().high_water_bytes == 64


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, CAPACITY // 2 - 16)),
        st.tuples(st.just("drain"), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(operations=OPERATIONS, start=st.integers(0, 2**40).map(lambda n: n * 16))
@settings(deadline=None, derandomize=True, database=None, max_examples=200)
def test_the_ring_behaves_like_a_queue(operations: list[tuple[str, int]], start: int) -> None:
    ring = Ring(start=start)
    model: deque[tuple[int, bytes]] = deque()
    for number, (operation, size) in enumerate(operations):
        payload = bytes([number]) * size
        if operation == "write":
            if ring.writer.try_write(number, payload):
                model.append((number, payload))
            else:
                assert model, "an empty ring has room for every message"
        else:
            expected = [model.popleft() for _ in range(min(size or len(model), len(model)))]
            assert ring.take(limit=size) == expected
        ring.check()
    assert ring.take() == list(model)
