"""The worker's part of the seam for KV connectors: the calls around the computation of a step.

This module must not know which requests a step computes, nor what a connector stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shmllm.core.plan import ExternalStep, StepPlan, StepResult
from shmllm.errors import EngineStartError
from shmllm.plugins.kv_connector import KVConnector, failure_of


class _FailedError(Exception):
    """A method of a connector raised."""


class WorkerConnector:
    """Calls a connector for the worker.

    Args:
        connector: the connector.
        name: its name, for messages.
        kv_caches: for each layer with keys and values its blocks, (num_blocks, block_bytes) uint8.

    Raises:
        EngineStartError: the connector does not take the blocks.
    """

    def __init__(self, connector: KVConnector, name: str, kv_caches: Mapping[str, Tensor]) -> None:
        self._connector, self._name, self._kv_caches = connector, name, kv_caches
        self._failed_epoch = -1
        try:
            self._call("register_kv_caches", dict(kv_caches))
        except _FailedError as problem:
            raise EngineStartError(str(problem)) from problem

    def run(self, plan: StepPlan, execute: Callable[[StepPlan], StepResult]) -> StepResult:
        """Load a step's blocks, compute it, and save what it completes.

        If a load fails, the step is computed with zeros in its place, as other requests take part
        in it. Nothing is saved then, nor behind steps that were planned before the scheduler knew
        of it: their blocks may depend on those that are missing.
        """
        step = plan.external
        if step is None:
            return execute(plan)
        problem = self._load(step) if step.loaded else ""
        result = execute(plan)
        if problem:
            self._failed_epoch = step.epoch
            result.load_failure = problem
        elif step.error:
            result.problems = [step.error]
        elif step.has_saves and step.epoch != self._failed_epoch:
            result.problems = self._save(step)
        return result

    def _load(self, step: ExternalStep) -> str:
        """Load the blocks of a step. Returns why that failed; empty: it did not."""
        try:
            if step.error:
                raise _FailedError(step.error)
            self._call("start_load_kv", step.metadata)
            for layer in self._kv_caches:
                self._call("wait_for_layer_load", layer)
        except _FailedError as problem:
            for blocks in self._kv_caches.values():
                blocks[step.loaded] = 0
            return str(problem)
        return ""

    def _save(self, step: ExternalStep) -> list[str]:
        """Save the blocks that a step has completed. Returns what failed."""
        try:
            for layer, blocks in self._kv_caches.items():
                self._call("save_kv_layer", layer, blocks, step.metadata)
            self._call("wait_for_save")
        except _FailedError as problem:
            return [str(problem)]
        return []

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self._connector, method)(*arguments)
        except Exception as problem:
            raise _FailedError(failure_of(self._name, method, problem)) from problem
