from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from shmllm.errors import IpcTimeoutError, SegmentError
from shmllm.ipc import doorbell, layout
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.control import ControlPage, ControlView
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.core_waiter import CoreWaiter
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import EngineState, Parked, SegmentKind
from shmllm.ipc.stats import Stat
from shmllm.ipc.wait import WaitPolicy
from shmllm.ipc.words import Word

POLICY = WaitPolicy(0, 0, 0.001, 0.002)


@pytest.fixture
def front(control: Segment, client: Segment) -> Iterator[ClientChannel]:
    channel = ClientChannel(control, client, POLICY)
    yield channel
    channel.close()


@pytest.fixture
def core(control: Segment, client: Segment) -> Iterator[CoreChannel]:
    channel = CoreChannel(control, client)
    yield channel
    channel.close()


@pytest.fixture
def waiter(control: Segment) -> Iterator[CoreWaiter]:
    waiter = CoreWaiter(control, POLICY)
    yield waiter
    waiter.close()


def _take(channel: ClientChannel | CoreChannel) -> list[tuple[int, bytes]]:
    got: list[tuple[int, bytes]] = []
    channel.drain(lambda kind, view: got.append((kind, bytes(view))))
    return got


def _set_parked(segment: Segment, offset: int) -> None:
    Word(segment.buffer, offset).store(1)


def test_requests_and_outputs_are_separate(front: ClientChannel, core: CoreChannel) -> None:
    assert front.try_send(1, b"request")
    assert core.try_send(2, b"out", b"put")
    assert core.has_requests()
    assert _take(core) == [(1, b"request")]
    assert not core.has_requests()
    assert front.wait()
    assert _take(front) == [(2, b"output")]


def test_the_engine_is_woken_only_when_parked(
    front: ClientChannel, control: Segment, waiter: CoreWaiter
) -> None:
    front.try_send(1)
    assert not waiter._doorbell.try_wait()
    _set_parked(control, layout.CONTROL_PARKED_OFFSET)
    front.try_send(1)
    assert waiter._doorbell.try_wait()


def test_the_front_end_is_woken_only_when_parked(
    front: ClientChannel, core: CoreChannel, client: Segment
) -> None:
    core.try_send(1)
    assert not front.waiter._doorbell.try_wait()
    _set_parked(client, layout.CLIENT_PARKED_OFFSET)
    core.try_send(1)
    assert front.waiter._doorbell.try_wait()


def test_an_output_that_is_not_urgent_does_not_end_a_wait_for_urgent_ones(
    front: ClientChannel, core: CoreChannel, client: Segment
) -> None:
    parked = Word(client.buffer, layout.CLIENT_PARKED_OFFSET)
    parked.store(Parked.FOR_URGENT)
    core.try_send(1, is_urgent=False)
    assert not front.waiter._doorbell.try_wait()
    core.try_send(2)
    assert front.waiter._doorbell.try_wait()
    parked.store(Parked.FOR_DATA)
    core.try_send(3, is_urgent=False)
    assert front.waiter._doorbell.try_wait()
    assert [kind for kind, _ in _take(front)] == [1, 2, 3]


def test_every_output_is_urgent_once_the_ring_is_half_full(
    front: ClientChannel, core: CoreChannel, client: Segment
) -> None:
    Word(client.buffer, layout.CLIENT_PARKED_OFFSET).store(Parked.FOR_URGENT)
    sent = 0
    while not front.waiter._doorbell.try_wait():
        assert core.try_send(1, bytes(1000), is_urgent=False), "the ring is full before the post"
        sent += 1000
    assert 0.45 * layout.RING_BYTES < sent < 0.55 * layout.RING_BYTES
    assert front.has_urgent()
    _take(front)
    assert not front.has_urgent()
    core.try_send(1, is_urgent=False)
    assert not front.waiter._doorbell.try_wait()


