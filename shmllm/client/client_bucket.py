"""The bucket of new weights that a front end fills in the slots of one connection.

An exception of a signal handler may end any method. The slot is then free, or the bucket's.
"""

from __future__ import annotations

from shmllm.client.protocol import BucketMemory
from shmllm.client.sending import MakeRoom, claim_slot, send
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.slots import Slot
from shmllm.wire import codec
from shmllm.wire.messages import RecordKind, Weights
from shmllm.wire.weight_bucket import BUCKET_BYTES


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
            self._slot = slot = claim_slot(self._channel, BUCKET_BYTES, make_room)
            self._num_publications = self._channel.slots.num_publications(slot.index)
            return slot
        except BaseException:
            self._slot = None
            self._channel.slots.take_back()
            raise

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
