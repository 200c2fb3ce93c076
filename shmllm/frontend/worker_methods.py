"""The methods of LLM that reach into the engine: calls, functions on the model, profiles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shmllm.client.channel_client import EngineClient
from shmllm.config.info import EngineInfo
from shmllm.errors import RequestError
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.engine_view import EngineView
from shmllm.frontend.sleeping import SleepMethods
from shmllm.params.keywords import reject_unknown_options
from shmllm.wire.rpc import RpcCall


def on_model(worker: Any, function: Callable[[Any], Any]) -> Any:
    """What `apply_model` has the worker do."""
    return function(worker.model)


def read_profiler_config(config: Mapping[str, Any] | None) -> str | None:
    """The directory for traces; None for the working directory at that time."""
    if config is None:
        return None
    if not isinstance(config, Mapping) or config.get("profiler", "torch") != "torch":
        raise TypeError(f"profiler_config is a dict with torch_profiler_dir, got {config!r}")
    reject_unknown_options("profiler_config", config, ("profiler", "torch_profiler_dir"))
    return config.get("torch_profiler_dir")


class WorkerMethods(SleepMethods):
    """What LLM inherits."""

    facts: EngineInfo
    model_defaults: dict[str, Any]
    profile_directory: str | None = None
    _client: EngineClient
    _dispatcher: Dispatcher

    def get_tokenizer(self) -> Any:
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        raise NotImplementedError

    def reset_prefix_cache(self) -> bool:
        raise NotImplementedError

    @property
    def llm_engine(self) -> EngineView:
        """The engine's configuration and model, under vLLM's names."""
        # Not kept: it refers to this object, and a circle would outlive its last user.
        return EngineView(self)

    @property
    def model_config(self) -> Any:
        """`llm_engine.model_config`."""
        return self.llm_engine.model_config

    @property
    def engine_pid(self) -> int:
        """The engine's process, for tools that watch it; our own without one."""
        return self._client.pid

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Have the engine's worker do something, between two steps.

        Args:
            method: a name from `shmllm.engine.worker.METHODS`, or a function. A function
                is pickled (by cloudpickle) and called in the engine with the worker, whose
                `model` and `model_runner` it may use, and the arguments. Only the process
                that started the engine can send functions, unless the engine was started
                with `allow_callables`.
            timeout: seconds to wait; None waits as long as the engine lives. What was begun
                is not undone.
            args: after the worker.
            kwargs: likewise.

        Returns:
            A list with the one worker's result. Tensors in it are copies.

        Raises:
            RequestError: it cannot cross, or the engine refused it.
            CallError: it raised an exception; its text and traceback.
            IpcTimeoutError: no answer in time; also a TimeoutError.
        """
        if not isinstance(method, str) and not callable(method):
            raise RequestError(
                f"collective_rpc takes a name or a function, got {type(method).__name__}"
            )
        return [self.run_on_worker(RpcCall(method, tuple(args), dict(kwargs or {})), timeout)]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func(model)` in the engine; see `collective_rpc`. The model is a
        `shmllm.models.decoder.DecoderModel`."""
        if not callable(func):
            raise RequestError(f"apply_model takes a function, got {type(func).__name__}")
        return [self.run_on_worker(RpcCall(on_model, (func,)))]

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> str:
        """Record the engine's steps with torch's profiler, until `stop_profile`.

        Args:
            profile_prefix: of the trace's name.
            delay_iterations: steps to let pass first.
            max_iterations: steps to record; 0 or None for all.

        Returns:
            The path of the trace that will be written.
        """
        directory = os.path.abspath(self.profile_directory or os.getcwd())
        options = {
            "prefix": profile_prefix or "shmllm",
            "delay": delay_iterations or 0,
            "most": max_iterations or 0,
        }
        path: str = self.run_on_worker(RpcCall("start_profile", (directory,), options))
        return path

    def stop_profile(self) -> str:
        """Write the trace of `start_profile`, for chrome://tracing or Perfetto; its path."""
        path: str = self.run_on_worker(RpcCall("stop_profile"))
        return path

    def run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any:
        """One call, one result. Internal."""
        return self._dispatcher.run_on_worker(call, timeout_s)
