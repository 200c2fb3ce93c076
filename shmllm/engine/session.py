"""One front end as the engine sees it: its channel, its life, and what it has yet to read."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

from shmllm.errors import NoSpaceError, ProtocolMismatchError
from shmllm.ipc.channel import CoreChannel
from shmllm.ipc.liveness import wait_for_end
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotRef
from shmllm.ipc.tensors import TensorReader, TensorRef
from shmllm.outputs.columns import OutputColumns
from shmllm.outputs.logprobs import PromptLogprobs
from shmllm.wire.codec import (
    Parts,
    decode,
    decode_in_slot,
    encode_in_slot,
    encode_outputs,
    encode_rejected,
    encode_reply,
)
from shmllm.wire.messages import PromptEmbeds, RecordKind, Rejected, Reply

RECORDS_PER_TURN = 64
WATCH_PERIOD_S = 0.25


class SessionEnd(Enum):
    """Why a session is over."""

    CLOSED = auto()
    DIED = auto()
    TOO_SLOW = auto()
    BROKEN = auto()


class Session:
    """
    Args:
        place: the front end's number, which its requests carry.
        control: the engine's segment.
        segment: the front end's segment; closed with the session.
        pidfd: becomes readable when the front end is gone; closed with the session. None
            where its pid means nothing here; then its ownership lock is looked at.
        patience_s: how long outputs may find no room before the front end counts as too
            slow; None waits for ever, which harms nobody when there is only one.

    Attributes:
        broken: set when the front end wrote into its segment what cannot be.
    """

    def __init__(
        self,
        place: int,
        control: Segment,
        segment: Segment,
        pidfd: int | None,
        patience_s: float | None,
    ) -> None:
        self.place = place
        self.channel = CoreChannel(control, segment)
        self._segment = segment
        self._pidfd = pidfd
        self._patience_s = patience_s
        self._stuck_since = 0.0
        self._free_bytes = 0
        self.broken: ProtocolMismatchError | None = None
        self._backlog: deque[tuple[RecordKind, Parts]] = deque()
        self._tensors = TensorReader(self.channel.slots)
        self._embeds: tuple[int, Any] | None = None

    @property
    def pid(self) -> int:
        """Of the front end, in its own namespace."""
        return self._segment.creator_pid

    @property
    def is_stuck(self) -> bool:
        """Whether outputs wait for room, so that no more of them should be made."""
        return bool(self._backlog)

    @property
    def is_closing(self) -> bool:
        """Whether the front end said that it leaves."""
        return self.channel.is_client_closing

    def has_requests(self) -> bool:
        """Whether there is something to `take`; not while the answers would have no room."""
        return not self._backlog and self.channel.has_requests()

    def take(self, handler: Callable[[Session, int, memoryview], None], limit: int) -> None:
        """Hand what it sent to a handler."""

        def handle(kind: int, record: memoryview) -> None:
            if kind != RecordKind.IN_SLOT:
                handler(self, kind, record)
                return
            inner_kind, place = decode_in_slot(record)
            ref = SlotRef(*place)
            with self.channel.slots.view(ref) as view:
                handle(inner_kind, view)
            self.channel.slots.release(ref)

        try:
            self.channel.drain(handle, limit)
        except ProtocolMismatchError as error:
            self.broken = error

    def send(self, kind: RecordKind, parts: Parts, is_urgent: bool = True) -> None:
        """Publish now or, behind what already waits, as soon as there is room.

        Args:
            is_urgent: wake a front end that sleeps until something is.
        """
        if not self._backlog:
            if self._fits_ring(parts) and self._publish(kind, parts, is_urgent):
                return
            self._stuck_since = time.monotonic()
        self._backlog.append((kind, parts))
        if len(self._backlog) == 1:
            self.flush()

    def keep_embeds(self, message: PromptEmbeds) -> None:
        """Copy a prompt's embeddings out of their slot, for the request that follows.

        Raises:
            ProtocolMismatchError: there is no such tensor.
        """
        try:
            with self._tensors.view(TensorRef.decode(message.ref)) as view:
                self._embeds = message.number, view.torch().clone()
        except (TypeError, ValueError, RuntimeError) as problem:  # whatever torch says of it
            raise ProtocolMismatchError(f"PROMPT_EMBEDS: {problem}") from problem

    @contextlib.contextmanager
    def borrowed(self, ref: tuple[int, int, int]) -> Iterator[memoryview]:
        """What lies in one of its slots, which goes back at the end."""
        slots = self.channel.slots
        memory = slots.writable_view(SlotRef(*ref))
        try:
            yield memory
        finally:
            slots.release(SlotRef(*ref))

    def take_embeds(self, number: int) -> Any:
        """The embeddings of the prompt of a request; None if it has token ids."""
        if self._embeds is None:
            return None
        (of, embeds), self._embeds = self._embeds, None
        return embeds if of == number else None

    def is_waiting_for_us(self) -> bool:
        """Whether there is something to take from it, or room for what it waits for."""
        return self.has_room_again() if self.is_stuck else self.has_requests()

    def has_room_again(self) -> bool:
        """Whether the front end has read since outputs last found no room."""
        try:
            return self.channel.outputs.free_bytes > self._free_bytes
        except ProtocolMismatchError as error:
            self.broken = error
            return True

    def flush(self) -> None:
        """Publish of what waits as much as there is room for."""
        try:
            while self._backlog:
                kind, parts = self._backlog[0]
                self._free_bytes = self.channel.outputs.free_bytes
                if not self._fits_ring(parts):
                    if not self._move_to_slot(kind, parts):
                        return
                    continue
                if not self.channel.try_send(kind, *parts):
                    return
                self._backlog.popleft()
                self._stuck_since = time.monotonic()
        except ProtocolMismatchError as error:
            self.broken = error

    def _fits_ring(self, parts: Parts) -> bool:
        return sum(map(len, parts)) <= self.channel.outputs.max_payload_bytes

    def _publish(self, kind: RecordKind, parts: Parts, is_urgent: bool) -> bool:
        try:
            return self.channel.try_send(kind, *parts, is_urgent=is_urgent)
        except ProtocolMismatchError as error:
            self.broken = error
            return False

    def _move_to_slot(self, kind: RecordKind, parts: Parts) -> bool:
        """Put the first record, which the ring cannot hold, into a slot; False while all are
        lent. The front end gives one back before it moves on in the ring, so
        `has_room_again` sees that, too."""
        try:
            slot = self.channel.output_slots.claim(sum(map(len, parts)))
        except NoSpaceError as error:
            self._backlog.popleft()
            self._backlog.extendleft(reversed(list(_in_place_of(kind, parts, error))))
            return True
        if slot is None:
            return False
        offset = 0
        for part in parts:
            slot.buffer[offset : offset + len(part)] = part
            offset += len(part)
        self._backlog[0] = RecordKind.IN_SLOT, encode_in_slot(kind, slot.publish())
        return True

    @contextlib.contextmanager
    def ending_the_process_if_it_dies(self) -> Iterator[None]:
        """For what takes long and cannot look at the front end in between: imports. A thread
        looks at it meanwhile."""
        is_over = threading.Event()

        def watch() -> None:
            while self._pidfd is not None and not wait_for_end(self._pidfd, WATCH_PERIOD_S):
                if is_over.is_set():
                    return
            if not is_over.is_set():
                os._exit(0)

        threading.Thread(target=watch, daemon=True).start()
        yield
        is_over.set()

    def ended(self) -> SessionEnd | None:
        """Whether, and why, the front end is done. Costs a system call."""
        if self.broken is not None:
            return SessionEnd.BROKEN
        if self.is_closing:
            return SessionEnd.CLOSED
        if self._pidfd is not None:
            gone = wait_for_end(self._pidfd, 0)
        else:
            gone = not self._segment.is_owned()
        if gone:
            return SessionEnd.DIED
        if self._backlog and self._patience_s is not None:
            stuck_s = time.monotonic() - self._stuck_since
            return SessionEnd.TOO_SLOW if stuck_s > self._patience_s else None
        return None

    def tidy(self) -> None:
        """Show what the channel has counted, and give back what large outputs left."""
        self.channel.publish_statistics()
        if self.channel.output_slots.has_excess:
            self.channel.output_slots.reclaim()

    def close(self) -> None:
        self.channel.close()
        self._segment.close()
        if self._pidfd is not None:
            os.close(self._pidfd)


def _in_place_of(
    kind: RecordKind, parts: Parts, error: NoSpaceError
) -> Iterator[tuple[RecordKind, Parts]]:
    """What to send instead where shared memory has no room: the requests that asked for the
    log-probabilities end with an error, the others have their tokens all the same. Rows of a
    request that ended so are passed over by the front end. A reply becomes an error."""
    message = decode(kind, memoryview(b"".join(parts)))
    if isinstance(message, Reply):
        words = json.dumps([type(error).__name__, str(error), ""])
        yield RecordKind.REPLY, encode_reply(Reply(message.number, False, words))
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
