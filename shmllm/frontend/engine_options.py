"""From the options that people give to what an engine and its requests start with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from shmllm.config import (
    CacheConfig,
    ClientConfig,
    DType,
    EngineConfig,
    LoadConfig,
    LoadFormat,
    SchedulerConfig,
    WaitPolicyName,
)
from shmllm.model_files import generation_defaults, resolve_model

logger = logging.getLogger(__name__)

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "max_tokens")


def make_engine_config(
    model: str = "tiny",
    *,
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
    num_threads: int | None = None,
    wait_policy: WaitPolicyName = "balanced",
    client_timeout: float = 30.0,
) -> EngineConfig:
    """The configuration of an engine from the options of `LLM`; finds the model's files."""
    directory = resolve_model(str(model), revision=revision)
    return EngineConfig(
        load=LoadConfig(str(directory.absolute()), dtype, load_format, seed, max_model_len),
        cache=CacheConfig(block_size, kv_cache_memory_bytes, enable_prefix_caching),
        scheduler=SchedulerConfig(max_num_seqs, max_num_batched_tokens),
        client=ClientConfig(wait_policy, client_timeout),
        num_threads=num_threads,
    )


def read_model_defaults(directory: Path, generation_config: str) -> dict[str, Any]:
    """Sampling defaults that come with the model, as options of SamplingParams."""
    if generation_config not in ("auto", "shmllm"):
        raise TypeError(f"generation_config is 'auto' or 'shmllm', got {generation_config!r}")
    defaults = generation_defaults(directory) if generation_config == "auto" else {}
    for name in defaults.keys() - set(SAMPLING_DEFAULTS):
        logger.warning(
            "the model's generation_config.json sets %s to %s, which is not supported yet and "
            "has no effect",
            name,
            defaults[name],
        )
    return {name: value for name, value in defaults.items() if name in SAMPLING_DEFAULTS}
