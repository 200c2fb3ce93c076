"""The state of a ring as tools read it: its latest records, read or unread, and its counters."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from shmllm.ipc import layout
from shmllm.ipc.client_channel import STATISTICS_PERIOD_NS, ClientChannel
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.layout import OUTPUT_RING_LAYOUT, REQUEST_RING_LAYOUT, RING_BYTES
from shmllm.ipc.ring import record_span
from shmllm.ipc.ring_state import RecordHeader, peek
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.wait import WaitPolicy


@dataclass
class Pair:
    """Both ends of a connection in this process."""

    memory: memoryview
    front: ClientChannel
    core: CoreChannel

    def requests(self, num_records: int) -> tuple[RecordHeader, ...]:
        return peek(self.memory, REQUEST_RING_LAYOUT, num_records).records


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Segment.create(SegmentKind.CONTROL) as control, Segment.create(SegmentKind.CLIENT) as seg:
        pair = Pair(
            seg.buffer,
            ClientChannel(control, seg, WaitPolicy.named("idle")),
            CoreChannel(control, seg),
        )
        yield pair
        pair.front.close()
        pair.core.close()


def ignore(kind: int, record: memoryview) -> None: ...


def test_an_empty_ring_has_no_records(pair: Pair) -> None:
    assert pair.requests(8) == ()


def test_read_and_unread_records_are_told_apart_by_their_positions(pair: Pair) -> None:
    for kind in range(5):
        assert pair.front.try_send(kind, bytes(kind))
    pair.core.drain(ignore, 3)
    state = peek(pair.memory, REQUEST_RING_LAYOUT, 4)
    assert [(r.kind, r.length) for r in state.records] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [r.kind for r in state.records if r.position < state.consumed] == [1, 2]


def test_after_many_laps_peek_returns_the_latest_records(pair: Pair) -> None:
    source = random.Random(7)
    sent: list[RecordHeader] = []
    position = 0
    for _ in range(4000):
        length = source.choice((0, 1, 40, 5000, 100_000))
        if position % RING_BYTES + record_span(length) > RING_BYTES:
            position += RING_BYTES - position % RING_BYTES
        kind = source.randrange(200)
        # The payload imitates headers with its own position; peek must not take it for a record.
        assert pair.front.try_send(kind, position.to_bytes(8, "little") * (length // 8 + 1))
        length = 8 * (length // 8 + 1)
        sent.append(RecordHeader(position, kind, length))
        position += record_span(length)
        pair.core.drain(ignore)
        position = pair.front.requests._position
    shown = pair.requests(50)
    assert len(shown) >= 2
    assert [(r.kind, r.length) for r in shown] == [(r.kind, r.length) for r in sent[-len(shown) :]]
    assert pair.requests(1) == shown[-1:]


def test_overwritten_records_are_not_returned(pair: Pair) -> None:
    for _ in range(2 * RING_BYTES // record_span(1000)):
        assert pair.front.try_send(1, bytes(1000))
        pair.core.drain(ignore)
    shown = pair.requests(10**6)
    assert sum(record_span(r.length) for r in shown) <= RING_BYTES
    assert shown[0].position >= pair.front.requests._position - RING_BYTES


@pytest.mark.parametrize("published", [1, 2**63, 2**64 - 16, 48])
def test_a_damaged_ring_has_no_records_and_raises_nothing(pair: Pair, published: int) -> None:
    assert pair.front.try_send(1, b"x")
    offset = layout.REQUEST_PUBLISHED_OFFSET
    pair.memory[offset : offset + 8] = published.to_bytes(8, "little")
    assert pair.requests(8) == ()


def test_each_end_publishes_its_counters(pair: Pair) -> None:
    assert pair.front.try_send(1, b"abc")
    assert pair.front.try_send(1, b"")
    pair.core.drain(ignore, 1)
    while pair.core.try_send(2, bytes(100_000)):
        pass
    pair.front.publish_statistics()
    pair.core.publish_statistics()
    requests = peek(pair.memory, REQUEST_RING_LAYOUT, 0)
    outputs = peek(pair.memory, OUTPUT_RING_LAYOUT, 0)
    assert (requests.writer.num_messages, requests.writer.num_bytes) == (2, 3)
    assert (requests.reader.num_messages, requests.reader.num_bytes) == (1, 3)
    assert outputs.writer.num_messages == 5
    assert outputs.writer.times_full == 1
    assert outputs.writer.high_water_bytes == 5 * record_span(100_000)
    assert outputs.reader.num_messages == 0


def test_the_front_end_publishes_its_counters_before_it_parks(pair: Pair) -> None:
    assert pair.front.try_send(1, b"abc")
    assert not pair.front.waiter._waiter.wait(lambda: False, 0.001)
    shown = peek(pair.memory, REQUEST_RING_LAYOUT, 0).writer
    assert shown.num_messages == 1
    assert peek(pair.memory, OUTPUT_RING_LAYOUT, 0).reader.times_parked == 1


def test_parks_soon_after_each_other_publish_the_counters_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    for passed_ns in (0, STATISTICS_PERIOD_NS, STATISTICS_PERIOD_NS + 1):
        monkeypatch.setattr(time, "monotonic_ns", lambda now=2**40 + passed_ns: now)
        assert not pair.front.waiter._waiter.wait(lambda: False, 0.001)
        shown.append(peek(pair.memory, OUTPUT_RING_LAYOUT, 0).reader.times_parked)
    assert shown == [1, 1, 3]
