"""`llm.llm_engine`: the attributes of vLLM's engine that its clients read.

Owns the chains `llm_engine.model_config.max_model_len` and `llm_engine.model_executor
.driver_worker.model_runner.model.load_weights`, wherever the engine runs. What stands there
are views: they know the engine's facts and how to have its worker do something.
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
    """What a view needs of an LLM."""

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


class ModelConfigView:
    """
    Args:
        host: the LLM.

    Attributes:
        model, tokenizer: the model's directory.
        max_model_len: tokens of prompt and output together.
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
        """A torch.dtype; imports torch."""
        import torch

        return getattr(torch, self._host.facts.dtype)

    @property
    def hf_config(self) -> Any:
        """transformers' configuration of the model; imports transformers."""
        return _hf_config(self.model)

    @property
    def hf_text_config(self) -> Any:
        return self.hf_config

    def get_vocab_size(self) -> int:
        return self._host.facts.vocab_size

    def get_hidden_size(self) -> int:
        return int(self.hf_config.hidden_size)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Sampling defaults that come with the model."""
        return dict(self._host.model_defaults)


@lru_cache(maxsize=8)
def _hf_config(directory: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory)


@dataclass(frozen=True)
class CacheConfigView:
    """Sizes of the KV cache, in tokens and blocks."""

    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int = 0


@dataclass(frozen=True)
class SchedulerConfigView:
    """What a step may hold."""

    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True)
class ParallelConfigView:
    """One process."""

    world_size: int = 1
    world_size_across_dp: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    rank: int = 0


class RemoteModel:
    """The model in the engine, as far as it can be reached from here."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Overwrite weights between two steps, all of them or none, and return their names. An
        update of its own, which may leave out what is missing since the engine slept; see
        `LLM.update_weights`."""
        return self._host._load_weights(weights)


@dataclass(frozen=True)
class ModelRunnerView:
    """Where the model is."""

    model: RemoteModel


@dataclass(frozen=True)
class WorkerView:
    """Where the runner is."""

    model_runner: ModelRunnerView
    rank: int = 0
    local_rank: int = 0


class ExecutorView:
    """Where the worker is."""

    def __init__(self, host: EngineHost) -> None:
        self.driver_worker = WorkerView(ModelRunnerView(RemoteModel(host)))
        self.collective_rpc = host.collective_rpc
        self.apply_model = host.apply_model


@dataclass(frozen=True)
class VllmConfigView:
    """The parts together."""

    model_config: ModelConfigView
    cache_config: CacheConfigView
    scheduler_config: SchedulerConfigView
    parallel_config: ParallelConfigView = field(default_factory=ParallelConfigView)
    lora_config: None = None
    speculative_config: None = None


class EngineView:
    """
    Args:
        host: the LLM.
    """

    def __init__(self, host: EngineHost) -> None:
        facts = host.facts
        self.vllm_config = VllmConfigView(
            ModelConfigView(host),
            CacheConfigView(facts.block_size, facts.num_blocks),
            SchedulerConfigView(facts.max_num_seqs, facts.max_model_len),
        )
        self.model_config = self.vllm_config.model_config
        self.cache_config = self.vllm_config.cache_config
        self.scheduler_config = self.vllm_config.scheduler_config
        self.parallel_config = self.vllm_config.parallel_config
        self.model_executor = ExecutorView(host)
        self.get_tokenizer = host.get_tokenizer
        self.collective_rpc = host.collective_rpc
        self.apply_model = host.apply_model
        self.reset_prefix_cache = host.reset_prefix_cache
        self.sleep = host.sleep
        self.wake_up = host.wake_up
        self.is_sleeping = host.is_sleeping

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer; imports transformers."""
        return self.get_tokenizer()
