"""ClientAcceptor and sessions over real segments, without an engine and without a process."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shmllm.engine import client_acceptor
from shmllm.engine.client_acceptor import ClientAcceptor
from shmllm.engine.session import Session, SessionEnd
from shmllm.ipc import layout, registry
from shmllm.ipc.channel import ClientChannel, ControlPage, ControlView
from shmllm.ipc.layout import DoorbellKind, Refusal, SegmentKind
from shmllm.ipc.segment import Segment
from shmllm.ipc.wait import WaitPolicy
from shmllm.ipc.words import Word
from shmllm.wire.messages import RecordKind

PATIENCE_S = 30.0

POLICY = WaitPolicy.named("idle")


class Visitor:
    """A front end of this process: a segment, a place, and a channel."""

    def __init__(self, house: House, place: int | None = None) -> None:
        self.segment = Segment.create(SegmentKind.CLIENT)
        self.segment.take_ownership()
        if place is None:
            place = registry.claim_place(self.segment, house.name)
        else:
            assert registry.publish(self.segment, registry.client_path(house.name, place))
        self.place = place
        self.path = registry.client_path(house.name, place)
        self.nonce = self.segment.nonce
        self.channel = ClientChannel(house.control, self.segment, POLICY)
        self._view = house.view

    def knock(self, nonce: int | None = None) -> None:
        self.channel.say_hello(self.place, self.nonce if nonce is None else nonce)

    @property
    def answer(self) -> int:
        return self._view.accepted(self.place)

    def store(self, offset: int, value: int) -> None:
        word = Word(self.segment.buffer, offset)
        word.store(value)
        word.close()

    def die(self) -> None:
        """As the kernel sees it: the ownership lock is gone, and no word was said."""
        self.channel.close()
        self.segment.close()


class House:
    """A control segment with its doorkeeper, and what visits it."""

    def __init__(self) -> None:
        self.name = f"door-{os.getpid()}"
        self.control = Segment.create(SegmentKind.CONTROL)
        self.page = ControlPage(self.control)
        self.view = ControlView(self.control)
        self.dismissed: list[int] = []
        path = registry.control_path(self.name)
        self.keeper = ClientAcceptor(
            self.control, self.page, path, PATIENCE_S, self.dismissed.append
        )
        self.visitors: list[Visitor] = []

    def see_out(self) -> list[int]:
        """Places whose front ends `dismiss_ended` finds gone."""
        self.dismissed.clear()
        self.keeper.dismiss_ended()
        return self.dismissed

    def visitor(self, place: int | None = None) -> Visitor:
        self.visitors.append(Visitor(self, place))
        return self.visitors[-1]

    def guest(self) -> tuple[Visitor, Session]:
        """A visitor who was let in."""
        visitor = self.visitor()
        visitor.knock()
        (session,) = self.keeper.accept_new()
        return visitor, session

    def close(self) -> None:
        for session in list(self.keeper.sessions.values()):
            session.close()
        for visitor in self.visitors:
            visitor.path.unlink(missing_ok=True)
            visitor.die()
        self.page.close()
        self.view.close()
        self.control.close()


@pytest.fixture
def house() -> Iterator[House]:
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        house = House()
        stack.callback(house.close)
        yield house
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors


@pytest.fixture
def no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visitors are of another pid namespace, so that their lock tells whether they live."""
    monkeypatch.setattr(client_acceptor, "open_pidfd", lambda pid, namespace: None)


def fill(session: Session) -> int:
    """Send until the front end is stuck; how many records that took."""
    for number in range(100):
        session.send(RecordKind.REPLY, (bytes([number]), bytes(50_000)))
        if session.is_stuck:
            return number + 1
    raise AssertionError("never full")


def test_nobody_is_there_at_first(house: House) -> None:
    assert not house.keeper.has_news()
    assert list(house.keeper.accept_new()) == []
    assert house.see_out() == []


def test_who_knocks_is_let_in_once(house: House) -> None:
    visitor = house.visitor()
    assert not house.keeper.has_news(), "a name alone is no knock"
    visitor.knock()
    assert house.keeper.has_news()
    (session,) = house.keeper.accept_new()
    assert session.place == visitor.place
    assert visitor.answer == visitor.nonce
    assert house.keeper.sessions == {visitor.place: session}
    assert not house.keeper.has_news()
    assert list(house.keeper.accept_new()) == []


