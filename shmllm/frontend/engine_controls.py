"""What a front end does to its engine beside requests: calls, profiles, adapters, pauses, sleep,
and reading its state; `weights.controls` has what it does to weights.

This module owns what users see of that, as `llm` does for requests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmllm.client.protocol import EngineClient, LoggedError
from shmllm.errors import RequestError
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.options.profiler import ProfilerSettings
from shmllm.frontend.pausing import (
    PUMP_S,
    PauseMode,
    fall_asleep,
    is_asleep,
    is_fully_awake,
    next_or_value,
    pause,
    resume,
    wake_up,
)
from shmllm.frontend.weights.controls import CALLED_BY_NAME, WeightControls
from shmllm.frontend.weights.push import NamedTensors
from shmllm.outputs.sleep_report import SleepReport
from shmllm.params.lora import LoRARequest
from shmllm.wire.messages import Method
from shmllm.wire.rpc import RpcCall, call_method, call_on_model


class EngineControls(WeightControls):
    """The methods of `LLM` that are not about requests.

    Attributes:
        front_end: the parts that the tools of this package use directly.
        profiles: the defaults of `start_profile`.
    """

    front_end: FrontEnd
    profiles: ProfilerSettings
    _client: EngineClient
    _dispatcher: Dispatcher

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method or a function in the engine's worker, between two steps.

        Args:
            method: a name from `shmllm.engine.worker.METHODS` or from
                `weights.controls.CALLED_BY_NAME`, a method of the class that
                `worker_extension_cls` names, or a function. A function is pickled (by
                cloudpickle) and called in the engine with the worker, whose `model` and
                `model_runner` it may use, and the arguments. Only the process that started the
                engine can send functions, unless the engine was started with `allow_callables`.
            timeout: how many seconds to wait; None waits as long as the engine lives. A timeout
                does not undo the call, and calls after it run behind it.
            args: the positional arguments, after the worker.
            kwargs: the keyword arguments.

        Returns:
            A list with the result of each rank of a function or of a method of the extension, by
            engine and rank, or with the first engine's of another method. Tensors in it are copies.

        Raises:
            RequestError: a value cannot be sent to another process, or the engine refused the
                call.
            CallError: the call raised an exception; contains its text and traceback.
            IpcTimeoutError: the result did not arrive in time; also a TimeoutError.

        All engines of a pool run the call, at the same time. If only some of them give an error,
        its message names them.
        """
        if not isinstance(method, str) and not callable(method):
            raise RequestError(
                f"collective_rpc takes a name or a function, got {type(method).__name__}"
            )
        if isinstance(method, str) and method in self.front_end.info.extension_methods:
            method, args = call_method, (method, *args)
        if isinstance(method, str) and method in CALLED_BY_NAME:
            return [self._call_by_name(method, timeout, args, kwargs or {})]
        call = RpcCall(method, tuple(args), dict(kwargs or {}))
        result = self._run_on_worker(call, timeout)
        return list(result) if call.is_function else [result]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func(model)` in the engine; see `collective_rpc`. The model is a
        `shmllm.models.decoder.DecoderModel`."""
        if not callable(func):
            raise RequestError(f"apply_model takes a function, got {type(func).__name__}")
        return self.collective_rpc(call_on_model, args=(func,))

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> str:
        """Record the engine's steps with torch's profiler, until `stop_profile`.

        Args:
            profile_prefix: the prefix of the trace's file name.
            delay_iterations: how many steps to skip first; None: as `profiler_config` says.
            max_iterations: how many steps to record, 0 for all; None: as `profiler_config` says.

        Returns:
            The path of the trace that will be written. Other ranks of the engine write theirs
            beside it, with "-rank1" and so on in the name, and other engines of a pool with their
            process ids.
        """
        own = self.profiles
        directory = os.path.abspath(own.directory or os.getcwd())
        options = {
            "prefix": profile_prefix or "shmllm",
            "delay": own.delay_iterations if delay_iterations is None else delay_iterations,
            "most": own.max_iterations if max_iterations is None else max_iterations,
        }
        path: str = self._run_on_worker(RpcCall("start_profile", (directory,), options))
        return path

    def stop_profile(self) -> str:
        """Write the trace of `start_profile`, for chrome://tracing or Perfetto. Returns its
        path."""
        path: str = self._run_on_worker(RpcCall("stop_profile"))
        return path

    def add_lora(
        self,
        lora_request: LoRARequest,
        *,
        tensors: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> bool:
        """Let the engine read an adapter, which `generate` does by itself, or send its tensors.

        With `load_inplace` the engine replaces its contents; running requests continue with the new
        ones, with their keys and values.

        Args:
            lora_request: its number and name, and its directory unless tensors are given.
            tensors: its tensors, under the names of adapter_model.safetensors. They go through
                shared memory; such an adapter stays in the engine's memory until it is removed.
            config: the fields of adapter_config.json for these tensors.

        Returns:
            Whether it is new there; False if the engine knows it already.

        Raises:
            RequestError: the engine has no adapters, or this one cannot be read, does not suit the
                model, or has the number of another one.
        """
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"add_lora takes a LoRARequest, got {lora_request!r}")
        if tensors is None:
            return self.front_end.add_adapter(lora_request)
        lora = lora_request
        given = lora.lora_name, lora.lora_int_id, dict(config or {}), dict(tensors)
        options = {"load_inplace": lora.load_inplace}
        self._run_on_worker(RpcCall("add_lora", given, options))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Let the engine forget an adapter. Returns whether it knew it.

        Raises:
            RequestError: requests use it.
        """
        return bool(self._dispatcher.call(Method.REMOVE_LORA, lora_id))

    def list_loras(self) -> set[int]:
        """The `lora_int_id` of each adapter that the engine knows."""
        return set(self._dispatcher.call(Method.LIST_LORAS))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory until it is removed. Returns True.

        Raises:
            RequestError: the engine does not know it.
        """
        return bool(self._dispatcher.call(Method.PIN_LORA, lora_id))

    def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Pause the engine until `resume_generation`, for example to change weights.

        Args:
            mode: "abort" ends running requests with reason "abort"; "wait" returns when they have
                ended, and refuses new requests with EnginePausedError; "keep" freezes running
                requests, which continue later. With "abort" and "keep" new requests are queued,
                so a `generate` in the thread that has to resume would not return.
            clear_cache: also forget cached prefixes. Frozen requests are then recomputed.
        """
        for _ in pause(self._dispatcher, mode, clear_cache):
            self._dispatcher.pump(PUMP_S)

    def resume_generation(self) -> bool:
        """End this front end's pause. Returns whether the engine continues: another front end may
        have paused it as well."""
        return resume(self._dispatcher)

    def is_paused(self) -> bool:
        """Whether a front end has paused the engine, or the engine sleeps."""
        return bool(self._stats()["paused"])

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> SleepReport:
        """Release memory of the engine until `wake_up`.

        A call that changes nothing, because the engine sleeps already, logs a warning.

        Args:
            level: 0 only stops scheduling. 1 drops keys and values; on a CPU the weights stay
                where they are. 2 also drops the weights: they have to be written again before
                the engine can generate.
            mode: what happens to requests. "abort" ends them with reason "abort"; "wait" returns
                when they have ended; "keep" lets them continue when the engine is awake. "keep"
                queues new requests, so do not wait for one in the thread that has to wake the
                engine up; the other modes refuse them with EnginePausedError.

        Returns:
            The bytes that each owner of memory held before and holds now; `str` of it is a line
            for logs.

        Raises:
            RequestError: the level or the mode does not exist.
        """
        steps = fall_asleep(self._dispatcher.call, level, mode)
        with contextlib.closing(steps):
            while (report := next_or_value(steps)) is None:
                self._dispatcher.pump(PUMP_S)
        return report

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Wake the engine up, or parts of it in any order.

        A call that changes nothing logs a warning.

        Args:
            tags: a list of "weights", "kv_cache" and "scheduling"; None means all. Scheduling also
                wakes up together with the last of the other two.

        Returns:
            Whether the engine is fully awake: no part sleeps and no weight is missing.

        Raises:
            RequestError: a tag does not exist, or there is not enough memory.
        """
        return is_fully_awake(wake_up(self._dispatcher.call, tags))

    def is_sleeping(self) -> bool:
        """Whether a part of the engine sleeps, read from shared memory."""
        return is_asleep(self._stats())

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes.

        Args:
            reset_running_requests: preempt running requests first; they are recomputed.
            reset_connector: also forget what the engine has put into the shared cache
                (shared_kv_cache_bytes), but for what other engines read now, and what its
                kv_connector has stored. Else, and for what others have put there, prefixes are
                still found.

        Returns:
            False, without any change, if requests are running.
        """
        asked = {"running": reset_running_requests, "shared": reset_connector}
        return bool(self._dispatcher.call(Method.RESET_PREFIX_CACHE, asked))

    def reset_mm_cache(self) -> None:
        """Forget the prepared images and other items that this front end keeps."""
        self.front_end.items.clear()

    def reset_encoder_cache(self) -> None:
        """Let the engine forget the embeddings of items; those in use are computed again."""
        self._dispatcher.call(Method.RESET_ENCODER_CACHE, None)

    @property
    def engine_pid(self) -> int:
        """The engine's process id, or this process's own id with `multiprocess=False`."""
        return self._client.pid

    def get_metrics(self) -> dict[str, int]:
        """The engine's counters and gauges, read from shared memory.

        If tokens are drafted, `drafts` counts how often that was done for a request,
        `draft_tokens` and `accepted_tokens` the tokens, and `accepted_at_0` to
        `accepted_at_{num_speculative_tokens - 1}` the accepted ones by their place in the draft.
        """
        return self._stats()

    def health(self) -> str:
        """The engine's state in words: "ready", "stalled 7 s in step 12", "dead"."""
        self._dispatcher.check_open()
        return self._client.health()

    def engine_errors(self) -> list[LoggedError]:
        """The engine's log of distinct errors, the latest one last, read from shared memory.

        It contains the errors that do not end the engine: front ends that were cut off or refused,
        calls and updates of weights that failed, and outputs that found no room. Each has a `text`,
        a `count`, and the times `first_ns` and `last_ns` (ns since 1970). An engine in the caller's
        own process has no log, because its caller gets every error.
        """
        self._dispatcher.check_open()
        return self._client.errors()

    def _stats(self) -> dict[str, int]:
        self._dispatcher.check_open()
        return self._client.stats()

    def _run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        """Make one call to the engine's worker and return its result."""
        return self._dispatcher.use_client(lambda client: client.run_on_worker(call, timeout_s))

    def _load_weights(self, weights: NamedTensors) -> set[str]:
        """Overwrite weights for the attribute chain of `llm_engine`."""
        return self._weight_push.update(weights, partial=True)
