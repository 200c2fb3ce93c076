"""The engines of a front end: starts them, or reads the names of those that it attaches to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmllm.client.private import PrivateEngineClient
from shmllm.config.engine import EngineConfig
from shmllm.config.front_end import FrontEndConfig
from shmllm.errors import EngineStartError, RequestError


def names_of(name: str | Sequence[str]) -> list[str]:
    """The different names that `attach` got."""
    names = [name] if isinstance(name, str) else [*name]
    if not names or not all(isinstance(each, str) for each in names):
        raise RequestError(f"attach takes the name of an engine, or a list of names, got {name!r}")
    if len(set(names)) < len(names):
        raise RequestError(f"attach: an engine is named twice in {names}")
    return names


def start_engine(options: FrontEndConfig, config: EngineConfig) -> Any:
    """Start the engines, and return their client. They load their models meanwhile."""
    count = options.data_parallel_size
    if options.multiprocess and count == 1:
        return PrivateEngineClient(config, startup_timeout_s=options.startup_timeout)
    if options.multiprocess:
        from shmllm.client.start import start_engines

        return start_engines(config, count, options.startup_timeout, options.prefill_engines)
    if count > 1:
        raise EngineStartError(
            f"data_parallel_size {count} is not possible with multiprocess=False: leave one of the "
            "two out"
        )
    from shmllm.engine.local import LocalEngineClient

    return LocalEngineClient(config)
