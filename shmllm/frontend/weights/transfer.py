"""WeightTransfer: lets the engine receive weights that a trainer sends itself.

The engine is never asked to wait: it begins to connect or to receive, and this module asks it again
and again how far it is. So its steps go on, all engines of a pool are under way at the same time,
and outputs are collected meanwhile.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shmllm.errors import IpcTimeoutError, RequestError
from shmllm.frontend.cancelled_calls import cancellation_of_this_call
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.transfer.ipc_handle import plain_handles
from shmllm.transfer.update_info import merged
from shmllm.wire.messages import Method

SHORTEST_POLL_S, LONGEST_POLL_S = 0.001, 0.02
"""The time between two questions to the engine; it grows while nothing arrives."""
TOKEN_BITS = 48


class HasUpdateInfo(Protocol):
    """A request as an object."""

    update_info: Any


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """A request that was recognized."""

    update_info: Any


def as_update_request(value: object) -> UpdateRequest | None:
    """The request that an argument of `update_weights` is; None if it is names and tensors."""
    if isinstance(value, Mapping):
        return UpdateRequest(value["update_info"]) if [*value] == ["update_info"] else None
    return UpdateRequest(value.update_info) if hasattr(value, "update_info") else None


def init_info_of(request: Any) -> Any:
    """The init_info of a request. Raises RequestError if it has none."""
    if isinstance(request, Mapping) and "init_info" in request:
        return request["init_info"]
    if not isinstance(request, Mapping) and hasattr(request, "init_info"):
        return request.init_info
    raise RequestError("init_weight_transfer_engine takes a dict with 'init_info', or such object")


class WeightTransfer:
    """The connection with a trainer of one front end's engine.

    Args:
        dispatcher: the front end's connection to the engine.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def connect(self, init_info: Any, timeout_s: float | None = None) -> None:
        """Connect the engine with a trainer.

        Args:
            init_info: what the backend needs.
            timeout_s: the longest time to wait, if that is less than the backend's, in seconds.

        Raises:
            RequestError: it is not valid, or the trainer does not answer in time.
            IpcTimeoutError: `timeout_s` is over.
        """
        if not isinstance(init_info, Mapping):
            raise RequestError(f"init_info must be a dict, got {type(init_info).__name__}")
        _check_plain("init_info", init_info)
        try:
            token = random.getrandbits(TOKEN_BITS)
            argument = {"init_info": dict(init_info), "token": token}
            self._dispatcher.call(Method.OPEN_TRANSFER, argument)
            self._wait(token, timeout_s)
        except IpcTimeoutError:
            self.disconnect()
            raise

    def receive(self, update_info: Any, timeout_s: float | None = None) -> None:
        """Let the engine receive tensors into the update in progress.

        Args:
            update_info: what the backend needs, or a list with one for each worker.
            timeout_s: see `connect`.

        Raises:
            RequestError: it is not valid, or the trainer is gone. The update has ended.
            IpcTimeoutError: `timeout_s` is over.
        """
        info = dict(merged(update_info))
        if "ipc_handles_pickled" in info:
            raise RequestError("pickled handles are refused; pass them as ipc_handles")
        if info.get("ipc_handles") is not None:
            info["ipc_handles"] = plain_handles(info["ipc_handles"])
        shapes = info.get("shapes")
        if isinstance(shapes, list | tuple):  # torch.Size is no JSON value
            info["shapes"] = [[*each] if isinstance(each, tuple) else each for each in shapes]
        _check_plain("update_info", info)
        token = random.getrandbits(TOKEN_BITS)
        self._dispatcher.call(Method.RECEIVE_WEIGHTS, {"update_info": info, "token": token})
        self._wait(token, timeout_s)

    def disconnect(self) -> None:
        """Disconnect the engine from the trainer."""
        self._dispatcher.call(Method.CLOSE_TRANSFER)

    def _wait(self, token: int, timeout_s: float | None) -> None:
        """Wait until the engine has done what it began for a token. It has a deadline itself."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        last, pause_s = None, SHORTEST_POLL_S
        cancellation = cancellation_of_this_call()
        while left := self._dispatcher.call(Method.TRANSFER_PROGRESS, token):
            cancellation.check()
            if deadline is not None and time.monotonic() > deadline:
                raise IpcTimeoutError(f"the trainer did not answer within {timeout_s:g} s")
            pause_s = min(pause_s * 1.1, LONGEST_POLL_S) if left == last else SHORTEST_POLL_S
            if left == last:
                began = time.monotonic()
                self._dispatcher.pump(pause_s)  # may return at once
                time.sleep(max(pause_s - (time.monotonic() - began), 0))
            last = left


def _check_plain(what: str, info: Mapping[str, Any]) -> None:
    """Raise RequestError unless JSON can hold the values."""
    for key, value in info.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError) as problem:
            raise RequestError(f"{what}: the value of {key!r} cannot be sent: {problem}") from None
