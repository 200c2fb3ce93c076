"""Decides what a model runs on, and what is said where an option means nothing there."""

from __future__ import annotations

import torch

from shmllm.config.engine import CacheConfig, EngineConfig
from shmllm.config.graphs import GraphConfig
from shmllm.errors import EngineStartError
from shmllm.worker.gpu.device import find_cuda_problem


def choose_device(name: str) -> tuple[int | None, str | None]:
    """
    Args:
        name: "cpu", "cuda", "cuda:1" and so on; "auto" is the first GPU if there is one that can
            be used.

    Returns:
        The GPU's index, or None for the CPU; a sentence if "auto" left a GPU alone.

    Raises:
        EngineStartError: the GPU that was asked for cannot be used; says what is missing.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.device_count()):
        return None, None
    index = int(name.partition(":")[2] or 0)
    problem = find_cuda_problem(index)
    if not problem:
        return index, None
    if name == "auto":
        return None, f"the GPU is not used: {problem}"
    raise EngineStartError(f"device={name!r}: {problem}")


def ignored_on_cpu(config: EngineConfig) -> list[str]:
    """What was asked for and has no effect on a CPU, a sentence each."""
    graphs, usual, none = config.graphs, GraphConfig(), "nothing is captured there"
    options = (
        (
            "gpu_memory_utilization",
            config.cache.gpu_memory_utilization,
            CacheConfig().gpu_memory_utilization,
            "kv_cache_memory_bytes sizes the cache",
        ),
        ("enforce_eager", graphs.enforce_eager, usual.enforce_eager, none),
        ("cudagraph_mode", graphs.mode, usual.mode, none),
        ("cudagraph_capture_sizes", graphs.capture_sizes, usual.capture_sizes, none),
        ("max_cudagraph_capture_size", graphs.max_capture_size, usual.max_capture_size, none),
    )
    return [
        f"{name}={value!r} has no effect on a CPU: {reason}"
        for name, value, default, reason in options
        if value != default
    ]
