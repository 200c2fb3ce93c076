"""Channels: the two ends of the connection between one front end and its engine.

`client_channel` and `core_channel` own how rings, tensor slots, doorbells and waiting work
together; this module has what they share. They must not know the meaning of a record. A channel
never decides that its peer is dead: a wait ends after the park cap at the latest, and the caller
checks `Segment.is_owned()` or a pidfd between two waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from shmllm.errors import SegmentError
from shmllm.ipc.doorbell import Doorbell
from shmllm.ipc.ring import RingWriter
from shmllm.ipc.ring_reader import Handler, RingReader
from shmllm.ipc.segment import Segment
from shmllm.ipc.wait import wake_if_parked_for_room
from shmllm.ipc.watching import (
    RecordWatcher,
    watched_draining,
    watched_receiving,
    watched_writing,
)
from shmllm.ipc.words import PlainWord


class ChannelEnd:
    """The base of both ends: it refuses the use of a closed segment and supports a watcher.

    Args:
        client: the front end's segment.
        writer: this end's ring.
        reader: the peer's ring.
        peer_parked: the word that tells whether the peer waits.
        peer_doorbell: the doorbell that wakes the peer.
    """

    __slots__ = (
        "_client",
        "_drain",
        "_is_closed",
        "_peer_doorbell",
        "_peer_parked",
        "_reader",
        "_receive",
        "_try_write",
        "_writer",
    )

    def __init__(
        self,
        client: Segment,
        writer: RingWriter,
        reader: RingReader,
        peer_parked: PlainWord,
        peer_doorbell: Doorbell,
    ) -> None:
        self._client = client
        self._peer_parked = peer_parked
        self._peer_doorbell = peer_doorbell
        self._is_closed = False
        self._writer = writer
        self._reader = reader
        self.watch(None)

    @property
    def nonce(self) -> int:
        """The random number that identifies this connection; both ends return the same one."""
        return self._client.nonce

    def watch(self, watcher: RecordWatcher | None) -> None:
        """Report each record to `watcher` from now on; None ends the reports."""
        self._try_write: Callable[..., bool] = self._writer.try_write
        self._drain: Callable[..., int] = self._reader.drain
        self._receive: Callable[..., int] = self._reader.receive
        if watcher is not None:
            self._try_write = watched_writing(self._writer, watcher)
            self._drain = watched_draining(self._reader, watcher)
            self._receive = watched_receiving(self._reader, watcher)

    def drain(self, handler: Handler, limit: int = 0) -> int:
        """Handle the unread records; see `RingReader.drain`."""
        if self._is_closed or not self._client.is_usable:
            self._raise_unusable()
        num_handled = self._drain(handler, limit)
        if num_handled:
            wake_if_parked_for_room(self._peer_parked, self._peer_doorbell)
        return num_handled

    def _raise_unusable(self) -> NoReturn:
        self._client.check_usable()
        raise SegmentError("this channel is closed")