def test_outputs_count_as_urgent_when_the_ring_refuses_the_next_one(
    front: ClientChannel, core: CoreChannel, client: Segment
) -> None:
    """Padding fills a ring before half of it is in use: the last free bytes are too few, and the
    record does not fit before the unread one."""
    assert core.try_send(1, bytes(200_000), is_urgent=False)
    _take(front)
    assert core.try_send(2, bytes(200_000), is_urgent=False)
    assert not core.outputs.is_half_full
    Word(client.buffer, layout.CLIENT_PARKED_OFFSET).store(Parked.FOR_URGENT)
    assert not front.has_urgent()
    assert not core.try_send(3, bytes(230_000), is_urgent=False)
    assert front.has_urgent()
    assert front.waiter._doorbell.try_wait()
    assert [kind for kind, _ in _take(front)] == [2]
    assert core.try_send(3, is_urgent=False)
    assert not front.has_urgent()
    assert not front.waiter._doorbell.try_wait()


def test_a_wait_for_urgent_outputs(front: ClientChannel, core: CoreChannel) -> None:
    """An output that is not urgent counts only at the end of the wait. An urgent one ends the wait
    at once, even if it came before the wait and another output follows it."""
    core.try_send(1, is_urgent=False)
    began = time.monotonic()
    assert front.wait(began + 5, urgent_only=True)
    assert time.monotonic() - began >= POLICY.park_cap_s
    core.try_send(2)
    core.try_send(1, is_urgent=False)
    times_parked = front.waiter._waiter.times_parked
    assert front.wait(time.monotonic() + 5, urgent_only=True)
    assert front.waiter._waiter.times_parked == times_parked
    assert [kind for kind, _ in _take(front)] == [1, 2, 1]
    assert not front.wait(time.monotonic() + 0.001, urgent_only=True)


