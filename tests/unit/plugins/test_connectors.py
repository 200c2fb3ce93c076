"""The class of a KV connector, found by its name, and what a connector sees."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
from support.connectors import InMemory

from shmllm.errors import EngineStartError
from shmllm.plugins import connectors
from shmllm.plugins.connectors import load_connector_class
from shmllm.plugins.entry_points import CONNECTORS, Plugin
from shmllm.plugins.kv_connector import FullBlock, KVConnector, RequestView, StepView


def install(monkeypatch: pytest.MonkeyPatch, **plugins: str) -> None:
    group = f"shmllm.{CONNECTORS}"
    found = [
        Plugin(group, name, value, "package", EntryPoint(name, value, group))
        for name, value in plugins.items()
    ]
    monkeypatch.setattr(connectors, "find_plugins", lambda kind: found)


def test_a_class_is_found_by_module_and_name() -> None:
    assert load_connector_class("support.connectors:InMemory") is InMemory


def test_a_class_is_found_by_the_name_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, memory="support.connectors:InMemory")
    assert load_connector_class("memory") is InMemory
    monkeypatch.setenv("SHMLLM_PLUGINS", "")
    with pytest.raises(EngineStartError, match=r"'memory' is not known.*: none; or pass"):
        load_connector_class("memory")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LMCacheConnectorV1", "is not known: .*shmllm.kv_connectors: broken, memory; or pass"),
        ("broken", "kv_connector broken cannot be imported: ModuleNotFoundError"),
        ("support.absent:Class", "cannot be imported: ModuleNotFoundError.*; PYTHONPATH names"),
        ("../absent:Class", "does not name an object as 'module:name'"),
        ("support.connectors:Absent", "cannot be imported: AttributeError"),
        ("support.connectors:METHODS", "is no subclass of shmllm.plugins.kv_connector:KVConnector"),
        ("collections:Counter", "is no subclass"),
    ],
)
def test_a_wrong_name_is_an_error(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken="support.absent:Class", memory="support.connectors:InMemory")
    with pytest.raises(EngineStartError, match=words):
        load_connector_class(name)


def test_the_requests_of_a_step_are_made_when_they_are_read() -> None:
    calls: list[int] = []

    def schedule() -> list[Any]:
        calls.append(1)
        return []

    step = StepView(3, [FullBlock(1, b"a")], schedule)
    assert not calls
    assert step.scheduled == step.scheduled == []
    assert len(calls) == 1


def test_a_request_has_an_id_of_its_front_end() -> None:
    request = RequestView(2, 7, [1, 2, 3], 2, (), 16)
    assert (request.request_id, request.num_tokens) == ("2-7", 3)


def test_every_method_but_four_has_to_be_defined() -> None:
    optional = {"request_finished", "reset_cache", "use_identity", "shutdown"}
    methods = {name for name in vars(KVConnector) if not name.startswith("_")}
    assert methods - KVConnector.__abstractmethods__ == optional
