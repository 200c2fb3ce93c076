"""Reads the option `profiler_config`: what `LLM.start_profile` does by default."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.params.unknown_options import reject_unknown_options

logger = logging.getLogger(__name__)

_BOUNDS = ("delay_iterations", "max_iterations")
_KNOWN = ("profiler", "torch_profiler_dir", *_BOUNDS)
NO_EFFECT = (
    *("torch_profiler_activities", "torch_profiler_with_stack", "torch_profiler_with_flops"),
    *("torch_profiler_use_gzip", "torch_profiler_dump_cuda_time_total"),
    *("torch_profiler_record_shapes", "torch_profiler_with_memory", "ignore_frontend"),
    *("warmup_iterations", "active_iterations", "wait_iterations"),
)
"""The keys of vLLM's for torch's profiler that are accepted and ignored."""


@dataclass(frozen=True, slots=True)
class ProfilerSettings:
    """The defaults of `LLM.start_profile`.

    Attributes:
        directory: where profiles are written; None: in the working directory.
        delay_iterations: how many steps to skip first.
        max_iterations: how many steps to record; 0 records all.
    """

    directory: str | None = None
    delay_iterations: int = 0
    max_iterations: int = 0


def read_profiler_config(config: Mapping[str, Any] | None) -> ProfilerSettings:
    """Read the option.

    Raises:
        TypeError: it is no mapping, has an unknown key, or means another profiler.
        EngineStartError: the directory or a number of steps is not valid.
    """
    if config is None:
        return ProfilerSettings()
    if not isinstance(config, Mapping) or config.get("profiler", "torch") != "torch":
        raise TypeError(f"profiler_config is a dict with torch_profiler_dir, got {config!r}")
    reject_unknown_options("profiler_config", config, (*_KNOWN, *NO_EFFECT))
    unused = [f"{name}={config[name]!r}" for name in NO_EFFECT if name in config]
    if unused:
        logger.warning("profiler_config: %s has no effect", ", ".join(unused))
    bounds = {name: config[name] for name in _BOUNDS if config.get(name) is not None}
    for name, value in bounds.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise EngineStartError(
                f"{name} of profiler_config is a number of steps that is not negative, "
                f"got {value!r}"
            )
    directory = config.get("torch_profiler_dir") or None
    if not isinstance(directory, str | os.PathLike | None):
        raise EngineStartError(
            f"torch_profiler_dir of profiler_config is a directory, got {directory!r}"
        )
    return ProfilerSettings(None if directory is None else os.fspath(directory), **bounds)
