"""ClientAcceptor and Session with real segments, but without an engine core and other processes."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from shmllm.engine import client_acceptor
from shmllm.engine.client_acceptor import ClientAcceptor
from shmllm.engine.session import Session, SessionEnd
from shmllm.errors import NoSpaceError, ProtocolMismatchError
from shmllm.ipc import layout, registry
from shmllm.ipc.access import Access
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.control import ControlPage, ControlView
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import Answer, DoorbellKind, SegmentKind
from shmllm.ipc.tensors import TensorWriter
from shmllm.ipc.wait import WaitPolicy
from shmllm.ipc.words import Word
from shmllm.wire.codec import decode, encode_in_slot, encode_reply
from shmllm.wire.messages import PromptEmbeds, RecordKind, Reply

TIMEOUT_S = 30.0

POLICY = WaitPolicy.named("idle")


class FrontEnd:
    """A front end in this process: its segment, its place and its channel."""

    def __init__(self, engine: Engine, place: int | None = None) -> None:
        self.segment = Segment.create(SegmentKind.CLIENT)
        self.segment.take_ownership()
        if place is None:
            place = registry.claim_place(self.segment, engine.name)
        else:
            assert registry.publish(self.segment, registry.client_path(engine.name, place))
        self.place = place
        self.path = registry.client_path(engine.name, place)
        self.nonce = self.segment.nonce
        self.channel = ClientChannel(engine.control, self.segment, POLICY)
        self._view = engine.view

    def say_hello(self, nonce: int | None = None) -> None:
        self.channel.say_hello(self.place, self.nonce if nonce is None else nonce)

    @property
    def answer(self) -> Answer | None:
        return self._view.answer(self.place, self.nonce)

    def store(self, offset: int, value: int) -> None:
        word = Word(self.segment.buffer, offset)
        word.store(value)
        word.close()

    def die(self) -> None:
        """Release the ownership lock without a message, as the kernel does for a killed process."""
        self.channel.close()
        self.segment.close()


class Engine:
    """The control segment of an engine, its acceptor, and front ends."""

    def __init__(self) -> None:
        self.name = f"acceptor-{os.getpid()}"
        self.control = Segment.create(SegmentKind.CONTROL)
        self.page = ControlPage(self.control)
        self.view = ControlView(self.control)
        self.dismissed: list[int] = []
        path = registry.control_path(self.name)
        self.holding: set[int] = set()
        self.acceptor = ClientAcceptor(
            self.control,
            self.page,
            path,
            TIMEOUT_S,
            self.dismissed.append,
            self.holding.__contains__,
        )
        self.front_ends: list[FrontEnd] = []

    def dismiss_ended(self) -> list[int]:
        """The places of the front ends that the acceptor dismisses."""
        self.dismissed.clear()
        self.acceptor.dismiss_ended()
        return self.dismissed

    def front_end(self, place: int | None = None) -> FrontEnd:
        self.front_ends.append(FrontEnd(self, place))
        return self.front_ends[-1]

    def attach(self) -> tuple[FrontEnd, Session]:
        """A front end that the acceptor has accepted, and its session."""
        front_end = self.front_end()
        front_end.say_hello()
        (session,) = self.acceptor.accept_new()
        return front_end, session

    def close(self) -> None:
        for session in list(self.acceptor.sessions.values()):
            session.close()
        for front_end in self.front_ends:
            front_end.path.unlink(missing_ok=True)
            front_end.die()
        self.page.close()
        self.view.close()
        self.control.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        engine = Engine()
        stack.callback(engine.close)
        yield engine
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors


@pytest.fixture
def no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Front ends count as processes of another pid namespace, so the session checks their locks."""
    monkeypatch.setattr(client_acceptor, "open_pidfd", lambda pid, namespace: None)


def fill(session: Session) -> int:
    """Send records until the output ring is full. Returns the number of records."""
    for number in range(100):
        session.send(RecordKind.REPLY, (bytes([number]), bytes(50_000)))
        if session.is_stuck:
            return number + 1
    raise AssertionError("the ring is never full")


def test_a_new_engine_has_no_front_ends(engine: Engine) -> None:
    assert not engine.acceptor.has_pending()
    assert list(engine.acceptor.accept_new()) == []
    assert engine.dismiss_ended() == []


