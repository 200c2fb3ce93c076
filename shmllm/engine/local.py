"""An engine in the caller's own process, for debugging and where no process can be started.

It has the same EngineCore as an engine process and no transport: `poll` runs a step. No handler of
a signal runs within what changes the core, so its exception does not leave half a step behind; it
comes when the step, or the call, has ended.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic_ns, sleep
from typing import Any

from shmllm.client.held_signals import call_with_signals_held
from shmllm.client.protocol import (
    NO_PROGRESS,
    BucketMemory,
    DeviceSharing,
    EngineOutput,
    StartProgress,
    ignore_trace,
)
from shmllm.config.engine import EngineConfig
from shmllm.config.info import EngineInfo
from shmllm.core.observer import NULL_OBSERVER
from shmllm.engine.calls import run_method
from shmllm.engine.core import EngineCore
from shmllm.engine.runner import Runner
from shmllm.engine.tracer import EngineTracer
from shmllm.engine.worker import Worker
from shmllm.errors import CallError, ShmLLMError
from shmllm.ipc.device_memory import LocalSharing
from shmllm.ipc.error_log import LoggedError
from shmllm.params.request import EngineCoreRequest
from shmllm.tracing.layout import Event, Type
from shmllm.tracing.recorder import Recorder
from shmllm.wire.messages import Method, Rejected, WeightVersion
from shmllm.wire.rpc import RpcCall
from shmllm.wire.weight_bucket import BUCKET_BYTES, pieces_of

CLIENT = 0
IDLE_S = 0.001


class _Bucket:
    """The memory of a bucket of new weights."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(BUCKET_BYTES))


class LocalEngineClient:
    """An `EngineClient` for an engine in the caller's own process.

    Args:
        config: the configuration of the engine.
    """

    info: EngineInfo
    seed: int

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._runner: Runner | None = None
        self._events: list[EngineOutput] = []
        self._recorder: Recorder | None = None
        self.sharing: DeviceSharing = LocalSharing()
        self.connection = random.getrandbits(48)
        self.on_trace: Callable[[str], None] = ignore_trace

    @property
    def pid(self) -> int:
        return os.getpid()

    def wait_ready(self, progress: StartProgress = NO_PROGRESS) -> EngineInfo:
        """Load the model. Raises EngineStartError."""
        from shmllm.worker.make_runner import make_runner

        self._runner = make_runner(self._config, progress.on_load, progress.on_capture)
        self._core = EngineCore(self._config, self._runner)
        self._core.weights.sharing = self.sharing
        self._worker = Worker(self._core, own_process=False)
        self.info = self._core.info
        self.seed = self.info.seed
        self.trace(self._recorder)
        return self.info

    def add(self, request: EngineCoreRequest) -> None:
        if request.embeds is not None:
            request.embeds = _copy(request.embeds)
        call_with_signals_held(lambda: self._add(request))

    def _add(self, request: EngineCoreRequest) -> None:
        rejected = self._core.add(CLIENT, request)
        if rejected is not None:
            self._events.append(rejected)

    def abort(self, numbers: Sequence[int]) -> None:
        call_with_signals_held(lambda: self._events.append(self._core.abort(CLIENT, numbers)))

    def poll(self, timeout_s: float, *, urgent_only: bool = False) -> list[EngineOutput]:
        if timeout_s > 0:
            call_with_signals_held(self._step)
            if not self._events:
                sleep(min(timeout_s, IDLE_S))
        return self._events

    def _step(self) -> None:
        events = self._events
        for columns in self._core.step().values():
            columns.time_ns = monotonic_ns()
            events += columns.prompt_logprobs
            events += columns.all_pieces
            events.append(columns)
        failures = self._core.take_failures()
        events += [Rejected(failure.number, failure.message) for failure in failures]

    def wake(self) -> None:
        """Do nothing: a `poll` waits at most IDLE_S."""

    def call(self, method: Method, argument: Any = None) -> Any:
        return call_with_signals_held(lambda: self._call(method, argument))

    def _call(self, method: Method, argument: Any) -> Any:
        try:
            return run_method(self._core, CLIENT, method, argument)
        finally:
            self._take_call_effects()

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        """See `EngineClient.run_on_worker`. The call runs in the caller's thread, so `timeout_s`
        has no effect, and arguments and result are not copied."""
        return call_with_signals_held(lambda: self._run_on_worker(call))

    def _run_on_worker(self, call: RpcCall) -> Any:
        try:
            return self._worker.run(call)
        except ShmLLMError:
            raise
        except Exception as problem:
            message = f"{type(problem).__name__}: {problem}"
            raise CallError(message, traceback.format_exc()) from problem
        finally:
            self._take_call_effects()

    def claim_bucket(self) -> BucketMemory:
        return _Bucket()

    def discard_bucket(self) -> None:
        """Do nothing: Python frees the memory with the last reference."""

    def send_bucket(self, bucket: BucketMemory, pieces: str) -> None:
        parts = pieces_of(pieces, len(bucket.buffer))
        call_with_signals_held(lambda: self._core.weights.stage(CLIENT, parts, bucket.buffer))

    def trace(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        if not hasattr(self, "info"):
            return
        self._core.observer = (
            NULL_OBSERVER if recorder is None else EngineTracer(recorder, self._core)
        )
        if recorder is not None:
            now_ns = monotonic_ns()
            client = CLIENT, self.connection, os.getpid()
            recorder.add(Type.EVENT, Event.JOINED, now_ns, now_ns, *client)

    def stats(self) -> dict[str, int]:
        scheduler = self._core.scheduler
        counters = asdict(scheduler.stats)
        places = range(self.info.num_speculative_tokens)
        accepted = zip(places, counters.pop("accepted_at"), strict=False)
        return counters | {
            **self._core.elsewhere.counters,
            **scheduler.encoder_cache.counters,
            "shared_kv_cache_bytes": self.info.shared_kv_cache_bytes,
            **{f"accepted_at_{place}": count for place, count in accepted},
            "num_speculative_tokens": len(places),
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "kv_blocks_total": self.info.num_counted_blocks,
            "kv_blocks_used": self._core.num_used_blocks,
            "paused": int(bool(self._core.pauses)),
            "asleep": int(self._core.sleeper.state),
        }

    def health(self) -> str:
        return "ready"

    def errors(self) -> list[LoggedError]:
        return []  # all errors go to the caller, who is the only one

    def stop(self) -> None:
        """Do nothing: only `poll` runs steps."""

    def close(self) -> None:
        self._events.clear()
        if self._runner is not None:
            if hasattr(self, "_core"):
                self._core.close()
            else:
                self._runner.close()

    def _take_call_effects(self) -> None:
        """Queue the outputs of requests that a call ended, and a new weight version."""
        self._events += [columns for _, columns in self._core.take_outputs()]
        if (version := self._core.weights.take_new_version()) is not None:
            self._events.append(WeightVersion(version))


def _copy(embeds: Any) -> Any:
    import torch

    return embeds.clone() if isinstance(embeds, torch.Tensor) else torch.tensor(embeds)
