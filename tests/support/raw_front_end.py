"""A front end that writes any record and any word into its own segment."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.waiting import PATIENCE_S

from shmllm import EngineDeadError
from shmllm.client.attached import AttachedEngineClient
from shmllm.ipc.states import Answer
from shmllm.ipc.words import Word
from shmllm.wire import codec
from shmllm.wire.messages import Method, RecordKind

CUT_OFF = "sent invalid messages"
"""What the front end's error says."""
FIRST_CALL = 2**40 + 10_007
"""Random records hardly ever have the number of a call, whose reply theirs would be taken for."""


class RawFrontEnd:
    """A front end that can write anything into its own segment."""

    def __init__(self, name: str) -> None:
        self.client = AttachedEngineClient(name)
        self.client._num_calls = FIRST_CALL
        self.channel = self.client._channel
        self.memory = self.channel._client.buffer

    def enter(self) -> RawFrontEnd:
        self.client.wait_ready()
        return self

    def write(self, kind: int, record: bytes) -> None:
        self.channel.send(kind, record, on_full=self._no_room, deadline=None)

    def _no_room(self) -> None:
        raise AssertionError("the engine does not read")

    def word(self, offset: int) -> Any:
        return Word(self.memory, offset)

    def store(self, offset: int, value: int) -> None:
        word = self.word(offset)
        word.store(value)
        word.close()

    @property
    def answer(self) -> Answer | None:
        return self.client._view.answer(self.client._place, self.client._nonce)

    def is_cut_off(self) -> bool:
        return self.answer is Answer.BROKEN_PROTOCOL

    def check_cut_off(self) -> None:
        """Check that the engine cuts this front end off and that the front end reports it."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.is_cut_off():  # looked at often: it happens tens of thousands of times
            assert time.monotonic() < deadline, "it was not cut off"
            time.sleep(0.0002)
        with pytest.raises(EngineDeadError, match=CUT_OFF):  # noqa: PT012
            while time.monotonic() < deadline:  # outputs from before come first
                self.client.poll(0.0005).clear()
        self.client.close()

    def check_served(self) -> None:
        """Check that the engine answers a call that was sent behind all other records."""
        assert self.client.call(Method.RESET_PREFIX_CACHE) in (True, False)
        assert not self.is_cut_off()


def in_slot(front_end: RawFrontEnd, kind: int, record: bytes) -> None:
    """Write a record that lies in a tensor slot, as a large request does."""
    slot = front_end.channel.slots.claim(len(record))
    assert slot is not None
    slot.buffer[:] = record
    front_end.write(RecordKind.IN_SLOT, b"".join(codec.encode_in_slot(kind, slot.publish())))  # type: ignore[arg-type]
