"""`llm.llm_engine`: the attributes of vLLM's engine that programs written for vLLM read.

This module provides attribute chains such as `llm_engine.model_config.max_model_len` and
`llm_engine.model_executor.driver_worker.model_runner.model.load_weights`, in whichever process the
engine runs. The objects are views: they contain the engine's info, and they pass calls on to the
LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shmllm.config.info import EngineInfo
from shmllm.config.views import VllmConfigView
from shmllm.frontend.pausing import PauseMode
from shmllm.outputs.sleep_report import SleepReport
from shmllm.params.lora import LoRARequest
from shmllm.wire.rpc import RpcCall


class EngineHost(Protocol):
    """The attributes and methods of an LLM that the views use."""

    facts: EngineInfo
    model_defaults: dict[str, Any]

    def get_tokenizer(self) -> Any: ...

    def _run_on_worker(self, call: RpcCall, timeout_s: float | None = None) -> Any: ...

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]: ...

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]: ...

    def _load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]: ...

    def reset_prefix_cache(self) -> bool: ...

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def add_lora(self, lora_request: LoRARequest) -> bool: ...

    def remove_lora(self, lora_id: int) -> bool: ...

    def list_loras(self) -> set[int]: ...

    def pin_lora(self, lora_id: int) -> bool: ...

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> SleepReport: ...

    def wake_up(self, tags: Sequence[str] | None = None) -> bool: ...

    def is_sleeping(self) -> bool: ...

    def close(self) -> None: ...

    def _num_unfinished(self) -> int: ...


class RemoteModel:
    """A handle of the model in the engine process."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Replace weights between two steps, all of the given ones or none.

        Each call is an update of its own; see `LLM.update_weights`. Unlike there, weights that
        were lost in a sleep at level 2 may be missing in `weights`.

        Returns:
            The names of the replaced weights.
        """
        return self._host._load_weights(weights)


@dataclass(frozen=True)
class ModelRunnerView:
    """The link from the worker to the model, as in vLLM's attribute chain."""

    model: RemoteModel


@dataclass(frozen=True)
class WorkerView:
    """The link from the executor to the model runner, as in vLLM's attribute chain."""

    model_runner: ModelRunnerView
    rank: int = 0
    local_rank: int = 0

    @property
    def worker(self) -> WorkerView:
        """The worker itself; in vLLM the driver's worker wraps another one."""
        return self


class ExecutorView:
    """The executor of vLLM's attribute chain. Of several ranks, it has the worker of rank 0."""

    def __init__(self, host: EngineHost) -> None:
        self.driver_worker = WorkerView(ModelRunnerView(RemoteModel(host)))
        self.collective_rpc = host.collective_rpc
        self.apply_model = host.apply_model


class EngineCoreView:
    """The engine process of vLLM's attribute chain."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine process; `timeout` has no effect."""
        self._host.close()


class EngineView:
    """The view of an engine that `LLM.llm_engine` returns.

    Args:
        host: the LLM.
    """

    def __init__(self, host: EngineHost) -> None:
        self.vllm_config = VllmConfigView.of(host.facts, host.model_defaults)
        self.model_config = self.vllm_config.model_config
        self.cache_config = self.vllm_config.cache_config
        self.scheduler_config = self.vllm_config.scheduler_config
        self.parallel_config = self.vllm_config.parallel_config
        self.model_executor = ExecutorView(host)
        self.engine_core = EngineCoreView(host)
        self.get_tokenizer = host.get_tokenizer
        self.collective_rpc = host.collective_rpc
        self.apply_model = host.apply_model
        self.reset_prefix_cache = host.reset_prefix_cache
        self.reset_mm_cache = host.reset_mm_cache
        self.reset_encoder_cache = host.reset_encoder_cache
        self.add_lora, self.remove_lora = host.add_lora, host.remove_lora
        self.list_loras, self.pin_lora = host.list_loras, host.pin_lora
        self.sleep = host.sleep
        self.wake_up = host.wake_up
        self.is_sleeping = host.is_sleeping
        self.get_num_unfinished_requests = host._num_unfinished

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer as a transformers object. Imports transformers."""
        return self.get_tokenizer()