def test_a_front_end_that_says_hello_is_accepted_once(engine: Engine) -> None:
    front_end = engine.front_end()
    assert not engine.acceptor.has_pending(), "a name without a hello is not enough"
    front_end.say_hello()
    assert engine.acceptor.has_pending()
    (session,) = engine.acceptor.accept_new()
    assert session.place == front_end.place
    assert front_end.answer is Answer.ACCEPTED
    assert engine.acceptor.sessions == {front_end.place: session}
    assert not engine.acceptor.has_pending()
    assert list(engine.acceptor.accept_new()) == []


def test_records_go_both_ways_between_front_end_and_session(engine: Engine) -> None:
    front_end, session = engine.attach()
    got: list[tuple[int, bytes]] = []
    assert front_end.channel.try_send(RecordKind.CALL, b"question")
    session.channel.drain(lambda kind, record: got.append((kind, bytes(record))))
    session.send(RecordKind.REPLY, (b"ans", b"wer"))
    front_end.channel.drain(lambda kind, record: got.append((kind, bytes(record))))
    assert got == [(RecordKind.CALL, b"question"), (RecordKind.REPLY, b"answer")]


def test_several_front_ends_are_accepted_at_once(engine: Engine) -> None:
    front_ends = [engine.front_end() for _ in range(4)]
    for front_end in reversed(front_ends):
        front_end.say_hello()
    assert [session.place for session in engine.acceptor.accept_new()] == [0, 1, 2, 3]
    assert {front_end.answer for front_end in front_ends} == {Answer.ACCEPTED}


@pytest.mark.parametrize("change", [1, 8, -8])
def test_a_hello_with_the_nonce_of_no_segment_is_not_answered(engine: Engine, change: int) -> None:
    front_end = engine.front_end()
    front_end.say_hello(front_end.nonce + change)
    assert list(engine.acceptor.accept_new()) == []
    assert front_end.answer is None
    assert engine.acceptor.sessions == {}
    front_end.say_hello()
    assert len(list(engine.acceptor.accept_new())) == 1, "the right nonce is accepted afterwards"


def test_a_hello_without_a_segment_is_refused(engine: Engine) -> None:
    front_end = engine.front_end()
    front_end.path.unlink()
    front_end.say_hello()
    assert list(engine.acceptor.accept_new()) == []
    assert front_end.answer is Answer.NOT_USABLE


def test_a_hello_of_a_dead_front_end_is_refused(engine: Engine) -> None:
    front_end = engine.front_end()
    front_end.say_hello()
    front_end.die()
    assert list(engine.acceptor.accept_new()) == []
    assert front_end.answer is Answer.NOT_USABLE


def damaged_name(front_end: FrontEnd) -> None:
    begin = layout.CLIENT_DOORBELL_OFFSET + layout.DOORBELL_NAME_OFFSET
    front_end.segment.buffer[begin : begin + 4] = b"\xff\xfe\xfd\xfc"
    front_end.store(layout.CLIENT_DOORBELL_OFFSET, DoorbellKind.NAMED)


def stored(offset: int, value: int) -> Callable[[FrontEnd], None]:
    return lambda front_end: front_end.store(offset, value)


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
def test_a_damaged_segment_is_refused_and_closed(
    engine: Engine, damage: Callable[[FrontEnd], None]
) -> None:
    front_end = engine.front_end()
    damage(front_end)
    num_descriptors = len(os.listdir("/proc/self/fd"))
    front_end.say_hello()
    assert list(engine.acceptor.accept_new()) == []
    assert front_end.answer is Answer.NOT_USABLE
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
    front_end.store(layout.CLIENT_DOORBELL_OFFSET, DoorbellKind.FUTEX)


@pytest.mark.parametrize("pid", [0, 2**22 + 1, 2**40, 2**64 - 1])
def test_an_invalid_pid_makes_the_session_check_the_lock(engine: Engine, pid: int) -> None:
    front_end = engine.front_end()
    front_end.store(layout.CREATOR_PID_OFFSET, pid)
    front_end.say_hello()
    (session,) = engine.acceptor.accept_new()
    assert session.ended() is None
    assert session.pid == pid
    front_end.die()
    assert session.ended() is SessionEnd.DIED


