"""The wait for room in the ring of requests, before a record is sent."""

from __future__ import annotations

import pytest

from shmllm.client.sending import await_room
from shmllm.errors import EngineDeadError
from shmllm.ipc.ring import RingWriter
from shmllm.ipc.ring_reader import RingReader
from shmllm.ipc.words import PlainWord

CAPACITY = 1024


class Channel:
    """A channel to an engine that reads a record in each wait.

    Attributes:
        waiter: the channel itself.
    """

    def __init__(self, start):
        memory, words = memoryview(bytearray(CAPACITY)), memoryview(bytearray(16))
        published, consumed = PlainWord(words, 0), PlainWord(words, 8)
        published.store(start)
        consumed.store(start)
        self.requests = RingWriter(memory, published, consumed)
        self.reader = RingReader(memory, published, consumed)
        self.waiter = self
        self.num_waits = 0

    def has_data(self):
        return False

    def wait_for_room(self, ready):
        self.num_waits += 1
        self.reader.drain(lambda kind, view: None, 1)
        return ready()


@pytest.mark.parametrize("start", range(0, CAPACITY, 32))
@pytest.mark.parametrize("size", [100, 400, CAPACITY // 2 - 32])
def test_a_record_fits_at_every_place_of_the_ring(start, size):
    channel, record = Channel(start), bytes(size)
    while channel.requests.try_write(1, bytes(50)):
        pass
    await_room(channel, (record,), lambda: None)
    assert channel.num_waits
    assert channel.requests.try_write(2, record)


def test_the_end_of_the_engine_ends_the_wait():
    channel = Channel(0)
    while channel.requests.try_write(1, bytes(50)):
        pass

    def make_room():
        raise EngineDeadError("it died")

    with pytest.raises(EngineDeadError):
        await_room(channel, (bytes(100),), make_room)


def test_an_empty_ring_has_room():
    channel = Channel(0)
    await_room(channel, (bytes(100),), make_room=None)
    assert not channel.num_waits
