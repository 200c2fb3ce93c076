"""From the options that people give to what an engine and its requests start with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shmllm.config.engine import (
    CacheConfig,
    ClientConfig,
    DType,
    EngineConfig,
    LoadConfig,
    LoadFormat,
    LogprobsConfig,
    LogprobsMode,
    Quantization,
    SchedulerConfig,
    SchedulingPolicy,
    WaitPolicyName,
)
from shmllm.frontend.graph_options import make_graph_config
from shmllm.frontend.model_files import generation_defaults, resolve_model

_DTYPE_SYNONYMS = {"half": "float16", "float": "float32"}


def _dtype_name(dtype: Any) -> Any:
    """vLLM's other names for a dtype, and torch's own, as one of ours."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_SYNONYMS.get(name, name)


def make_engine_config(
    model: str = "tiny",
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    dtype: DType = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    block_size: int = 16,
    enable_prefix_caching: bool = True,
    kv_cache_memory_bytes: int | None = None,
    seed: int = 0,
    load_format: LoadFormat = "auto",
    quantization: Quantization | None = None,
    num_threads: int | None = None,
    wait_policy: WaitPolicyName = "balanced",
    client_timeout: float = 30.0,
    max_logprobs: int = 20,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    allow_callables: bool = False,
    scheduling_policy: SchedulingPolicy = "fcfs",
    deterministic: bool = False,
    device: str = "auto",
    gpu_memory_utilization: float = 0.92,
    enforce_eager: bool = False,
    compilation_config: Any = None,
    cudagraph_capture_sizes: Sequence[int] | None = None,
    max_cudagraph_capture_size: int | None = None,
    async_scheduling: bool | None = None,
) -> EngineConfig:
    """The configuration of an engine from the options of `LLM`; finds the model's files."""
    directory = resolve_model(str(model), revision=revision)
    tokenizer_directory = None
    if tokenizer is not None:
        tokenizer_directory = str(resolve_model(tokenizer, revision=revision).absolute())
    return EngineConfig(
        load=LoadConfig(
            str(directory.absolute()),
            _dtype_name(dtype),
            load_format,
            seed,
            max_model_len,
            tokenizer_directory,
            quantization,
            deterministic,
        ),
        cache=CacheConfig(
            block_size, kv_cache_memory_bytes, enable_prefix_caching, gpu_memory_utilization
        ),
        scheduler=SchedulerConfig(
            max_num_seqs, max_num_batched_tokens, scheduling_policy, async_scheduling
        ),
        logprobs=LogprobsConfig(max_logprobs, logprobs_mode),
        client=ClientConfig(wait_policy, client_timeout, allow_callables),
        graphs=make_graph_config(
            compilation_config, cudagraph_capture_sizes, max_cudagraph_capture_size, enforce_eager
        ),
        num_threads=num_threads,
        device=str(device),
    )


def read_model_defaults(directory: Path, generation_config: str) -> dict[str, Any]:
    """Sampling defaults that come with the model, as options of SamplingParams."""
    if generation_config not in ("auto", "shmllm", "vllm"):
        raise TypeError(f"generation_config is 'auto' or 'shmllm', got {generation_config!r}")
    return generation_defaults(directory) if generation_config == "auto" else {}