def test_records_go_both_ways_between_visitor_and_session(house: House) -> None:
    visitor, session = house.guest()
    got: list[tuple[int, bytes]] = []
    assert visitor.channel.try_send(RecordKind.CALL, b"question")
    session.channel.drain(lambda kind, record: got.append((kind, bytes(record))))
    session.send(RecordKind.REPLY, (b"ans", b"wer"))
    visitor.channel.drain(lambda kind, record: got.append((kind, bytes(record))))
    assert got == [(RecordKind.CALL, b"question"), (RecordKind.REPLY, b"answer")]


def test_many_knock_at_once(house: House) -> None:
    visitors = [house.visitor() for _ in range(4)]
    for visitor in reversed(visitors):
        visitor.knock()
    assert [session.place for session in house.keeper.accept_new()] == [0, 1, 2, 3]
    assert [visitor.answer for visitor in visitors] == [v.nonce for v in visitors]


def test_a_nonce_of_another_segment_is_refused(house: House) -> None:
    visitor = house.visitor()
    visitor.knock(visitor.nonce + 1)
    assert list(house.keeper.accept_new()) == []
    assert visitor.answer == Refusal.NOT_USABLE
    assert house.keeper.sessions == {}
    visitor.knock()
    assert len(list(house.keeper.accept_new())) == 1, "the right one is let in afterwards"


def test_a_knock_without_a_segment_is_refused(house: House) -> None:
    visitor = house.visitor()
    visitor.path.unlink()
    visitor.knock()
    assert list(house.keeper.accept_new()) == []
    assert visitor.answer == Refusal.NOT_USABLE


def test_a_knock_of_the_dead_is_refused(house: House) -> None:
    visitor = house.visitor()
    visitor.knock()
    visitor.die()
    assert list(house.keeper.accept_new()) == []
    assert house.view.accepted(visitor.place) == Refusal.NOT_USABLE


def damaged_name(visitor: Visitor) -> None:
    begin = layout.CLIENT_DOORBELL_OFFSET + layout.DOORBELL_NAME_OFFSET
    visitor.segment.buffer[begin : begin + 4] = b"\xff\xfe\xfd\xfc"
    visitor.store(layout.CLIENT_DOORBELL_OFFSET, DoorbellKind.NAMED)


def stored(offset: int, value: int) -> Callable[[Visitor], None]:
    return lambda visitor: visitor.store(offset, value)


@pytest.mark.parametrize(
    "damage",
    [
        stored(layout.VERSION_OFFSET, 99),
        stored(layout.CLIENT_DOORBELL_OFFSET, 99),
        stored(layout.OUTPUT_PUBLISHED_OFFSET, 8),
        stored(layout.OUTPUT_CONSUMED_OFFSET, 2**40),
        damaged_name,
    ],
    ids=["version", "doorbell", "published", "consumed", "doorbell name"],
)
def test_a_damaged_segment_is_refused_and_let_go(
    house: House, damage: Callable[[Visitor], None]
) -> None:
    visitor = house.visitor()
    damage(visitor)
    num_descriptors = len(os.listdir("/proc/self/fd"))
    visitor.knock()
    assert list(house.keeper.accept_new()) == []
    assert visitor.answer == Refusal.NOT_USABLE
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
    visitor.store(layout.CLIENT_DOORBELL_OFFSET, DoorbellKind.SEM)


@pytest.mark.parametrize("pid", [0, 2**22 + 1, 2**40, 2**64 - 1])
def test_a_pid_that_means_nothing_lets_the_lock_decide(house: House, pid: int) -> None:
    visitor = house.visitor()
    visitor.store(layout.CREATOR_PID_OFFSET, pid)
    visitor.knock()
    (session,) = house.keeper.accept_new()
    assert session.ended() is None
    visitor.die()
    assert session.ended() is SessionEnd.DIED


def test_one_bad_visitor_does_not_keep_the_next_out(house: House) -> None:
    bad, good = house.visitor(), house.visitor()
    bad.knock(1)
    good.knock()
    assert [session.place for session in house.keeper.accept_new()] == [good.place]


def test_who_comes_at_once_after_a_death_takes_its_place(house: House) -> None:
    first, old = house.guest()
    first.die()
    second = house.visitor(place=first.place)
    second.knock()
    (session,) = house.keeper.accept_new()
    assert session is not old
    assert house.keeper.sessions == {first.place: session}
    assert house.dismissed == [first.place], "the old one's requests have to end"
    assert second.answer == second.nonce
    assert second.path.exists()
    assert second.channel.try_send(RecordKind.CALL, b"mine")
    assert session.channel.has_requests()


