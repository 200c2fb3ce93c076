"""The engine's part in a KV connector: making it, and telling it which weights the engine has.

A connector stores blocks under the engine's identity, a hash of all that decides their bytes. It is
computed when the engine starts, which needs the digest of the weights: the first start with a
checkpoint reads it once. Written weights have no digest, so nothing is loaded and saved behind a
weight update; weights that are read from a directory again have one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shmllm.config.engine import EngineConfig
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.kv_connector import SchedulerConnector
from shmllm.engine.blocks_elsewhere import NoBlocks, WeightsSource
from shmllm.engine.identity import describe, name_of
from shmllm.engine.runner import Runner
from shmllm.errors import EngineStartError, ShmLLMError


class ConnectedEngine(NoBlocks):
    """`BlocksElsewhere` of an engine with a connector.

    Args:
        config: the engine's configuration, which names a connector.
        runner: calls the worker's half.
        source: where the weights are from.
        kv_cache: the blocks.
        on_problem: called with a sentence about something that failed and ends no request.

    Attributes:
        scheduler: calls the scheduler's half.

    Raises:
        EngineStartError: the connector cannot be made, or the model has no blocks for one.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        source: WeightsSource,
        kv_cache: KVCacheManager,
        on_problem: Callable[[str], None],
    ) -> None:
        from shmllm.plugins.connectors import load_connector_class
        from shmllm.plugins.kv_connector import ConnectorContext
        from shmllm.plugins.qualified_names import in_one_line, shown

        self._config, self._runner, self._on_problem = config, runner, on_problem
        plugins = config.plugins
        self._name = shown(plugins.kv_connector)
        _check_groups(runner)
        try:
            identity = self._identity(source)
        except (ShmLLMError, OSError) as problem:
            raise EngineStartError(f"kv_connector is not possible: {problem}") from problem
        extra = plugins.kv_connector_extra_config or {}
        context = ConnectorContext(extra, plugins.kv_role, identity, kv_cache.block_size)
        try:
            self._connector = load_connector_class(plugins.kv_connector)(context)
        except ShmLLMError:
            raise
        except Exception as problem:
            raise EngineStartError(
                f"the KV connector {self._name} cannot be made: {in_one_line(problem)}"
            ) from problem
        runner.use_connector(self._connector, self._name)
        self.scheduler = SchedulerConnector(
            self._connector, self._name, plugins.kv_role, kv_cache, on_problem
        )

    def weights_written(self, source: WeightsSource | None) -> None:
        was_on, self.scheduler.is_on = self.scheduler.is_on, False
        if source is None:
            if was_on:
                self._on_problem(
                    f"the KV connector {self._name} has a rest: written weights have no identity; "
                    "reload_weights from a directory gives them one"
                )
            return
        try:
            self._connector.use_identity(self._identity(source))
            self.scheduler.is_on = True
        except Exception as problem:
            self._on_problem(f"the KV connector {self._name} has a rest: {problem}")

    def reset(self) -> None:
        self._call("reset_cache")

    def close(self) -> None:
        self._call("shutdown")

    def _call(self, name: str) -> None:
        """Call a method of the connector, and report what it raises."""
        try:
            getattr(self._connector, name)()
        except Exception as problem:
            from shmllm.plugins.kv_connector import failure_of

            self._on_problem(failure_of(self._name, name, problem))

    def _identity(self, source: WeightsSource) -> str:
        return name_of(describe(self._config, self._runner, source, threading.Event()))


def _check_groups(runner: Runner) -> None:
    rules = [group.rule for group in runner.kv_groups]
    if len(rules) != 1 or rules[0].most_kept is not None or rules[0].interval is not None:
        raise EngineStartError(
            "kv_connector needs a model whose layers all keep everything: "
            f"{runner.info.model_type} has layers with windows or recurrent states "
            "(disable_hybrid_kv_cache_manager=True lets windows keep everything)"
        )
