"""vLLM's functions that end a caller's own groups of processes. `LLM.close` ends an engine."""

from __future__ import annotations

import gc
import sys


def destroy_model_parallel() -> None:
    """Does nothing: the caller's process belongs to no group of an engine."""


def destroy_distributed_environment() -> None:
    """Does nothing, as `destroy_model_parallel`."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collects garbage, which ends engines that nothing refers to any more.

    Args:
        shutdown_ray: also ends the connection to Ray of a process that has imported it.
    """
    ray = sys.modules.get("ray")
    if shutdown_ray and ray is not None:
        ray.shutdown()
    gc.collect()
