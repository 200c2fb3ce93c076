"""The worker's part of KV connectors: the order of calls, and what a failure leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import connectors

from shmllm.core.plan import ExternalStep, StepPlan, StepResult
from shmllm.errors import EngineStartError
from shmllm.plugins.kv_connector import ConnectorContext, FullBlock
from shmllm.worker.kv_connector import WorkerConnector


class Recording(connectors.InMemory):
    """Notes its calls."""

    def __init__(self) -> None:
        super().__init__(ConnectorContext({}, "kv_both", "id", 4))
        self.calls: list[str] = []

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if kv_caches.pop("refused", None) is not None:
            raise ValueError("no")
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, metadata: Any) -> None:
        self.calls.append("start")
        super().start_load_kv(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(f"wait {layer_name}")
        super().wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, metadata: Any) -> None:
        self.calls.append(f"save {layer_name}")
        super().save_kv_layer(layer_name, kv_layer, metadata)

    def wait_for_save(self) -> None:
        self.calls.append("wait")
        super().wait_for_save()


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Recording:
    loadable = {"a": torch.full((3,), 7, dtype=torch.uint8), "b": torch.tensor([8, 8, 9]).byte()}
    monkeypatch.setattr(connectors, "blocks", {("id", b"known"): loadable})
    monkeypatch.setattr(connectors, "fails_in", "")
    return Recording()


def run(
    worker: WorkerConnector, connector: Recording, *, loads: bool, saves: bool, **changes: Any
) -> StepResult:
    """Run a step that loads block 2 and saves block 4."""
    metadata = [(2, b"known")] * loads, [FullBlock(4, b"new")] * saves
    step = ExternalStep(metadata, [2] * loads, saves, 0)._replace(**changes)

    def execute(plan: StepPlan) -> StepResult:
        connector.calls.append("compute")
        return StepResult([])

    return worker.run(StepPlan(0, external=step), execute)


def make(connector: Recording) -> tuple[WorkerConnector, dict[str, torch.Tensor]]:
    layers = {name: torch.ones((6, 8), dtype=torch.uint8)[:, 2:5] for name in "ab"}
    return WorkerConnector(connector, "x:Y", layers), layers


def test_a_step_loads_computes_and_saves_in_this_order(connector: Recording) -> None:
    worker, layers = make(connector)
    result = run(worker, connector, loads=True, saves=True)
    calls = ["start", "wait a", "wait b", "compute", "save a", "save b", "wait"]
    assert connector.calls == calls
    assert (result.load_failure, result.problems) == ("", [])
    assert layers["b"][2].tolist() == [8, 8, 9]
    assert connectors.blocks["id", b"new"]["a"].tolist() == [1, 1, 1]


def test_a_step_without_blocks_only_computes(connector: Recording) -> None:
    worker, _ = make(connector)
    run(worker, connector, loads=False, saves=False)
    worker.run(StepPlan(0), lambda plan: StepResult([]))
    assert connector.calls == ["compute"]


@pytest.mark.parametrize("method", ["start_load_kv", "wait_for_layer_load"])
def test_behind_a_failed_load_nothing_is_saved_until_the_scheduler_knows(
    connector: Recording, method: str
) -> None:
    worker, layers = make(connector)
    connectors.fails_in = method
    result = run(worker, connector, loads=True, saves=True)
    assert result.load_failure == f"the KV connector x:Y failed in {method}: ValueError: broken"
    assert layers["a"].sum(1).tolist() == [3, 3, 0, 3, 3, 3]
    connectors.fails_in = ""
    run(worker, connector, loads=True, saves=True)
    assert ("id", b"new") not in connectors.blocks
    run(worker, connector, loads=False, saves=True, epoch=1)
    assert ("id", b"new") in connectors.blocks


@pytest.mark.parametrize("method", ["save_kv_layer", "wait_for_save"])
def test_a_failed_save_is_a_problem(connector: Recording, method: str) -> None:
    worker, _ = make(connector)
    connectors.fails_in = method
    result = run(worker, connector, loads=False, saves=True)
    assert result.load_failure == ""
    assert result.problems == [f"the KV connector x:Y failed in {method}: ValueError: broken"]


def test_a_step_that_was_not_described_loads_and_saves_nothing(connector: Recording) -> None:
    worker, _ = make(connector)
    result = run(worker, connector, loads=True, saves=True, error="no words")
    assert (result.load_failure, connector.calls) == ("no words", ["compute"])
    result = run(worker, connector, loads=False, saves=True, error="no words")
    assert (result.problems, connector.calls) == (["no words"], ["compute"] * 2)


def test_a_connector_that_refuses_the_blocks_ends_the_start(connector: Recording) -> None:
    with pytest.raises(EngineStartError, match="x:Y failed in register_kv_caches: ValueError"):
        WorkerConnector(connector, "x:Y", {"refused": torch.zeros(1)})
