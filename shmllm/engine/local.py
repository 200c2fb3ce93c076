"""The engine in the caller's own process: for debugging, and where no process may be started.

Same core, no transport: `poll` runs a step.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic_ns, sleep
from typing import Any

from shmllm.client.protocol import NOBODY_WATCHES, EngineOutput, Lease, StartProgress
from shmllm.config.engine import EngineConfig
from shmllm.config.info import EngineInfo
from shmllm.core.observer import NULL_OBSERVER
from shmllm.engine.calls import answer
from shmllm.engine.core import EngineCore
from shmllm.engine.tracer import EngineTracer
from shmllm.engine.worker import Worker
from shmllm.errors import CallError, ShmLLMError
from shmllm.params.request import EngineCoreRequest
from shmllm.tracing.layout import Event, Type
from shmllm.tracing.recorder import Recorder
from shmllm.wire.messages import Method, Rejected, WeightVersion
from shmllm.wire.rpc import RpcCall
from shmllm.wire.weight_bucket import BUCKET_BYTES, pieces_of

CLIENT = 0
IDLE_S = 0.001


class _Bucket:
    """Memory for new weights."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(BUCKET_BYTES))

    def abort(self) -> None:
        """It goes with its last user."""


class LocalEngineClient:
    """
    Args:
        config: what the engine is started with.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._events: list[EngineOutput] = []
        self._recorder: Recorder | None = None
        self.connection = random.getrandbits(48)
        self.on_trace: Callable[[str], None] = _nobody_asks

    @property
    def pid(self) -> int:
        return os.getpid()

    def wait_ready(self, progress: StartProgress = NOBODY_WATCHES) -> EngineInfo:
        """Load the model. Raises EngineStartError."""
        from shmllm.worker.make_runner import make_runner

        self._core = EngineCore(
            self._config, make_runner(self._config, progress.on_load, progress.on_capture)
        )
        self._worker = Worker(self._core)
        self.info = self._core.info
        self.trace(self._recorder)
        return self.info

    def add(self, request: EngineCoreRequest) -> None:
        if request.embeds is not None:
            request.embeds = _copy(request.embeds)
        rejected = self._core.add(CLIENT, request)
        if rejected is not None:
            self._events.append(rejected)

    def abort(self, numbers: Sequence[int]) -> None:
        self._events.append(self._core.abort(CLIENT, numbers))

    def poll(self, timeout_s: float, *, urgent_only: bool = False) -> list[EngineOutput]:
        events, self._events = self._events, []
        if timeout_s > 0:
            for columns in self._core.step().values():
                columns.time_ns = monotonic_ns()
                events += columns.prompt_logprobs
                if columns.embeddings is not None:
                    events.append(columns.embeddings)
                events.append(columns)
            failures = self._core.take_failures()
            events += [Rejected(failure.number, failure.message) for failure in failures]
            if not events:
                sleep(min(timeout_s, IDLE_S))
        return events

    def wake(self) -> None:
        """Nothing to do: no `poll` waits for long."""

    def call(self, method: Method, argument: Any = None) -> Any:
        try:
            return answer(self._core, CLIENT, method, argument)
        finally:
            self._take_call_effects()

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        """As in another process, but for `timeout_s`: it runs in the caller's thread, and
        arguments and result are the caller's own objects."""
        try:
            return self._worker.run(call)
        except ShmLLMError:
            raise
        except Exception as problem:
            words = traceback.format_exc()
            raise CallError(f"{type(problem).__name__}: {problem}", words) from problem
        finally:
            self._take_call_effects()

    def claim_bucket(self) -> Lease:
        return _Bucket()

    def send_bucket(self, bucket: Lease, pieces: str) -> None:
        parts = pieces_of(pieces, len(bucket.buffer))
        self._core.weights.stage(CLIENT, parts, bucket.buffer)

    def trace(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        if not hasattr(self, "info"):
            return
        self._core.observer = (
            NULL_OBSERVER if recorder is None else EngineTracer(recorder, self._core)
        )
        if recorder is not None:
            now_ns = monotonic_ns()
            who = CLIENT, self.connection, os.getpid()
            recorder.add(Type.EVENT, Event.JOINED, now_ns, now_ns, *who)

    def stats(self) -> dict[str, int]:
        scheduler = self._core.scheduler
        return asdict(scheduler.stats) | {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "kv_blocks_total": self.info.num_blocks,
            "kv_blocks_used": self._core.num_used_blocks,
            "paused": int(bool(self._core.pauses)),
            "asleep": int(self._core.sleeper.state),
        }

    def health(self) -> str:
        return "ready"

    def stop(self) -> None:
        """Nothing to end: steps are run by `poll` alone."""

    def close(self) -> None:
        self._events.clear()

    def _take_call_effects(self) -> None:
        """What a call did to requests and weights."""
        self._events += [columns for _, columns in self._core.take_outputs()]
        if (version := self._core.weights.take_new_version()) is not None:
            self._events.append(WeightVersion(version))


def _nobody_asks(directory: str) -> None:
    """There is no other process that could."""


def _copy(embeds: Any) -> Any:
    import torch

    return embeds.clone() if isinstance(embeds, torch.Tensor) else torch.tensor(embeds)
