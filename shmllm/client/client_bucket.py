"""The bucket of new weights that a front end fills in the slots of one connection.

Where shared memory has no room for another slot, the engine's release of one makes room.

An exception of a signal handler may end any method. The slot is then free, or the bucket's.
"""

from __future__ import annotations

import time

from shmllm.client.protocol import BucketMemory
from shmllm.client.sending import MakeRoom, claim_slot, send, wait_for_slot
from shmllm.errors import NoSpaceError
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.slots import Slot
from shmllm.wire import codec
from shmllm.wire.messages import RecordKind, Weights
from shmllm.wire.weight_bucket import BUCKET_BYTES

RELEASE_S = 30.0
"""The longest time to wait for the release of a slot if shared memory is full, in seconds."""


class ClientBucket:
    """
    Args:
        channel: the channel to the engine.
    """

    def __init__(self, channel: ClientChannel) -> None:
        self._channel = channel
        self._slot: Slot | None = None
        self._num_publications = 0

    def claim(self, make_room: MakeRoom) -> Slot:
        """See `EngineClient.claim_bucket`, and `sending` for `make_room`."""
        self.discard()
        self._channel.slots.begin_message()
        try:
            self._slot = slot = self._claim(make_room)
            self._num_publications = self._channel.slots.num_publications(slot.index)
            return slot
        except BaseException:
            self._slot = None
            self._channel.slots.take_back()
            raise

    def _claim(self, make_room: MakeRoom) -> Slot:
        deadline = time.monotonic() + RELEASE_S
        while True:
            # Before the claim: afterwards, the engine may have released the slot that was missing.
            may_wait = self._channel.slots.has_published and time.monotonic() < deadline
            try:
                return claim_slot(self._channel, BUCKET_BYTES, make_room)
            except NoSpaceError:
                if not may_wait:
                    raise
            wait_for_slot(self._channel, make_room)

    def send(self, bucket: BucketMemory, pieces: str, make_room: MakeRoom) -> None:
        """See `EngineClient.send_bucket`, and `sending` for `make_room`."""
        assert isinstance(bucket, Slot)
        before = self._channel.requests.position
        try:
            message = Weights(bucket.publish(), pieces)
            send(self._channel, RecordKind.WEIGHTS, codec.encode_weights(message), make_room)
            self._slot = None
        except BaseException:
            if self._channel.requests.position == before:
                self.discard()
            self._slot = None
            raise

    def discard(self) -> None:
        """See `EngineClient.discard_bucket`."""
        slot = self._slot
        if slot is not None:
            self._channel.slots.take_back_one(slot.index, self._num_publications)
            self._slot = None
