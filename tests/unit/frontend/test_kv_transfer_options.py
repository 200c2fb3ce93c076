"""vLLM's option `kv_transfer_config`: its keys, what they mean, and what is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from shmllm.compat.vllm_config import KVTransferConfig
from shmllm.compat.vllm_options import translate
from shmllm.errors import EngineStartError
from shmllm.frontend.options.foreign_options import check_foreign_options
from shmllm.frontend.options.kv_transfer import read_kv_transfer_config

FULL = {
    "kv_connector": "Disk",
    "kv_connector_module_path": "my.module",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"path": "/d"},
}
OURS = {
    "kv_connector": "my.module:Disk",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"path": "/d"},
}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (FULL, OURS),
        (SimpleNamespace(**FULL, kv_port=14579, kv_buffer_device="cuda"), OURS),
        ('{"kv_connector": "memory", "engine_id": "1"}', {"kv_connector": "memory"}),
        ({"kv_connector": "a.b:C", "kv_role": None}, {"kv_connector": "a.b:C"}),
        ({"kv_connector": None, "kv_role": "kv_both"}, {}),
        ({}, {}),
    ],
)
def test_what_a_config_stands_for(given: Any, found: dict[str, Any]) -> None:
    assert read_kv_transfer_config(given) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "must be a mapping such as .*got 3"),
        ("{", "is not valid JSON"),
        ({"kv_conector": "C"}, "has no key 'kv_conector'; the nearest is 'kv_connector'"),
        ({"kv_load_failure_policy": "recompute"}, "can only be 'fail': a request whose blocks"),
        ({"kv_buffer_device": "cuda"}, "can only be 'cpu'"),
    ],
)
def test_what_is_refused(given: Any, words: str) -> None:
    with pytest.raises(EngineStartError, match=words):
        read_kv_transfer_config(given)


def test_keys_of_vllm_s_own_connectors_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_kv_transfer_config({**FULL, "kv_port": 1, "kv_rank": 0}) == OURS
    assert [each.getMessage() for each in caplog.records] == [
        "kv_transfer_config: kv_port, kv_rank has no effect: a connector has its own"
    ]


def test_the_option_is_translated_for_vllm_s_names_and_ours() -> None:
    config = translate({"kv_transfer_config": KVTransferConfig(**FULL)})
    assert check_foreign_options("LLM", config) == OURS
    assert check_foreign_options("LLM", {"kv_transfer_config": None}) == {}
    with pytest.raises(EngineStartError, match="kv_connector is given twice, here and in kv_tr"):
        check_foreign_options("LLM", {"kv_connector": "a:B", "kv_transfer_config": FULL})
