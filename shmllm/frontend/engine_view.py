"""`llm.llm_engine`: the attributes of vLLM's engine that programs written for vLLM read.

This module provides attribute chains such as `llm_engine.model_config.max_model_len` and
`llm_engine.model_executor.driver_worker.model_runner.model.load_weights`, in whichever process the
engine runs. The objects are views: they contain the engine's info, and they pass calls on to the
LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from shmllm.config.info import EngineInfo
from shmllm.frontend.pausing import PauseMode
from shmllm.outputs.sleep_report import SleepReport
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

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> SleepReport: ...

    def wake_up(self, tags: Sequence[str] | None = None) -> bool: ...

    def is_sleeping(self) -> bool: ...

    def close(self) -> None: ...

    def _num_unfinished(self) -> int: ...


class ModelConfigView:
    """The configuration of the model.

    Args:
        host: the LLM.

    Attributes:
        model, tokenizer, served_model_name: the model's directory.
        max_model_len: the largest number of prompt and output tokens of one request.
    """

    runner_type = "generate"
    tokenizer_mode = "auto"
    quantization = None
    trust_remote_code = False
    is_encoder_decoder = False
    is_multimodal_model = False
    skip_tokenizer_init = False

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self.model = self.tokenizer = self.served_model_name = host.facts.model_directory
        self.max_model_len = host.facts.max_model_len

    @property
    def dtype(self) -> Any:
        """The torch.dtype of the model. Imports torch."""
        import torch

        return getattr(torch, self._host.facts.dtype)

    @property
    def hf_config(self) -> Any:
        """The model's configuration as a transformers object. Imports transformers."""
        return _hf_config(self.model)

    @property
    def hf_text_config(self) -> Any:
        return self.hf_config

    def get_vocab_size(self) -> int:
        return self._host.facts.vocab_size

    def get_hidden_size(self) -> int:
        return int(self.hf_config.hidden_size)

    @property
    def embedding_size(self) -> int:
        """The number of components of an embedding without `dimensions`."""
        return self._host.facts.hidden_size

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """The sampling defaults in the model's generation_config.json."""
        return dict(self._host.model_defaults)


@lru_cache(maxsize=8)
def _hf_config(directory: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory)


@dataclass(frozen=True)
class CacheConfigView:
    """The size of the KV cache.

    Attributes:
        block_size: the number of tokens per block.
        num_gpu_blocks: the number of blocks, on a CPU as well.
        gpu_memory_utilization: the option; it has no effect on a CPU.
        enable_prefix_caching: whether requests reuse the blocks of equal prefixes.
        num_cpu_blocks: always 0.
    """

    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    num_cpu_blocks: int = 0


@dataclass(frozen=True)
class SchedulerConfigView:
    """The limits of the scheduler.

    Attributes:
        max_num_seqs: the largest number of requests in one step.
        max_model_len: the largest number of prompt and output tokens of one request.
    """

    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True)
class ParallelConfigView:
    """The parallelism of the engine, which has one process."""

    world_size: int = 1
    world_size_across_dp: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    rank: int = 0


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


class ExecutorView:
    """The executor of vLLM's attribute chain, which has one worker."""

    def __init__(self, host: EngineHost) -> None:
        self.driver_worker = WorkerView(ModelRunnerView(RemoteModel(host)))
        self.collective_rpc = host.collective_rpc
        self.apply_model = host.apply_model


@dataclass(frozen=True)
class VllmConfigView:
    """All configurations of the engine."""

    model_config: ModelConfigView
    cache_config: CacheConfigView
    scheduler_config: SchedulerConfigView
    parallel_config: ParallelConfigView = field(default_factory=ParallelConfigView)
    lora_config: None = None
    speculative_config: None = None


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
        info = host.facts
        self.vllm_config = VllmConfigView(
            ModelConfigView(host),
            CacheConfigView(
                info.block_size,
                info.num_counted_blocks,
                info.enable_prefix_caching,
                info.gpu_memory_utilization,
            ),
            SchedulerConfigView(info.max_num_seqs, info.max_model_len),
        )
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
        self.sleep = host.sleep
        self.wake_up = host.wake_up
        self.is_sleeping = host.is_sleeping
        self.get_num_unfinished_requests = host._num_unfinished

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer as a transformers object. Imports transformers."""
        return self.get_tokenizer()
