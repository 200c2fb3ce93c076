"""ClientBucket where shared memory is full."""

from __future__ import annotations

import pytest

from shmllm.client.client_bucket import ClientBucket
from shmllm.errors import EngineDeadError, NoSpaceError
from shmllm.ipc.layout import SlotClass, SlotLayout
from shmllm.ipc.slots import SlotReader, SlotWriter
from shmllm.wire.weight_bucket import BUCKET_BYTES

TABLE_BYTES = 4096
LAYOUT = SlotLayout(0, (SlotClass(TABLE_BYTES, 3, BUCKET_BYTES, BUCKET_BYTES, True),))


class Channel:
    """The slots of a connection to an engine that releases a slot in each wait.

    Attributes:
        unread: the references that the engine has not released.
        room: the bytes that are free in shared memory.
    """

    def __init__(self, room):
        memory = memoryview(bytearray(TABLE_BYTES + 3 * BUCKET_BYTES))
        self.slots = SlotWriter(memory, LAYOUT, self.allocate, self.discard)
        self.reader = SlotReader(memory, LAYOUT)
        self.unread = []
        self.room = room

    def allocate(self, offset, nbytes):
        if nbytes > self.room:
            raise NoSpaceError("shared memory is full")
        self.room -= nbytes

    def discard(self, offset, nbytes):
        self.room += nbytes

    def wait(self, deadline):
        self.reader.release(self.unread.pop(0))


def do_nothing():
    pass


def send_one(channel):
    ref = ClientBucket(channel).claim(do_nothing).publish()
    channel.unread.append(ref)
    return ref


@pytest.fixture
def channel():
    return Channel(room=BUCKET_BYTES)


def test_a_full_memory_waits_for_a_slot_that_the_engine_releases(channel):
    send_one(channel)
    assert ClientBucket(channel).claim(do_nothing).index == 0
    assert not channel.unread


def test_without_a_slot_to_wait_for_a_full_memory_is_an_error(channel):
    channel.room = 0
    with pytest.raises(NoSpaceError):
        ClientBucket(channel).claim(do_nothing)
    assert not channel.slots._claimed


def test_a_release_just_after_the_failure_is_not_missed(channel, monkeypatch):
    ref = send_one(channel)

    class SlotsReleasedLate(SlotWriter):
        __slots__ = ()

        def claim(self, nbytes):
            try:
                return super().claim(nbytes)
            except NoSpaceError:
                channel.reader.release(ref)
                raise

    channel.slots.__class__ = SlotsReleasedLate
    monkeypatch.setattr(channel, "wait", lambda deadline: None)
    assert ClientBucket(channel).claim(do_nothing).index == 0


def test_the_wait_ends_with_the_engine(channel):
    send_one(channel)

    def look():
        raise EngineDeadError("dead")

    with pytest.raises(EngineDeadError):
        ClientBucket(channel).claim(look)


def test_the_wait_has_an_end(channel, monkeypatch):
    monkeypatch.setattr("shmllm.client.client_bucket.RELEASE_S", 0.0)
    send_one(channel)
    with pytest.raises(NoSpaceError):
        ClientBucket(channel).claim(do_nothing)
