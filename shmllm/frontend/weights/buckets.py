"""The buckets that a front end fills with new weights, in the host's memory and on a GPU.

This module owns the way of a bucket from its memory to the engine, and the lifetime of the memory
on a GPU. It must not know which tensors go which way, nor the other calls of an update. It imports
no torch.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from shmllm.client.protocol import BucketMemory, DeviceSharing
from shmllm.errors import ShmLLMError
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.wire.messages import Method
from shmllm.wire.weight_bucket import Bucket, Source, device_bucket_bytes


class Buckets(Protocol):
    """A source of empty buckets, and the way of full ones to the engine. One is open at a time."""

    def open(self) -> Bucket:
        """Return an empty bucket, as soon as there is memory for it."""

    def wait(self) -> None:
        """Wait until the copies into the open bucket are done."""

    def send(self, bucket: Bucket) -> None:
        """Send the open bucket, and close it."""

    def discard(self) -> None:
        """Close the open bucket without sending it."""


class HostBuckets:
    """Buckets in the shared memory between front end and engine; the engine takes them later."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._lease: BucketMemory | None = None

    def open(self) -> Bucket:
        self._lease = self._dispatcher.use_client(lambda client: client.claim_bucket())
        return Bucket(self._lease.buffer)

    def wait(self) -> None:
        """Do nothing: the copies are done when they return."""

    def send(self, bucket: Bucket) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None, "a bucket is open"
        pieces = bucket.to_json()
        self._dispatcher.use_client(lambda client: client.send_bucket(lease, pieces))

    def discard(self) -> None:
        self._lease = None
        with contextlib.suppress(ShmLLMError):
            self._dispatcher.use_client(lambda client: client.discard_bucket())


class DeviceBuckets:
    """Buckets in memory of a GPU that the front end lends to the engine for one update.

    All buckets have the same memory, which `lend` has to show to the engine first. `send` returns
    when the engine has copied a bucket, so the memory can be filled again.

    Args:
        dispatcher: the front end's connection to the engine, which has an update in progress.
        sharing: allocates and exports the memory.
        device: the GPU, a torch.device.
        num_bytes: the size of the tensors to send, about: the bucket needs no more.

    Attributes:
        packer: fills these buckets.

    Raises:
        DeviceMemoryError: the memory cannot be allocated or exported.
    """

    def __init__(
        self, dispatcher: Dispatcher, sharing: DeviceSharing, device: Any, num_bytes: int
    ) -> None:
        self._dispatcher = dispatcher
        self._sharing = sharing
        self._device = device
        self._size = device_bucket_bytes(num_bytes)
        self._memory = sharing.export(self._size, device)
        self.packer = Packer(self)

    def lend(self) -> None:
        """Let the engine map the memory. Raises RequestError if it cannot; the update continues."""
        lent = {"handle": self._memory.handle, "num_bytes": self._size}
        self._dispatcher.call(Method.LEND_MEMORY, lent)

    def open(self) -> Bucket:
        return Bucket(self._memory.tensor)

    def wait(self) -> None:
        self._sharing.synchronize(self._device)

    def send(self, bucket: Bucket) -> None:
        self._dispatcher.call(Method.STAGE_LENT, bucket.pieces)

    def discard(self) -> None:
        """Do nothing: the memory is freed when the update has ended."""

    def close(self) -> None:
        """Free the memory. The engine must not map it any more. Raises DeviceMemoryError."""
        self._memory.close()


class Packer:
    """Copies tensors into buckets, one after the other, and sends each bucket when it is full.

    Args:
        buckets: makes the buckets.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._bucket: Bucket | None = None

    def put(self, source: Source) -> None:
        """Copy a whole tensor, into as many buckets as it needs. The caller may then change it."""
        while True:
            if self._bucket is None:
                self._bucket = self._buckets.open()
            self._bucket.fill(source)
            self._buckets.wait()
            if self._bucket.is_full:
                self.flush()
            if source.is_sent:
                return

    def flush(self) -> None:
        """Send the open bucket, if there is one."""
        bucket, self._bucket = self._bucket, None
        if bucket is not None:
            self._buckets.send(bucket)

    def discard(self) -> None:
        """Drop the open bucket, if there is one."""
        self._bucket = None
        self._buckets.discard()
