"""Buckets of new weights for all engines of a pool.

A bucket is filled in the memory of one engine's connection, and copied into that of the others.
"""

from __future__ import annotations

from shmllm.client.channel_client import ChannelEngineClient
from shmllm.client.pool_calls import Engines
from shmllm.client.protocol import BucketMemory


class PoolBuckets:
    """
    Args:
        engines: the pool.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._owner: ChannelEngineClient | None = None
        self._others: list[ChannelEngineClient] = []

    def claim(self) -> BucketMemory:
        """See `EngineClient.claim_bucket`."""
        self.discard()

        def claim(client: ChannelEngineClient) -> BucketMemory:
            self._owner = client
            return client.claim_bucket()

        return next(bucket for _, bucket in self._engines.each(claim))

    def discard(self) -> None:
        """See `EngineClient.discard_bucket`."""
        for client in [*self._others, *([] if self._owner is None else [self._owner])]:
            client.discard_bucket()
        self._owner, self._others = None, []

    def send(self, bucket: BucketMemory, pieces: str) -> None:
        """See `EngineClient.send_bucket`. The engine in whose memory it is may have ended."""
        owner = self._owner

        def send_copy(client: ChannelEngineClient) -> None:
            if client is not owner:
                self._others.append(client)
                copy = client.claim_bucket()
                copy.buffer[:] = bucket.buffer
                client.send_bucket(copy, pieces)

        def send(client: ChannelEngineClient) -> None:
            if client is owner:
                client.send_bucket(bucket, pieces)

        for use in (send_copy, send):
            for _ in self._engines.each(use):
                pass
        self._owner, self._others = None, []