def test_a_refused_front_end_does_not_affect_the_next_one(engine: Engine) -> None:
    bad, good = engine.front_end(), engine.front_end()
    bad.say_hello(1)
    good.say_hello()
    assert [session.place for session in engine.acceptor.accept_new()] == [good.place]


def test_a_front_end_can_take_the_place_of_a_dead_one_at_once(engine: Engine) -> None:
    first, old = engine.attach()
    first.die()
    second = engine.front_end(place=first.place)
    second.say_hello()
    (session,) = engine.acceptor.accept_new()
    assert session is not old
    assert engine.acceptor.sessions == {first.place: session}
    assert engine.dismissed == [first.place], "the requests of the dead front end have to end"
    assert second.answer is Answer.ACCEPTED
    assert second.path.exists()
    assert second.channel.try_send(RecordKind.CALL, b"mine")
    assert session.channel.has_requests()


def test_a_closing_front_end_is_pending_and_ends_its_session(engine: Engine) -> None:
    front_end, session = engine.attach()
    assert not engine.acceptor.has_leaving()
    front_end.channel.set_closing()
    assert engine.acceptor.has_pending()
    assert session.ended() is SessionEnd.CLOSED
    front_end.die()
    assert engine.dismiss_ended() == [0]
    assert front_end.answer is Answer.NOT_CONNECTED
    assert engine.acceptor.sessions == {}
    assert not front_end.path.exists(), "the acceptor removed its name"


def test_a_dead_front_end_is_found_by_its_lock(engine: Engine, no_pidfd: None) -> None:
    front_end, session = engine.attach()
    other, other_session = engine.attach()
    assert session.ended() is None
    front_end.die()
    assert session.ended() is SessionEnd.DIED
    assert engine.dismiss_ended() == [front_end.place]
    assert front_end.answer is Answer.NOT_CONNECTED
    assert engine.acceptor.sessions == {other.place: other_session}
    assert other.answer is Answer.ACCEPTED


@pytest.mark.parametrize("answer", [Answer.BROKEN_PROTOCOL, Answer.TOO_SLOW])
def test_dismissal_reports_the_reason_and_keeps_the_file_of_a_live_front_end(
    engine: Engine, answer: Answer
) -> None:
    front_end, session = engine.attach()
    engine.acceptor.dismiss(session, answer)
    assert engine.dismissed == [front_end.place]
    assert front_end.answer is answer
    assert engine.acceptor.sessions == {}
    assert front_end.path.exists(), "only the name of a dead front end is removed"
    assert not engine.acceptor.has_pending(), "its old hello is not a new one"


def test_each_front_end_that_is_cut_off_is_recorded_with_its_reason(
    engine: Engine, no_pidfd: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded() -> str:
        """The text of the latest error; the number of its front end is that of this process."""
        return engine.view.errors()[-1].text.removeprefix(f"front end {os.getpid()} ")

    closed, _ = engine.attach()
    closed.channel.set_closing()
    assert engine.dismiss_ended() == [0]
    assert engine.view.errors() == []

    broken, session = engine.attach()
    broken.channel.try_send(4711, b"nonsense")
    session.take(lambda _, kind, record: decode(kind, record), in_turns=False)
    assert engine.dismiss_ended() == [1]
    reason = "it sent invalid messages: "
    assert recorded().startswith(f"in place 1 was cut off: {reason}")
    assert recorded().endswith(str(session.protocol_error))

    dead, _ = engine.attach()
    dead.die()
    assert engine.dismiss_ended() == [2]
    assert recorded() == "in place 2 was cut off: it ended without closing its connection"

    _, session = engine.attach()
    fill(session)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + TIMEOUT_S + 1)
    (place,) = engine.dismiss_ended()
    assert recorded() == f"in place {place} was cut off: it did not read its outputs in time"


def test_a_refused_front_end_is_recorded_with_its_reason(engine: Engine) -> None:
    engine.view.say_hello(5, 2**62)
    assert list(engine.acceptor.accept_new()) == []
    (error,) = engine.view.errors()
    assert error.text.startswith("a front end in place 5 was refused: the client in place 5")
    assert "not running" in error.text


