"""Starts engines of a pool again that have ended.

An engine that starts again has the weights of its files and no adapters. So it is started only if
no weights were sent since, and gets the adapters that were read from files. This module must not
know where requests are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shmllm.client.private import PrivateEngineClient
from shmllm.errors import ShmLLMError
from shmllm.wire.messages import Method
from shmllm.wire.rpc import RpcCall

MOST_STARTS = 3
"""How often an engine is started again."""
NEW_WEIGHTS = "weights were sent since the start"


class Revival:
    """
    Args:
        start: starts the engine of an index, and returns its client, which is not ready.
    """

    def __init__(self, start: Callable[[int], PrivateEngineClient]) -> None:
        self._start = start
        self._starting: dict[int, PrivateEngineClient] = {}
        self._num_starts: dict[int, int] = {}
        self._adapters: dict[int, Any] = {}
        self._pinned: list[int] = []
        self._problem = ""
        self._is_updating = False

    @property
    def problem(self) -> str:
        """Why no engine can start again; "" if one can."""
        return self._problem or (NEW_WEIGHTS if self._is_updating else "")

    @property
    def is_busy(self) -> bool:
        """Whether an engine starts."""
        return bool(self._starting)

    @property
    def clients(self) -> list[PrivateEngineClient]:
        """The clients of the engines that start."""
        return [*self._starting.values()]

    def begin(self, engine: int) -> str:
        """Start an engine again. Returns "", or why not."""
        if self.problem:
            return self.problem
        if self._num_starts.get(engine, 0) >= MOST_STARTS:
            return f"it has ended {MOST_STARTS + 1} times"
        self._num_starts[engine] = self._num_starts.get(engine, 0) + 1
        try:
            self._starting[engine] = self._start(engine)
        except (ShmLLMError, OSError) as problem:
            return str(problem)
        return ""

    def ready(
        self,
        prepare: Callable[[PrivateEngineClient], object],
        may_join: Callable[[], bool] = lambda: True,
    ) -> Iterator[tuple[int, PrivateEngineClient | ShmLLMError]]:
        """Yield the engines that have become ready, each with its client, and those that failed,
        with the error.

        Args:
            prepare: brings a new engine into the state of the others.
            may_join: whether the state of the others is known; else a new engine waits.
        """
        for engine, client in [*self._starting.items()]:
            try:
                if client.poll_ready() is None or not may_join():
                    continue
                if self.problem:
                    raise ShmLLMError(self.problem)
                for lora in self._adapters.values():
                    client.call(Method.ADD_LORA, lora)
                for number in self._pinned:
                    client.call(Method.PIN_LORA, number)
                prepare(client)
            except ShmLLMError as problem:
                self._starting.pop(engine, None)
                client.close()
                yield engine, problem
            else:
                yield engine, client
                self._starting.pop(engine, None)

    def called(self, method: Method, argument: Any) -> None:
        """The engines of the pool have got a call."""
        if method is Method.ADD_LORA:
            self._adapters[argument["lora_int_id"]] = argument
        elif method is Method.REMOVE_LORA:
            self._adapters.pop(argument, None)
            self._pinned = [number for number in self._pinned if number != argument]
        elif method is Method.PIN_LORA:
            self._pinned = [*dict.fromkeys([*self._pinned, argument])]
        elif method in (Method.START_WEIGHTS, Method.ABANDON_WEIGHTS):
            self._is_updating = method is Method.START_WEIGHTS

    def ran(self, call: RpcCall) -> None:
        """Workers of the pool have run a call."""
        if call.method == "add_lora":
            self._problem = "an adapter was sent as tensors"

    def weights_changed(self) -> None:
        """Engines of the pool have other weights than those of their files."""
        self._problem = NEW_WEIGHTS

    def close(self) -> None:
        """End the engines that start. None starts again after this."""
        self._problem = self._problem or "its pool is closed"
        while self._starting:
            self._starting.popitem()[1].close()
