"""Session: the engine's connection to one front end, and why it ends.

`Backlog` knows how records find room. Here its errors, like all others that come from invalid words
in the front end's segment, end the session.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from shmllm.engine.backlog import Backlog
from shmllm.engine.session_items import SessionItems
from shmllm.errors import IpcError, NoSpaceError, ProtocolMismatchError, SegmentError
from shmllm.ipc.client_bell import bell_nonce
from shmllm.ipc.core_channel import CoreChannel
from shmllm.ipc.error_log import front_end
from shmllm.ipc.liveness import is_stopped, wait_for_end
from shmllm.ipc.segment import LOST, Segment
from shmllm.ipc.slots import SlotRef
from shmllm.ipc.tensors import TensorReader, TensorRef
from shmllm.wire.codec import Parts, decode_in_slot
from shmllm.wire.messages import PromptEmbeds, RecordKind

RECORDS_PER_TURN = 64
TURN_S = 0.01
"""A turn of one front end, if there are others: whichever of the two ends first."""
LARGEST_IN_SLOT: dict[int, int] = {
    RecordKind.ADD: 2**26,
    RecordKind.POOL: 2**26,
    RecordKind.ABORT: 0,
    RecordKind.CALL: 2**24,
    RecordKind.WEIGHTS: 2**24,
    RecordKind.PROMPT_ITEM: 2**22,
}
"""The most bytes of a record in a slot. Decoding takes time in which no other front end is served.
A front end sends no prompt of more tokens than a model has positions, and splits an ABORT. The
longest CALL and WEIGHTS list the pieces in a bucket of weights, and the longest PROMPT_ITEM names
the small items that make room for the largest one."""
WATCH_PERIOD_S = 0.25

_P = ParamSpec("_P")


def _ends_session(
    method: Callable[Concatenate[Session, _P], None],
) -> Callable[Concatenate[Session, _P], None]:
    """Make invalid words in the front end's segment end this session, instead of the engine.

    Each public method of `Session` that uses those words in a way that can fail has this
    decorator.
    """

    @wraps(method)
    def guarded(self: Session, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except ProtocolMismatchError as error:
            self.protocol_error = error

    return guarded


class SessionEnd(Enum):
    """
    CLOSED           the front end closed its connection
    DIED             the front end's process ended, or gave up its segment by a call of exec
    TOO_SLOW         its output ring stayed full for too long, or a signal stopped it for too long
                     while other front ends waited for it
    BROKEN_PROTOCOL  it wrote invalid bytes into its segment
    LOST_MEMORY      its segment's file was truncated, or has a hole and /dev/shm is full
    """

    CLOSED = auto()
    DIED = auto()
    TOO_SLOW = auto()
    BROKEN_PROTOCOL = auto()
    LOST_MEMORY = auto()


class Session:
    """
    Args:
        place: the number of the front end in this engine; its requests have it as `client`.
        control: the engine's segment.
        segment: the front end's segment; the session closes it.
        bell: the segment whose doorbell wakes the front end, if that is another one; the session
            closes it.
        pidfd: the pidfd of the front end's process; the session closes it. None if the process is
            in another pid namespace: the session then checks only the segment's ownership lock.
        timeout_s: how many seconds the output ring may stay full, or the process stopped, before
            the front end counts as too slow. None means without limit, for an engine with a
            single front end.

    Attributes:
        nonce: the nonce of the front end's segment.
        connection: the nonce by which the front end names itself in traces; a front end of several
            engines has one at all of them.
        pid: the pid of the front end in its own pid namespace.
        items: the images that it has sent.
        protocol_error: the error, if the front end wrote invalid bytes into its segment.
        on_error: called with (text, place) for an error that ends no session.
    """

    def __init__(
        self,
        place: int,
        control: Segment,
        segment: Segment,
        pidfd: int | None,
        timeout_s: float | None,
        bell: Segment | None = None,
    ) -> None:
        self.place = place
        self.nonce = segment.nonce
        self.connection = bell_nonce(segment)
        self.pid = segment.creator_pid
        self.channel = CoreChannel(control, segment, bell)
        self._segment = segment
        self._bell = bell
        self._pidfd = pidfd
        self._timeout_s = timeout_s
        self._stopped_since: float | None = None
        self.protocol_error: ProtocolMismatchError | None = None
        self.on_error: Callable[[str, int], None] = _ignore_error
        self._backlog = Backlog(self.channel, self._record_no_room)
        self._tensors = TensorReader(self.channel.slots)
        self._embeds: tuple[int, Any] | None = None
        self.items = SessionItems(self._tensors)

    @property
    def _is_lost(self) -> bool:
        return self._segment.is_lost or (self._bell is not None and self._bell.is_lost)

    @property
    def error(self) -> IpcError | None:
        """The error, if the segment lost its file, or if the front end wrote invalid bytes into it.
        The zeros in a lost segment may be invalid bytes too, but then the loss is the cause."""
        if self._is_lost:
            return SegmentError(f"the segment of front end {self.place} {LOST}")
        return self.protocol_error

    @property
    def is_stuck(self) -> bool:
        """Whether outputs wait for room in the ring. The scheduler then skips this front end's
        requests."""
        return self._backlog.is_stuck

    @property
    def is_closing(self) -> bool:
        """Whether the front end announced that it disconnects."""
        return self.channel.is_client_closing

    def has_requests(self) -> bool:
        """Whether there are records to `take`. False while outputs wait, because the answers to
        these records would have no room."""
        return not self.is_stuck and self.channel.has_requests()

    @_ends_session
    def take(self, handler: Callable[[Session, int, memoryview], None], in_turns: bool) -> None:
        """Read the front end's records.

        Args:
            handler: called with (session, kind, record) for each record.
            in_turns: stop after `RECORDS_PER_TURN` records, or after the record with which
                `TURN_S` have passed; else read all.
        """

        def handle(kind: int, record: memoryview) -> None:
            if kind != RecordKind.IN_SLOT:
                handler(self, kind, record)
                return
            inner_kind, place = decode_in_slot(record)
            ref = SlotRef(*place)
            if ref.nbytes > LARGEST_IN_SLOT.get(inner_kind, ref.nbytes):
                raise ProtocolMismatchError(
                    f"{RecordKind(inner_kind).name} of {ref.nbytes} bytes would hold up the engine"
                )
            with self.channel.slots.view(ref) as view:
                handle(inner_kind, view)
            self.channel.slots.release(ref)

        if not in_turns:
            self.channel.drain(handle)
            return
        end = time.monotonic() + TURN_S
        for _ in range(RECORDS_PER_TURN):
            if not self.channel.drain(handle, limit=1) or time.monotonic() > end:
                return

    @_ends_session
    def send(self, kind: RecordKind, parts: Parts, is_urgent: bool = True) -> None:
        """Publish a record now, or after the waiting records as soon as the ring has room.

        Args:
            kind: the kind of the record.
            parts: the record's bytes.
            is_urgent: wake a front end that waits for urgent records only.
        """
        self._backlog.send(kind, parts, is_urgent)

    def keep_embeds(self, message: PromptEmbeds, max_bytes: int) -> None:
        """Copy a prompt's embeddings from their slot, for the request that follows.

        Raises:
            ProtocolMismatchError: the reference is not a valid tensor reference, or the tensor has
                more than `max_bytes` bytes.
        """
        ref = TensorRef.decode(message.ref)
        if ref.slot.nbytes > max_bytes:
            raise ProtocolMismatchError(f"PROMPT_EMBEDS of {ref.slot.nbytes} bytes fit no prompt")
        try:
            with self._tensors.view(ref) as view:
                self._embeds = message.number, view.torch().clone()
        except (TypeError, ValueError, RuntimeError) as problem:  # from torch
            raise ProtocolMismatchError(f"PROMPT_EMBEDS: {problem}") from problem

    @contextlib.contextmanager
    def slot_memory(self, ref: tuple[int, int, int]) -> Iterator[memoryview]:
        """The bytes in one of the front end's slots. The slot is released at the end."""
        slots = self.channel.slots
        memory = slots.writable_view(SlotRef(*ref))
        try:
            yield memory
        finally:
            slots.release(SlotRef(*ref))

    def take_embeds(self, number: int) -> Any:
        """The embeddings of a request's prompt; None if the prompt has token ids only."""
        if self._embeds is None:
            return None
        (owner, embeds), self._embeds = self._embeds, None
        return embeds if owner == number else None

    def has_work(self) -> bool:
        """Whether there are records to `take`, or room for waiting outputs."""
        return self._backlog.has_room_again() if self.is_stuck else self.has_requests()

    @_ends_session
    def flush(self) -> None:
        """Publish waiting outputs as long as there is room."""
        self._backlog.flush()

    def _record_no_room(self, error: NoSpaceError) -> None:
        name = front_end(self.pid, self.place)
        self.on_error(f"outputs for {name} found no room: {error}", self.place)

    @contextlib.contextmanager
    def exit_if_front_end_dies(self) -> Iterator[None]:
        """End this process if the front end dies within the `with` block. A thread waits for
        that, because imports take seconds during which the main thread cannot."""
        is_over = threading.Event()

        def wait() -> None:
            while not is_over.wait(WATCH_PERIOD_S):
                if self._is_gone():
                    os._exit(0)

        threading.Thread(target=wait, daemon=True).start()
        yield
        is_over.set()

    def ended(self, holds_up_others: bool = False) -> SessionEnd | None:
        """Why the session has to end; None if it continues. Makes system calls.

        Args:
            holds_up_others: other front ends wait until this one ends a pause, an update of the
                weights or a change of an adapter. It may take any time for that, but it must not be
                stopped.
        """
        if self._is_lost:
            return SessionEnd.LOST_MEMORY
        if self.protocol_error is not None:
            return SessionEnd.BROKEN_PROTOCOL
        if self.is_closing:
            return SessionEnd.CLOSED
        if self._is_gone():
            return SessionEnd.DIED
        now = time.monotonic()
        if not holds_up_others or self._pidfd is None or not is_stopped(self.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        if self._timeout_s is not None:
            times = (self._backlog.stuck_since, self._stopped_since)
            since = [each for each in times if each is not None]
            if since and now - min(since) > self._timeout_s:
                return SessionEnd.TOO_SLOW
        return None

    def reason_of(self, end: SessionEnd) -> str:
        """What the front end did wrong, in words; "" if it only closed its connection."""
        match end:
            case SessionEnd.CLOSED:
                return ""
            case SessionEnd.DIED:
                return "it ended without closing its connection"
            case SessionEnd.TOO_SLOW if self.is_stuck:
                return "it did not read its outputs in time"
            case SessionEnd.TOO_SLOW:
                return "a signal stopped it while other front ends waited for it"
            case SessionEnd.BROKEN_PROTOCOL:
                return f"it sent invalid messages: {self.protocol_error}"
            case SessionEnd.LOST_MEMORY:
                return f"its memory is lost: {self.error}"

    def _is_gone(self) -> bool:
        """Whether the process has ended or called exec. exec keeps the process, but drops the lock;
        a parent that is slow to reap keeps neither."""
        has_ended = self._pidfd is not None and wait_for_end(self._pidfd, 0)
        return has_ended or not self._segment.is_owned()

    @_ends_session
    def maintain(self) -> None:
        """Publish the channel's statistics, and free the pages that large outputs needed."""
        self.channel.publish_statistics()
        if self.channel.output_slots.has_excess:
            self.channel.output_slots.reclaim()

    def close(self) -> None:
        self._embeds = None  # the garbage collector may take long to find this object
        self.items.clear()
        self.channel.close()
        self._segment.close()
        if self._bell is not None:
            self._bell.close()
        if self._pidfd is not None:
            os.close(self._pidfd)


def _ignore_error(text: str, place: int) -> None:
    """The default of `on_error`."""
