"""The state of a front end, from its rings and its heartbeat."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from shmllm.errors import SegmentError
from shmllm.ipc import layout
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.client_state import ACTIVE_FOR_S, HUNG_AFTER_S, client_state
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.segment import Segment
from shmllm.ipc.wait import WaitPolicy
from shmllm.ipc.words import Word


@pytest.fixture
def front(control: Segment, client: Segment) -> Iterator[ClientChannel]:
    channel = ClientChannel(control, client, WaitPolicy(0, 0, 0.001, 0.002))
    yield channel
    channel.close()


@pytest.fixture
def core(control: Segment, client: Segment) -> Iterator[CoreChannel]:
    channel = CoreChannel(control, client)
    yield channel
    channel.close()


def heartbeat_ns(client: Segment) -> int:
    word = Word(client.buffer, layout.CLIENT_HEARTBEAT_OFFSET)
    value = word.load()
    word.close()
    return value


def set_silent_for(client: Segment, silent_s: float) -> None:
    word = Word(client.buffer, layout.CLIENT_HEARTBEAT_OFFSET)
    word.store(time.monotonic_ns() - int(silent_s * 1e9))
    word.close()


def ignore(kind: int, record: memoryview) -> None:
    pass


def test_a_front_end_that_waits_is_active_and_later_idle(
    front: ClientChannel, client: Segment
) -> None:
    assert client_state(client) == "idle"
    front.wait()
    assert client_state(client) == "active"
    set_silent_for(client, ACTIVE_FOR_S + 0.1)
    assert client_state(client) == "idle"


def test_a_front_end_with_an_unread_request_is_active(
    front: ClientChannel, core: CoreChannel, client: Segment
) -> None:
    set_silent_for(client, 2 * HUNG_AFTER_S)
    front.try_send(1, b"request")
    assert client_state(client) == "active"
    core.drain(ignore)
    assert client_state(client) == "idle"


def test_a_front_end_that_leaves_outputs_unread_is_hung_after_a_time(
    front: ClientChannel, core: CoreChannel, client: Segment
) -> None:
    core.try_send(2, b"output")
    set_silent_for(client, HUNG_AFTER_S - 1)
    assert client_state(client) == "active"
    set_silent_for(client, HUNG_AFTER_S + 2.2)
    assert client_state(client) == "hung 7 s"
    front.beat()
    assert client_state(client) == "active"
    set_silent_for(client, HUNG_AFTER_S + 2.2)
    front.drain(ignore)
    assert client_state(client) == "idle"


def test_an_output_that_is_not_urgent_makes_no_front_end_hang(
    core: CoreChannel, client: Segment
) -> None:
    core.try_send(2, b"nobody asked for it", is_urgent=False)
    set_silent_for(client, 2 * HUNG_AFTER_S)
    assert client_state(client) == "idle"


@pytest.mark.parametrize("silent_s", [-1000.0, 1e6])
def test_any_heartbeat_gives_a_state(core: CoreChannel, client: Segment, silent_s: float) -> None:
    core.try_send(2, b"output")
    set_silent_for(client, min(silent_s, time.monotonic() - 1e-9))
    assert client_state(client).split()[0] in ("active", "hung")


def test_a_park_and_a_beat_store_the_time_and_a_closed_channel_refuses(
    front: ClientChannel, client: Segment
) -> None:
    assert heartbeat_ns(client) == 0
    for act in (front.wait, front.beat):
        before_ns = time.monotonic_ns()
        act()
        assert before_ns <= heartbeat_ns(client) <= time.monotonic_ns()
    front.close()
    with pytest.raises(SegmentError):
        front.beat()
