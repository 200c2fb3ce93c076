"""The bucket of new weights that a front end fills in the slots of one connection.

An exception of a signal handler may end any method. The slot is then free, or the bucket's.
"""

from __future__ import annotations

from collections.abc import Callable

from shmllm.client.protocol import BucketMemory
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

    def claim(self, claim_slot: Callable[[int], Slot]) -> Slot:
        """See `EngineClient.claim_bucket`.

        Args:
            claim_slot: waits for a slot of so many bytes; raises EngineDeadError.
        """
        self.discard()
        self._channel.slots.begin_message()
        try:
            self._slot = slot = claim_slot(BUCKET_BYTES)
            self._num_publications = self._channel.slots.num_publications(slot.index)
            return slot
        except BaseException:
            self._slot = None
            self._channel.slots.take_back()
            raise

    def send(
        self,
        send: Callable[[RecordKind, codec.Parts], None],
        bucket: BucketMemory,
        pieces: str,
    ) -> None:
        """See `EngineClient.send_bucket`.

        Args:
            send: sends a record; raises EngineDeadError.
        """
        assert isinstance(bucket, Slot)
        before = self._channel.requests.position
        try:
            message = Weights(bucket.publish(), pieces)
            send(RecordKind.WEIGHTS, codec.encode_weights(message))
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