def test_outputs_without_room_are_recorded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    front_end, session = engine.attach()

    def full(nbytes: int) -> None:
        raise NoSpaceError(f"shared memory is full: {nbytes} bytes needed")

    monkeypatch.setattr(session.channel, "output_slots", SimpleNamespace(claim=full))
    session.send(RecordKind.REPLY, encode_reply(Reply(1, True, "x" * 300_000)))
    (error,) = engine.view.errors()
    name = f"front end {os.getpid()} in place {front_end.place}"
    assert error.text.startswith(f"outputs for {name} found no room: shared memory is full")
    monkeypatch.undo()


def test_an_invalid_state_word_ends_that_session_only(engine: Engine) -> None:
    bad, _ = engine.attach()
    good, _ = engine.attach()
    bad.store(layout.CLIENT_STATE_OFFSET, 4711)
    engine.acceptor.has_pending()
    assert engine.dismiss_ended() == [bad.place]
    assert good.answer is Answer.ACCEPTED


def test_outputs_without_room_wait_in_order(engine: Engine) -> None:
    front_end, session = engine.attach()
    number = fill(session)
    session.send(RecordKind.REPLY, (bytes([number]), b""))  # short, but after the others
    got: list[int] = []
    for _ in range(3):
        front_end.channel.drain(lambda kind, record: got.append(record[0]))
        session.flush()
    assert got == list(range(number + 1))
    assert not session.is_stuck


def test_flush_without_room_changes_nothing(engine: Engine) -> None:
    _, session = engine.attach()
    fill(session)
    before = session.channel.outputs.statistics().num_messages
    session.flush()
    assert session.is_stuck
    assert session.channel.outputs.statistics().num_messages == before


def test_a_front_end_that_does_not_read_is_dismissed_after_the_timeout(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    front_end, session = engine.attach()
    reader, other = engine.attach()
    fill(session)
    assert engine.dismiss_ended() == []
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + TIMEOUT_S + 1)
    assert session.ended() is SessionEnd.TOO_SLOW
    assert engine.dismiss_ended() == [front_end.place]
    assert front_end.answer is Answer.TOO_SLOW
    assert reader.answer is Answer.ACCEPTED
    assert engine.acceptor.sessions == {reader.place: other}


def test_a_slow_reader_gets_the_full_timeout_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    front_end, session = engine.attach()
    fill(session)
    session.send(RecordKind.REPLY, (bytes(250_000),))
    session.send(RecordKind.REPLY, (bytes(250_000),))
    session.send(RecordKind.REPLY, (bytes(250_000),))
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + TIMEOUT_S - 1)
    front_end.channel.drain(lambda kind, record: None)
    session.flush()
    assert session.is_stuck
    monkeypatch.setattr(time, "monotonic", lambda: began + TIMEOUT_S + 1)
    assert session.ended() is None


def test_a_session_without_a_timeout_never_counts_as_too_slow(
    engine: Engine, no_pidfd: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    front_end = engine.front_end()
    segment = registry.attach(front_end.path, SegmentKind.CLIENT, "x", Access.ALL)
    session = Session(0, engine.control, segment, None, timeout_s=None)
    engine.acceptor.sessions[0] = session
    fill(session)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 10**6)
    assert session.ended() is None


def test_a_private_engine_accepts_no_front_end() -> None:
    with Segment.create(SegmentKind.CONTROL) as control:
        page, view = ControlPage(control), ControlView(control)
        acceptor = ClientAcceptor(
            control, page, None, TIMEOUT_S, lambda place: None, lambda place: False
        )
        view.say_hello(3, 2**62)
        assert not acceptor.has_pending()
        assert list(acceptor.accept_new()) == []
        assert view.answer(3, 2**62) is None
        page.close()
        view.close()


def test_the_name_of_a_client_segment_is_beside_the_engines(engine: Engine) -> None:
    assert engine.acceptor._client_path(4) == registry.client_path(engine.name, 4)


@pytest.mark.parametrize("nonce", [1, 8, 2**62, 2**64 - 1])
def test_a_hello_that_nobody_sent_leaves_a_live_front_end_alone(engine: Engine, nonce: int) -> None:
    victim, session = engine.attach()
    for word in (nonce, victim.nonce, 0):
        engine.view.say_hello(victim.place, word)
        assert list(engine.acceptor.accept_new()) == []
    assert engine.dismissed == []
    assert engine.acceptor.sessions == {victim.place: session}
    assert victim.answer is Answer.ACCEPTED
    assert session.ended() is None


