"""Backlog: sends records to one front end, now or as soon as its output ring has room.

A record that is too large for the ring goes through an output slot. If shared memory has no room
for it either, records without its log-probabilities replace it. This module must not know who the
front end is, nor what becomes of one that does not read.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator

from shmllm.errors import NoSpaceError
from shmllm.ipc.core_channel import CoreChannel
from shmllm.outputs.columns import OutputColumns
from shmllm.outputs.logprobs import PromptLogprobs
from shmllm.wire.codec import (
    Parts,
    decode,
    encode_in_slot,
    encode_outputs,
    encode_rejected,
    encode_reply,
)
from shmllm.wire.messages import RecordKind, Rejected, Reply


class Backlog:
    """The records that wait for room in an output ring, in their order.

    `send` and `flush` raise ProtocolMismatchError if the front end wrote invalid words into its
    segment.

    Args:
        channel: the engine's end of the channel.
        on_no_room: called with the error when shared memory has no room for a record, which is
            then replaced.
    """

    def __init__(self, channel: CoreChannel, on_no_room: Callable[[NoSpaceError], None]) -> None:
        self._channel = channel
        self._on_no_room = on_no_room
        self._records: deque[tuple[RecordKind, Parts]] = deque()
        self._stuck_since = 0.0
        self._seen_consumed = 0

    @property
    def is_stuck(self) -> bool:
        """Whether records wait for room in the ring."""
        return bool(self._records)

    @property
    def stuck_since(self) -> float | None:
        """When the first waiting record became the first and found no room, in seconds of
        CLOCK_MONOTONIC; None if no record waits."""
        return self._stuck_since if self._records else None

    def has_room_again(self) -> bool:
        """Whether the front end has read outputs since the last one found no room, or has damaged
        its cursor, which `flush` finds then."""
        return self._channel.outputs.consumed_position != self._seen_consumed

    def send(self, kind: RecordKind, parts: Parts, is_urgent: bool) -> None:
        """Publish a record now, or after the waiting records as soon as the ring has room.

        Args:
            kind: the kind of the record.
            parts: the record's bytes.
            is_urgent: wake a front end that waits for urgent records only.
        """
        if not self._records:
            if self._fits_ring(parts) and self._channel.try_send(kind, *parts, is_urgent=is_urgent):
                return
            self._stuck_since = time.monotonic()
        self._records.append((kind, parts))
        if len(self._records) == 1:
            self.flush()

    def flush(self) -> None:
        """Publish waiting records as long as there is room."""
        while self._records:
            kind, parts = self._records[0]
            self._seen_consumed = self._channel.outputs.consumed_position
            if not self._fits_ring(parts):
                if not self._move_to_slot(kind, parts):
                    return
                continue
            if not self._channel.try_send(kind, *parts):
                return
            self._records.popleft()
            self._stuck_since = time.monotonic()

    def _fits_ring(self, parts: Parts) -> bool:
        return sum(map(len, parts)) <= self._channel.outputs.max_payload_bytes

    def _move_to_slot(self, kind: RecordKind, parts: Parts) -> bool:
        """Move the first waiting record, which is too large for the ring, into an output slot.

        Returns:
            False if the front end holds all slots. It releases a slot before it advances in the
            ring, so `has_room_again` notices the release.
        """
        try:
            slot = self._channel.output_slots.claim(sum(map(len, parts)))
        except NoSpaceError as error:
            self._on_no_room(error)
            self._records.popleft()
            self._records.extendleft(reversed(list(_replacements(kind, parts, error))))
            return True
        if slot is None:
            return False
        offset = 0
        for part in parts:
            slot.buffer[offset : offset + len(part)] = part
            offset += len(part)
        self._records[0] = RecordKind.IN_SLOT, encode_in_slot(kind, slot.publish())
        return True


def _replacements(
    kind: RecordKind, parts: Parts, error: NoSpaceError
) -> Iterator[tuple[RecordKind, Parts]]:
    """The records to send instead of one that finds no room in shared memory.

    Requests whose log-probabilities find no room end with an error, and the front end ignores
    their later rows. All other requests get their tokens. A reply becomes an error.
    """
    message = decode(kind, memoryview(b"".join(parts)))
    if isinstance(message, Reply):
        content = json.dumps([type(error).__name__, str(error), ""])
        yield RecordKind.REPLY, encode_reply(Reply(message.number, False, content))
    numbers: list[int] = []
    if isinstance(message, PromptLogprobs):
        numbers = [message.number]
    elif isinstance(message, OutputColumns) and message.logprobs is not None:
        numbers = [message.numbers[row] for row in message.logprobs.rows]
        message.logprobs = None
    for number in numbers:
        refusal = f"no room for its log-probabilities: {error}"
        yield RecordKind.REJECTED, encode_rejected(Rejected(number, refusal))
    if isinstance(message, OutputColumns):
        yield RecordKind.OUTPUTS, encode_outputs(message)