def test_goodbye_is_news_and_ends_the_session(house: House) -> None:
    visitor, session = house.guest()
    assert not house.keeper.has_leaving()
    visitor.channel.set_closing()
    assert house.keeper.has_news()
    assert session.ended() is SessionEnd.CLOSED
    visitor.die()
    assert house.see_out() == [0]
    assert house.view.accepted(0) == Refusal.NOT_CONNECTED
    assert house.keeper.sessions == {}
    assert not visitor.path.exists(), "its name was swept"


def test_the_dead_are_seen_by_their_lock(house: House, no_pidfd: None) -> None:
    visitor, session = house.guest()
    other, other_session = house.guest()
    assert session.ended() is None
    visitor.die()
    assert session.ended() is SessionEnd.DIED
    assert house.see_out() == [visitor.place]
    assert house.view.accepted(visitor.place) == Refusal.NOT_CONNECTED
    assert house.keeper.sessions == {other.place: other_session}
    assert other.answer == other.nonce


@pytest.mark.parametrize("refusal", [Refusal.BROKEN_PROTOCOL, Refusal.TOO_SLOW])
def test_dismissal_names_its_reason_and_leaves_a_live_ones_file(
    house: House, refusal: Refusal
) -> None:
    visitor, session = house.guest()
    house.keeper.dismiss(session, refusal)
    assert house.dismissed == [visitor.place]
    assert visitor.answer == refusal
    assert house.keeper.sessions == {}
    assert visitor.path.exists(), "only a dead one's name is taken away"
    assert not house.keeper.has_news(), "its old knock is no new one"


def test_a_state_word_that_means_nothing_ends_that_session_only(house: House) -> None:
    bad, _ = house.guest()
    good, _ = house.guest()
    bad.store(layout.CLIENT_STATE_OFFSET, 4711)
    house.keeper.has_news()
    assert house.see_out() == [bad.place]
    assert good.answer == good.nonce


def test_outputs_without_room_wait_in_order(house: House) -> None:
    visitor, session = house.guest()
    number = fill(session)
    session.send(RecordKind.REPLY, (bytes([number]), b""))  # short, but behind the others
    got: list[int] = []
    for _ in range(3):
        visitor.channel.drain(lambda kind, record: got.append(record[0]))
        session.flush()
    assert got == list(range(number + 1))
    assert not session.is_stuck


def test_flush_without_room_changes_nothing(house: House) -> None:
    _, session = house.guest()
    fill(session)
    before = session.channel.outputs.statistics().num_messages
    session.flush()
    assert session.is_stuck
    assert session.channel.outputs.statistics().num_messages == before


def test_who_does_not_read_is_cut_off_at_the_end_of_patience(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor, session = house.guest()
    reader, other = house.guest()
    fill(session)
    assert house.see_out() == []
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + PATIENCE_S + 1)
    assert session.ended() is SessionEnd.TOO_SLOW
    assert house.see_out() == [visitor.place]
    assert visitor.answer == Refusal.TOO_SLOW
    assert reader.answer == reader.nonce
    assert house.keeper.sessions == {reader.place: other}


def test_who_reads_slowly_is_given_time_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor, session = house.guest()
    fill(session)
    session.send(RecordKind.REPLY, (bytes(250_000),))
    session.send(RecordKind.REPLY, (bytes(250_000),))
    session.send(RecordKind.REPLY, (bytes(250_000),))
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + PATIENCE_S - 1)
    visitor.channel.drain(lambda kind, record: None)
    session.flush()
    assert session.is_stuck
    monkeypatch.setattr(time, "monotonic", lambda: began + PATIENCE_S + 1)
    assert session.ended() is None


def test_a_session_without_a_limit_waits_for_ever(house: House, no_pidfd: None) -> None:
    visitor = house.visitor()
    segment = registry.attach(visitor.path, SegmentKind.CLIENT, "x")
    session = Session(0, house.control, segment, None, patience_s=None)
    house.keeper.sessions[0] = session
    fill(session)
    session._stuck_since -= 10**6
    assert session.ended() is None


def test_a_private_engine_lets_nobody_in() -> None:
    with Segment.create(SegmentKind.CONTROL) as control:
        page, view = ControlPage(control), ControlView(control)
        keeper = ClientAcceptor(control, page, None, PATIENCE_S, lambda place: None)
        view.say_hello(3, 2**62)
        assert not keeper.has_news()
        assert list(keeper.accept_new()) == []
        assert view.accepted(3) == 0
        page.close()
        view.close()


def test_the_name_is_a_path_beside_the_engines(house: House) -> None:
    assert house.keeper._client_path(4) == Path(f"/dev/shm/shmllm.{house.name}.4")
