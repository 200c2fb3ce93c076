"""StructuredOutputsDefaults: the values of `structured_outputs_config`, and what they complete."""

from __future__ import annotations

import types
from typing import Any

import pytest

from shmllm.params.structured_outputs import StructuredOutputsDefaults, StructuredOutputsParams

COMPACT = {"disable_any_whitespace": True}


@pytest.mark.parametrize("config", [COMPACT, types.SimpleNamespace(**COMPACT, backend="guidance")])
def test_a_dict_or_an_object_has_the_settings(config: Any, caplog: Any) -> None:
    assert StructuredOutputsDefaults.make(config) == StructuredOutputsDefaults(True, False)
    assert caplog.text == ""


def test_settings_of_vllm_without_an_effect_cause_a_warning(caplog: Any) -> None:
    config = {"backend": "xgrammar", "reasoning_parser": "qwen3", "disable_fallback": True}
    assert StructuredOutputsDefaults.make(config) == StructuredOutputsDefaults()
    assert "backend='xgrammar' has no effect: the backend is always llguidance" in caplog.text
    assert "reasoning_parser='qwen3' has no effect" in caplog.text
    assert "disable_fallback" not in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (3, "structured_outputs_config is a dict, got 3"),
        ({"disable_any_whitespaces": True}, "the nearest option is 'disable_any_whitespace'"),
        ({"disable_any_whitespace": "no"}, "disable_any_whitespace is True or False, got 'no'"),
    ],
)
def test_other_values_are_refused(config: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        StructuredOutputsDefaults.make(config)


def test_only_json_without_a_pattern_becomes_compact() -> None:
    compact = StructuredOutputsDefaults(disable_any_whitespace=True)
    for fields in ({"json": {}}, {"json_object": True}):
        params = StructuredOutputsParams(**fields)
        assert compact.complete(params) == StructuredOutputsParams(**fields, **COMPACT)
        assert params.disable_any_whitespace is False
    for fields in ({"regex": "a"}, {"json": {}, "whitespace_pattern": " "}):
        params = StructuredOutputsParams(**fields)
        assert compact.complete(params) == params


def test_objects_can_be_closed() -> None:
    closed = StructuredOutputsDefaults(disable_additional_properties=True)
    assert closed.complete(StructuredOutputsParams(json={})).disable_additional_properties
    assert StructuredOutputsDefaults().complete(StructuredOutputsParams(json={})) == (
        StructuredOutputsParams(json={})
    )
