"""The option `weight_transfer_config` in all its forms."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from shmllm.config.engine import EngineConfig
from shmllm.config.weight_transfer import BACKENDS, WeightTransferConfig
from shmllm.errors import EngineStartError


@pytest.mark.parametrize(
    "value",
    [{"backend": "gloo"}, '{"backend": "gloo"}', "gloo", SimpleNamespace(backend="gloo")],
)
def test_every_form_names_the_backend(value: Any) -> None:
    config = WeightTransferConfig(value)
    assert config.backend == "gloo"
    sent = EngineConfig.from_json(
        EngineConfig.from_json(_json(config)).to_json()  # as it goes to the engine
    )
    assert sent.transfer.backend == "gloo"


def _json(config: WeightTransferConfig) -> str:
    from shmllm.config.load import LoadConfig

    return EngineConfig(load=LoadConfig("/"), transfer=config).to_json()


def test_shared_memory_is_the_default() -> None:
    assert WeightTransferConfig().backend == "shm"
    assert WeightTransferConfig({}).backend == "shm"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("pigeon", "'pigeon' is not one of shm, ipc, nccl, gloo"),
        ({"backend": ["nccl"]}, "is not one of shm"),
        ({"backend": "nccl", "prt": 1}, "takes the key 'backend' only, got 'prt'"),
        ("{backend", "not valid JSON"),
        (7, "7 is not one of"),
    ],
)
def test_another_value_is_an_error_that_names_the_backends(value: Any, words: str) -> None:
    with pytest.raises(EngineStartError, match=words):
        WeightTransferConfig(value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_has_both_ends(backend: str) -> None:
    module = import_module(BACKENDS[backend])
    for end, methods in (
        ("Receiver", ("open", "read_update", "receive", "progress", "close")),
        ("Sender", ("connect", "transmit", "disconnect", "send_weights", "shutdown")),
    ):
        assert all(callable(getattr(getattr(module, end), name)) for name in methods)
