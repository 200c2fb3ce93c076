from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.interrupting import Interrupted, Moment, raising_handler

from shmllm.ipc import layout
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.output_waiter import NON_URGENT_DELAY_S, OutputWaiter
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import Parked, SegmentKind
from shmllm.ipc.wait import WaitPolicy
from shmllm.ipc.words import Word

POLICY = WaitPolicy(0, 0, 0.001, 0.002)
PATIENT = WaitPolicy(0, 0, 60.0, 60.0)


@pytest.fixture
def waiter(client: Segment) -> Iterator[OutputWaiter]:
    waiter = OutputWaiter(client, POLICY)
    yield waiter
    waiter.close()
    waiter.close()


@pytest.fixture
def parked(client: Segment) -> Iterator[Word]:
    word = Word(client.buffer, layout.CLIENT_PARKED_OFFSET)
    yield word
    word.close()


def test_a_wait_ends_with_data_and_parks_for_it_otherwise(
    waiter: OutputWaiter, parked: Word
) -> None:
    assert waiter.wait(lambda: True)
    assert waiter.times_parked == 0
    seen: list[int] = []

    def look() -> bool:
        seen.append(parked.load())
        return False

    assert not waiter.wait(look)
    assert waiter.times_parked == 1
    assert Parked.FOR_DATA in seen
    assert parked.load() == Parked.NO


def test_a_wait_for_room_says_so(waiter: OutputWaiter, parked: Word) -> None:
    seen: list[int] = []
    waiter.wait_for_room(lambda: bool(seen.append(parked.load())))  # type: ignore[func-returns-value]
    assert Parked.FOR_ROOM in seen


def test_a_deadline_in_the_past_looks_once(waiter: OutputWaiter) -> None:
    looks: list[int] = []
    assert not waiter.wait(lambda: bool(looks.append(1)), None, time.monotonic())  # type: ignore[func-returns-value]
    assert looks == [1]
    assert waiter.times_parked == 0


def test_a_wait_for_urgent_outputs_ends_soon_and_the_next_one_waits_for_any(
    client: Segment, waiter: OutputWaiter
) -> None:
    waiter.set_policy(PATIENT)
    began = time.monotonic()
    assert not waiter.wait(lambda: False, lambda: False, began + 60)
    assert time.monotonic() - began >= NON_URGENT_DELAY_S
    # Outputs come slowly: the next wait ends with the first of any kind.
    waiter.wake()
    assert waiter.wait(lambda: waiter.times_parked == 2, lambda: False, began + 60)


def test_a_wake_up_before_a_park_ends_it(waiter: OutputWaiter) -> None:
    waiter.set_policy(PATIENT)
    waiter.wake()
    assert not waiter.wait(lambda: False)


def test_every_channel_beats_before_a_park(
    control: Segment, client: Segment, nothing_left_behind: None
) -> None:
    """Engines cut off a front end that does not beat, also if it waits for another one."""
    with Segment.create(SegmentKind.CLIENT) as other:
        first = ClientChannel(control, client, POLICY)
        second = ClientChannel(control, other, POLICY, first.waiter)
        assert second.waiter is first.waiter
        words = [Word(each.buffer, layout.CLIENT_HEARTBEAT_OFFSET) for each in (client, other)]
        assert [word.load() for word in words] == [0, 0]
        first.wait()
        assert all(word.load() for word in words)
        second.close()
        second.close()
        assert len(first.waiter.on_park) == 1
        first.wait()
        assert not first.wait()  # the waiter is the first one's
        for each in (first, *words):
            each.close()


def test_an_output_of_either_engine_ends_the_wait(
    control: Segment, client: Segment, nothing_left_behind: None
) -> None:
    with Segment.create(SegmentKind.CLIENT) as other:
        first = ClientChannel(control, client, PATIENT)
        second = ClientChannel(control, other, PATIENT, first.waiter)
        core = CoreChannel(control, other, client)
        parked = Word(client.buffer, layout.CLIENT_PARKED_OFFSET)

        def has_data() -> bool:
            if parked.load() and not second.has_data():
                core.try_send(2, b"output")  # posts the doorbell of the first segment
                return False
            return first.has_data() or second.has_data()

        assert first.waiter.wait(has_data)
        assert second.has_data()
        for each in (core, second, first, parked):
            each.close()


def test_an_interrupt_at_any_line_leaves_the_word_unset(client: Segment, parked: Word) -> None:
    """Otherwise the engine would post the doorbell for every output from then on."""
    with raising_handler():
        for number in range(1, 1000):
            waiter = OutputWaiter(client, POLICY)
            moment = Moment(number, ("shmllm/ipc/output_waiter", "shmllm/ipc/wait"))
            with suppress(Interrupted):
                moment.call(lambda waiter=waiter: waiter.wait(lambda: False, lambda: False))  # type: ignore[misc]
            waiter.wait(lambda: False)
            assert parked.load() == Parked.NO, moment.where
            waiter.close()
            if moment.where is None:
                break
    assert 10 < number < 999
