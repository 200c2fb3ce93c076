"""What a front end needs of an engine, wherever that runs.

Owns the names and their meaning; `client`, `attached`, `private` and `local` are engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shmllm.config.engine import Progress
from shmllm.config.info import EngineInfo
from shmllm.outputs.columns import Embeddings, OutputColumns
from shmllm.outputs.logprobs import PromptLogprobs
from shmllm.params.request import EngineCoreRequest
from shmllm.tracing.recorder import Recorder
from shmllm.wire.messages import Method, Rejected, WeightVersion
from shmllm.wire.rpc import RpcCall

EngineOutput = OutputColumns | PromptLogprobs | Embeddings | Rejected | WeightVersion


@dataclass(frozen=True, slots=True)
class StartProgress:
    """Who is told how an engine's start gets on.

    Attributes:
        on_load: called with (bytes read, bytes in all) while weights are read.
        on_capture: called with (sizes captured, sizes in all) while graphs are.
    """

    on_load: Progress | None = None
    on_capture: Progress | None = None


NOBODY_WATCHES = StartProgress()


class Lease(Protocol):
    """Memory to fill. A `Slot` is one."""

    buffer: memoryview

    def abort(self) -> None:
        """Give it back."""


class EngineClient(Protocol):
    """What a front end needs of an engine.

    Attributes:
        connection: tells this connection to an engine from all others.
        on_trace: called with a directory when the engine wants this front end to record in
            it what it does.
    """

    info: EngineInfo
    connection: int
    on_trace: Callable[[str], None]

    @property
    def pid(self) -> int:
        """Of the engine's process."""

    def add(self, request: EngineCoreRequest) -> None:
        """Submit a request. Its number must not have been used before."""

    def abort(self, numbers: Sequence[int]) -> None:
        """End requests; those that still ran report it as an event."""

    def poll(self, timeout_s: float, *, urgent_only: bool = False) -> list[EngineOutput]:
        """Events in order; waits at most `timeout_s` for the first. May return early, empty.

        Args:
            urgent_only: tokens of requests that go on may wait a moment longer, to be taken
                together; everything else is urgent.
        """

    def wake(self) -> None:
        """Have a `poll` that waits in another thread return now."""

    def call(self, method: Method, argument: Any = None) -> Any:
        """Ask the engine for something and wait for the answer.

        Args:
            method: what.
            argument: a JSON value.

        Raises:
            RequestError: the engine refused.
            CallError: it raised an exception.
        """

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        """Have the engine's worker do something between two steps, and wait for the result.

        Args:
            call: what.
            timeout_s: how long to wait; None waits as long as the engine lives.

        Raises:
            RequestError: it cannot cross, or the engine refused.
            CallError: it raised an exception.
            IpcTimeoutError: no answer in time. What was begun is not undone.
        """

    def trace(self, recorder: Recorder | None) -> None:
        """Record what passes through this connection; None: no more."""

    def claim_bucket(self) -> Lease:
        """Memory of `BUCKET_BYTES` for new weights; waits until there is some. It is for
        `send_bucket`, or its `abort` gives it back."""

    def send_bucket(self, bucket: Lease, pieces: str) -> None:
        """Have the engine stage what lies in a bucket, for the update of this front end that
        is under way. No answer: the update's next call says what was wrong.

        Args:
            pieces: what lies there; see `weight_bucket`.
        """

    def stats(self) -> dict[str, int]:
        """The engine's counters and gauges, by lower-case name."""

    def health(self) -> str:
        """The engine's state in words: "ready", "stalled 7 s in step 12", "dead"."""

    def stop(self) -> None:
        """Begin to close: whoever waits in another thread gets an error. Idempotent."""

    def close(self) -> None:
        """End the engine, or only leave it if it was there before. Idempotent."""


class EngineLife(Protocol):
    """Whether the engine process is there, and how it ended."""

    pid: int

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, after waiting for that at most `timeout_s`."""

    def exit_status(self) -> tuple[int | None, int | None]:
        """(exit code, signal) of the ended engine, None for what cannot be known."""
