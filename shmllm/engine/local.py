"""The engine in the caller's own process: for debugging, and where no process may be started.

Same core, no transport: `poll` runs a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic_ns, sleep
from typing import Any

from shmllm.config import EngineConfig, EngineFacts
from shmllm.engine.calls import answer
from shmllm.engine.client import Event
from shmllm.engine.core import EngineCore
from shmllm.errors import EnginePausedError
from shmllm.wire.messages import AddRequest, Method, Rejected

CLIENT = 0
IDLE_S = 0.001


class LocalEngineClient:
    """
    Args:
        config: what the engine is started with.
    """

    facts: EngineFacts

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._events: list[Event] = []

    def wait_ready(self, on_progress: Callable[[int, int], None] | None = None) -> EngineFacts:
        """Load the model. Raises EngineStartError."""
        from shmllm.worker.runner import ModelRunner

        self._core = EngineCore(self._config, ModelRunner(self._config, on_progress))
        self.facts = self._core.facts
        return self.facts

    def add(self, request: AddRequest) -> None:
        try:
            refusal = self._core.add(
                CLIENT,
                request.number,
                request.prompt_token_ids,
                request.params,
                request.cache_salt,
                priority=request.priority,
                bad_words=request.bad_words,
                grammar=request.grammar,
            )
        except EnginePausedError as pause:
            self._events.append(Rejected(request.number, str(pause), is_retryable=True))
            return
        if refusal is not None:
            self._events.append(Rejected(request.number, refusal))

    def abort(self, numbers: Sequence[int]) -> None:
        self._events.append(self._core.abort(CLIENT, numbers))

    def poll(self, timeout_s: float) -> list[Event]:
        events, self._events = self._events, []
        if timeout_s > 0:
            for columns in self._core.step().values():
                columns.time_ns = monotonic_ns()
                events += columns.prompt_logprobs
                events.append(columns)
            failures = self._core.take_failures()
            events += [Rejected(failure.number, failure.message) for failure in failures]
            if not events:
                sleep(min(timeout_s, IDLE_S))
        return events

    def wake(self) -> None:
        """Nothing to do: no `poll` waits for long."""

    def call(self, method: Method, argument: Any = None) -> Any:
        content = answer(self._core, CLIENT, method, argument)
        self._events += [columns for _, columns in self._core.take_aborted()]
        return content

    def stats(self) -> dict[str, int]:
        scheduler = self._core.scheduler
        return asdict(scheduler.stats) | {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "kv_blocks_total": self.facts.num_blocks,
            "kv_blocks_used": self._core.num_used_blocks,
            "paused": int(bool(self._core.holds)),
        }

    def health(self) -> str:
        return "ready"

    def stop(self) -> None:
        """Nothing to end: steps are run by `poll` alone."""

    def close(self) -> None:
        self._events.clear()