def test_a_hello_that_nobody_sent_does_not_hide_why_a_front_end_was_dismissed(
    engine: Engine,
) -> None:
    victim, session = engine.attach()
    engine.acceptor.dismiss(session, Answer.TOO_SLOW)
    engine.view.say_hello(victim.place, 8)
    assert list(engine.acceptor.accept_new()) == []
    assert victim.answer is Answer.TOO_SLOW


def test_an_answer_is_not_for_the_next_front_end_in_that_place(engine: Engine) -> None:
    """A front end dies before it is accepted, and the next one must not get its refusal."""
    first = engine.front_end()
    first.say_hello()
    first.die()
    second = engine.front_end(place=first.place)
    assert list(engine.acceptor.accept_new()) == []
    assert second.answer is None
    second.say_hello()
    assert len(list(engine.acceptor.accept_new())) == 1
    assert second.answer is Answer.ACCEPTED


def test_a_front_end_that_lives_but_lost_its_lock_is_gone(engine: Engine) -> None:
    """exec keeps the process and drops the lock."""
    front_end, session = engine.attach()
    assert session.ended() is None
    front_end.segment._drop_owner_fd()
    assert session.ended() is SessionEnd.DIED
    assert engine.dismiss_ended() == [front_end.place]


def test_a_damaged_release_of_an_output_slot_ends_that_session_only(engine: Engine) -> None:
    bad, session = engine.attach()
    good, _ = engine.attach()
    session.send(RecordKind.REPLY, (bytes(33 * 2**20),))  # in a large slot, with excess pages
    table = layout.OUTPUT_SLOT_TABLE_OFFSET
    last = layout.NUM_SLOTS - 1
    for index in (last - 1, last):
        entry = table + index * layout.SLOT_ENTRY_BYTES
        bad.store(entry + layout.SLOT_RELEASED_OFFSET, 7)
    assert session.channel.output_slots.has_excess
    session.maintain()
    assert session.ended() is SessionEnd.BROKEN_PROTOCOL
    assert engine.dismiss_ended() == [bad.place]
    assert good.answer is Answer.ACCEPTED


LIMIT = 2**64 - layout.RECORD_ALIGNMENT


def test_cursors_that_could_soon_not_be_stored_are_refused(engine: Engine) -> None:
    front_end = engine.front_end()
    front_end.store(layout.OUTPUT_PUBLISHED_OFFSET, LIMIT)
    front_end.store(layout.OUTPUT_CONSUMED_OFFSET, LIMIT)
    front_end.say_hello()
    assert list(engine.acceptor.accept_new()) == []
    assert front_end.answer is Answer.NOT_USABLE


def test_slot_counts_that_can_no_longer_be_stored_end_the_session(engine: Engine) -> None:
    front_end, session = engine.attach()
    for index in range(layout.NUM_SLOTS):
        entry = layout.OUTPUT_SLOT_TABLE_OFFSET + index * layout.SLOT_ENTRY_BYTES
        front_end.store(entry + layout.SLOT_PUBLISHED_OFFSET, 2**64 - 1)
        front_end.store(entry + layout.SLOT_RELEASED_OFFSET, 2**64 - 1)
    session.send(RecordKind.REPLY, (bytes(2**19),))
    assert session.ended() is SessionEnd.BROKEN_PROTOCOL


@pytest.mark.parametrize("holds_up_others", [True, False])
def test_a_stopped_front_end_is_too_slow_only_if_others_wait_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, holds_up_others: bool
) -> None:
    front_end, _ = engine.attach()
    monkeypatch.setattr("shmllm.engine.session.is_stopped", lambda pid: pid == os.getpid())
    if holds_up_others:
        engine.holding.add(front_end.place)
    assert engine.dismiss_ended() == []
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + TIMEOUT_S + 1)
    assert engine.dismiss_ended() == ([front_end.place] if holds_up_others else [])
    assert front_end.answer is (Answer.TOO_SLOW if holds_up_others else Answer.ACCEPTED)