def test_after_an_empty_urgent_wait_the_next_wait_is_for_any_output(
    front: ClientChannel, core: CoreChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[Parked] = []

    def wait(ready: object, cap_s: float, reason: Parked = Parked.FOR_DATA) -> bool:
        reasons.append(reason)
        return False

    monkeypatch.setattr(front.waiter, "_waiter", SimpleNamespace(wait=wait, park_cap_s=0.1))
    for _ in range(3):
        front.wait(urgent_only=True)
    core.try_send(1, is_urgent=False)
    for _ in range(2):
        front.wait(urgent_only=True)
    urgent, any_ = Parked.FOR_URGENT, Parked.FOR_DATA
    assert reasons == [urgent, any_, urgent, any_, urgent]
    monkeypatch.undo()


def test_a_message_that_does_not_fit_wakes_nobody(
    front: ClientChannel, control: Segment, waiter: CoreWaiter
) -> None:
    while front.try_send(1, bytes(100_000)):
        pass
    _set_parked(control, layout.CONTROL_PARKED_OFFSET)
    assert not front.try_send(1, bytes(100_000))
    assert not waiter._doorbell.try_wait()


def test_a_wait_without_outputs_returns_false(front: ClientChannel) -> None:
    assert not front.wait()
    assert not front.wait(time.monotonic() + 0.001)
    assert not front.wait(time.monotonic() - 1)


def test_send_drains_while_it_waits_for_room(front: ClientChannel, core: CoreChannel) -> None:
    while front.try_send(1, bytes(100_000)):
        pass
    turns: list[int] = []

    def on_full() -> None:
        turns.append(core.drain(lambda kind, view: None))

    front.send(2, b"x", bytes(100_000), on_full=on_full, deadline=None)
    assert turns == [5]
    assert _take(core) == [(2, b"x" + bytes(100_000))]


def test_send_gives_up_at_its_deadline(front: ClientChannel) -> None:
    while front.try_send(1, bytes(100_000)):
        pass
    with pytest.raises(IpcTimeoutError, match="of 524288 bytes are free"):
        front.send(1, bytes(100_000), on_full=lambda: None, deadline=time.monotonic())


def test_an_error_of_on_full_ends_send(front: ClientChannel) -> None:
    while front.try_send(1, bytes(100_000)):
        pass

    def on_full() -> None:
        raise LookupError("the engine is dead")

    with pytest.raises(LookupError):
        front.send(1, bytes(100_000), on_full=on_full, deadline=None)


def test_tensors_can_be_sent_both_ways(front: ClientChannel, core: CoreChannel) -> None:
    for writer, reader in ((front.slots, core.slots), (core.output_slots, front.output_slots)):
        slot = writer.claim(layout.MEDIUM_SLOT_BYTES)
        assert slot is not None
        slot.buffer[-3:] = b"end"
        ref = slot.publish()
        with reader.view(ref) as view:
            assert bytes(view[-3:]) == b"end"
        reader.release(ref)
        assert writer.num_free == layout.NUM_SLOTS


def test_the_engine_sees_that_the_front_end_closes(
    front: ClientChannel, core: CoreChannel, control: Segment, waiter: CoreWaiter
) -> None:
    assert not core.is_client_closing
    _set_parked(control, layout.CONTROL_PARKED_OFFSET)
    front.set_closing()
    assert core.is_client_closing
    assert waiter._doorbell.try_wait()


def test_the_policy_can_change(front: ClientChannel) -> None:
    front.waiter.set_policy(WaitPolicy(0, 0, 0.005, 0.01))
    assert front.waiter._waiter.park_cap_s == 0.005


def test_a_closed_channel_refuses_every_call(front: ClientChannel, core: CoreChannel) -> None:
    front.close()
    front.close()
    core.close()
    for use in (
        lambda: front.try_send(1),
        lambda: front.drain(lambda kind, view: None),
        front.wait,
        front.set_closing,
        lambda: core.try_send(1),
        lambda: core.drain(lambda kind, view: None),
    ):
        with pytest.raises(SegmentError, match="channel is closed"):
            use()


def test_a_channel_over_a_closed_segment_refuses(
    front: ClientChannel, core: CoreChannel, client: Segment
) -> None:
    client.close()
    for channel in (front, core):
        with pytest.raises(SegmentError, match="CLIENT segment is closed"):
            channel.try_send(1)


def test_a_core_waiter_parks_until_it_is_woken(waiter: CoreWaiter) -> None:
    assert not waiter.wait(lambda: False, busy=True)
    assert not waiter.wait(lambda: False, busy=False)
    assert waiter.wait(lambda: True, busy=False)
    waiter.wake()
    assert not waiter.wait(lambda: False, busy=True)
    assert not waiter._doorbell.try_wait()


def test_a_connection_works_with_named_doorbells_and_unlinks_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("posix_ipc")
    monkeypatch.setattr(doorbell, "HAS_FUTEX", False)
    with (
        Segment.create(SegmentKind.CONTROL) as control,
        Segment.create(SegmentKind.CLIENT) as client,
    ):
        front, core = ClientChannel(control, client, POLICY), CoreChannel(control, client)
        _set_parked(client, layout.CLIENT_PARKED_OFFSET)
        assert core.try_send(1, b"x")
        assert isinstance(front.waiter._doorbell, doorbell.NamedDoorbell)
        assert front.waiter._doorbell.try_wait()
        assert _take(front) == [(1, b"x")]
        front.close()
        core.close()


class TestControlPage:
    def test_values_before_the_engine_attaches(
        self, front: ClientChannel, control: Segment
    ) -> None:
        view = ControlView(control)
        assert front.engine_state is EngineState.STARTING
        assert view.engine_pid == 0
        assert view.heartbeat_ns == 0
        assert front.last_words() == ""
        assert set(front.stats().values()) == {0}
        view.close()

    def test_a_view_reads_the_values_that_the_engine_stores(
        self, front: ClientChannel, control: Segment
    ) -> None:
        page, view = ControlPage(control), ControlView(control)
        before_ns = time.monotonic_ns()
        page.beat()
        page.set_state(EngineState.READY)
        page.set_stat(Stat.STEPS, 12)
        assert front.engine_state is EngineState.READY
        assert view.engine_pid > 0
        assert before_ns <= view.heartbeat_ns <= time.monotonic_ns()
        assert front.stat(Stat.STEPS) == front.stats()["steps"] == 12
        assert list(front.stats()) == [stat.name.lower() for stat in Stat]
        view.close()
        page.close()
        page.close()

    def test_new_last_words_replace_the_old_ones(self, control: Segment) -> None:
        page, view = ControlPage(control), ControlView(control)
        page.set_last_words("a long first text")
        page.set_last_words("short, mit Umläuten")
        assert view.last_words() == "short, mit Umläuten"
        page.close()
        view.close()

    @pytest.mark.parametrize(
        ("name", "shown"), [("NVIDIA H200", "NVIDIA H200"), ("x" * 200, "x" * 128), ("", "")]
    )
    def test_the_names_of_device_precision_and_model(
        self, control: Segment, name: str, shown: str
    ) -> None:
        page, view = ControlPage(control), ControlView(control)
        page.set_device(name)
        assert (view.device(), view.model()) == (shown, "")
        page.set_precision(name)
        assert (view.device(), view.precision(), view.model()) == (shown, shown, "")
        page.set_model(name)
        assert (view.device(), view.precision(), view.model()) == (shown,) * 3
        assert view.last_words() == ""
        page.close()
        view.close()

    def test_long_last_words_lose_their_beginning(self, control: Segment) -> None:
        page, view = ControlPage(control), ControlView(control)
        page.set_last_words("ä" * 20_000 + "the cause")
        assert view.last_words().endswith("ä" * 100 + "the cause")
        assert len(view.last_words().encode()) <= layout.LAST_WORDS_BYTES + 8
        page.close()
        view.close()

    def test_a_damaged_length_of_the_last_words_is_limited(self, control: Segment) -> None:
        Word(control.buffer, layout.CONTROL_LAST_WORDS_SIZE_OFFSET).store(2**60)
        view = ControlView(control)
        assert len(view.last_words()) == layout.LAST_WORDS_BYTES
        view.close()


class Watcher:
    """Collects the reported records."""

    def __init__(self) -> None:
        self.sent_records: list[tuple[int, int, int]] = []
        self.received_records: list[tuple[int, int, int]] = []

    def sent(self, kind: int, position: int, num_bytes: int, began_ns: int) -> None:
        assert began_ns <= time.perf_counter_ns()
        self.sent_records.append((kind, position, num_bytes))

    def received(self, kind: int, position: int, num_bytes: int, began_ns: int) -> None:
        assert began_ns <= time.perf_counter_ns()
        self.received_records.append((kind, position, num_bytes))


def test_both_ends_report_the_same_position_of_a_record(
    front: ClientChannel, core: CoreChannel
) -> None:
    watchers = Watcher(), Watcher()
    front.watch(watchers[0])
    core.watch(watchers[1])
    assert front.nonce == core.nonce
    size = layout.RING_BYTES // 7
    for length in (3, 0, *[size] * 9):  # past the end of the ring, with padding
        assert front.try_send(7, bytes(length), b"12")
        assert [len(payload) for _, payload in _take(core)] == [length + 2]
    assert core.try_send(9, b"out")
    assert _take(front) == [(9, b"out")]
    assert watchers[0].sent_records == watchers[1].received_records
    assert [size for _, _, size in watchers[0].sent_records] == [5, 2, *[size + 2] * 9]
    assert watchers[1].sent_records == watchers[0].received_records == [(9, 32, 3)]


def test_a_record_that_finds_no_room_is_not_reported(
    front: ClientChannel, core: CoreChannel
) -> None:
    watcher = Watcher()
    front.watch(watcher)
    while front.try_send(1, bytes(100_000)):
        pass
    assert len(watcher.sent_records) == 5
    front.watch(None)
    _take(core)
    assert front.try_send(1, b"unheard")
    assert len(watcher.sent_records) == 5


def test_a_watched_handler_may_raise(front: ClientChannel, core: CoreChannel) -> None:
    watcher = Watcher()
    core.watch(watcher)
    front.try_send(1, b"poison")
    front.try_send(2, b"good")

    def handle(kind: int, payload: memoryview) -> None:
        if kind == 1:
            raise ValueError("poison")

    with pytest.raises(ValueError, match="poison"):
        core.drain(handle)
    assert core.drain(handle) == 1
    assert [kind for kind, *_ in watcher.received_records] == [1, 2]
