"""A call on the worker of one engine, in steps: a pool takes each step at all engines.

Only `prepare` may wait before the call is sent, so a call is sent to all engines of a pool or to
none. `rpc_client` has the contents of the messages. This module must not know of pools.

An exception of a signal handler may end any method; `end` then frees what the call has used.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Protocol

from shmllm.client.rpc_client import content_of, pack_call, unpack_result
from shmllm.client.sending import await_room, fill, wait_for_slot
from shmllm.errors import IpcTimeoutError
from shmllm.ipc.client_channel import ClientChannel
from shmllm.wire import codec
from shmllm.wire.messages import RecordKind, Reply, Work
from shmllm.wire.rpc import RpcCall


class Exchange(Protocol):
    """What a call needs of a `ChannelEngineClient`, which documents these names."""

    open_calls: set[int]

    @property
    def channel(self) -> ClientChannel: ...

    def next_number(self, has_slot: bool) -> int: ...

    def expect_reply(self, number: int) -> None: ...

    def await_reply(self, number: int, deadline: float | None) -> Reply | None: ...

    def end_call(self, number: int) -> None: ...

    def make_room(self) -> None: ...


class WorkerCall:
    """
    Args:
        client: the client of the engine.
        call: the call.
        timeout_s: how many seconds to wait for the result; None waits until the engine ends.
    """

    def __init__(self, client: Exchange, call: RpcCall, timeout_s: float | None) -> None:
        self._client = client
        self._call = call
        self._timeout_s = timeout_s
        self._number = client.next_number(has_slot=True)
        self._record: tuple[RecordKind, codec.Parts] | None = None
        self._begin: int | None = None
        self._deadline: float | None = None

    def prepare(self) -> None:
        """Put the tensors of the call into slots, and wait until the ring has room for its record.
        The caller sends nothing else to this engine until `send`.

        Raises:
            RequestError: the call cannot be transmitted.
            EngineDeadError: the engine has ended.
        """
        channel, make_room = self._client.channel, self._client.make_room
        channel.slots.begin_message()
        self._begin = channel.requests.position
        self._record = fill(channel, RecordKind.WORK, self._parts, make_room)
        await_room(channel, self._record[1], make_room)

    def _parts(self) -> codec.Parts:
        client = self._client
        wait = partial(wait_for_slot, client.channel, client.make_room)
        return codec.encode_work(Work(self._number, pack_call(client.channel, self._call, wait)))

    def send(self) -> None:
        """Send the call, for which `prepare` has made room."""
        assert self._record is not None
        kind, parts = self._record
        client = self._client
        client.open_calls.add(self._number)
        client.expect_reply(self._number)
        client.channel.send(kind, *parts, on_full=client.make_room, deadline=None)
        if self._timeout_s is not None:
            self._deadline = time.monotonic() + self._timeout_s

    def result(self) -> Any:
        """Wait for the result.

        Raises:
            RequestError, CallError, IpcTimeoutError: see `EngineClient.run_on_worker`.
            EngineDeadError: the engine has ended.
        """
        reply = self._client.await_reply(self._number, self._deadline)
        if reply is None:
            raise IpcTimeoutError(f"the worker did not answer in {self._timeout_s:g} s")
        return unpack_result(self._client.channel, self._call, content_of(reply))

    def end(self) -> None:
        """Free the slots of a call that was not sent, and of its result. Idempotent."""
        client = self._client
        if self._begin is not None and client.channel.requests.position == self._begin:
            client.channel.slots.take_back()
            client.open_calls.discard(self._number)
        client.end_call(self._number)