def test_a_front_end_that_continues_is_not_too_slow(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    front_end, _ = engine.attach()
    engine.holding.add(front_end.place)
    stopped = [True, False, True]
    monkeypatch.setattr("shmllm.engine.session.is_stopped", lambda pid: stopped.pop())
    began = time.monotonic()
    for passed_s in (0, TIMEOUT_S, TIMEOUT_S + 1):
        monkeypatch.setattr(time, "monotonic", lambda now=began + passed_s: now)
        assert engine.dismiss_ended() == []


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        (RecordKind.ABORT, 8),
        (RecordKind.ADD, 2**26 + 1),
        (RecordKind.POOL, 2**27),
        (RecordKind.CALL, 2**24 + 1),
        (RecordKind.WEIGHTS, 2**25),
    ],
)
def test_a_record_in_a_slot_that_would_hold_up_the_engine_ends_the_session(
    engine: Engine, kind: RecordKind, nbytes: int
) -> None:
    front_end, session = engine.attach()
    slot = front_end.channel.slots.claim(nbytes)
    assert slot is not None
    parts = encode_in_slot(kind, slot.publish())
    assert front_end.channel.try_send(RecordKind.IN_SLOT, *parts)
    taken: list[int] = []
    session.take(lambda session, kind, record: taken.append(kind), in_turns=False)
    assert not taken
    assert session.ended() is SessionEnd.BROKEN_PROTOCOL
    assert f"{kind.name} of {nbytes} bytes" in str(session.error)
    assert engine.dismiss_ended() == [front_end.place]


def test_a_turn_ends_after_64_records_or_10_ms(engine: Engine) -> None:
    front_end, session = engine.attach()
    for _ in range(100):
        assert front_end.channel.try_send(RecordKind.ABORT, b"")
    taken: list[int] = []

    def take_slowly(_: Session, kind: int, record: memoryview) -> None:
        taken.append(kind)
        time.sleep(0.006)

    session.take(take_slowly, in_turns=True)
    assert len(taken) in (1, 2)
    before = len(taken)
    session.take(lambda _, kind, record: taken.append(kind), in_turns=True)
    assert len(taken) - before <= 64
    session.take(take_slowly, in_turns=False)
    assert len(taken) == 100


def test_embeddings_without_a_request_end_with_the_session(engine: Engine) -> None:
    front_end, session = engine.attach()
    writer = TensorWriter(front_end.channel.slots)
    ref = writer.try_put(np.zeros((2, 3), np.float32))
    assert ref is not None
    session.keep_embeds(PromptEmbeds(1, ref.encode()), max_bytes=24)
    kept = weakref.ref(session._embeds[1])  # type: ignore[index]
    engine.acceptor.dismiss(session, Answer.NOT_CONNECTED)
    assert kept() is None


def test_two_wrong_hellos_do_not_bring_a_dismissed_front_end_back(engine: Engine) -> None:
    """Its requests are gone, and its segment may still be under its name."""
    victim, session = engine.attach()
    segment = victim.segment
    engine.acceptor.dismiss(session, Answer.TOO_SLOW)
    assert registry.publish(segment, victim.path) or victim.path.exists()
    for nonce in (8, victim.nonce):
        engine.view.say_hello(victim.place, nonce)
        assert list(engine.acceptor.accept_new()) == []
    assert victim.answer is Answer.TOO_SLOW


def test_a_front_end_whose_hello_was_overwritten_says_it_again(engine: Engine) -> None:
    front_end = engine.front_end()
    front_end.say_hello()
    engine.view.say_hello(front_end.place, 8)
    assert list(engine.acceptor.accept_new()) == []
    front_end.channel.repeat_hello(front_end.place, front_end.nonce)
    assert len(list(engine.acceptor.accept_new())) == 1
    assert front_end.answer is Answer.ACCEPTED


def test_embeddings_larger_than_any_prompt_are_not_copied(engine: Engine) -> None:
    front_end, session = engine.attach()
    tensor = np.ones((4, 8), np.float32)
    ref = TensorWriter(front_end.channel.slots).try_put(tensor)
    assert ref is not None
    with pytest.raises(ProtocolMismatchError, match="PROMPT_EMBEDS of 128 bytes fit no prompt"):
        session.keep_embeds(PromptEmbeds(1, ref.encode()), max_bytes=127)
    assert session.take_embeds(1) is None
    session.keep_embeds(PromptEmbeds(1, ref.encode()), max_bytes=128)
    assert session.take_embeds(1).shape == (4, 8)
