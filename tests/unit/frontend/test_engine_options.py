"""The EngineConfig made from the options of `LLM`, and the sampling defaults of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shmllm import LLM
from shmllm.config.engine import EngineConfig
from shmllm.errors import EngineStartError
from shmllm.frontend.options.engine_options import (
    LLM_OPTIONS,
    make_engine_config,
    read_llm_options,
    read_model_defaults,
)
from shmllm.params.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("temperature", 0.6, "temperature"),
        ("top_k", 20, "top_k"),
        ("top_p", 0.9, "top_p"),
        ("min_p", 0.1, "min_p"),
        ("repetition_penalty", 1.1, "repetition_penalty"),
        ("presence_penalty", 0.5, "presence_penalty"),
        ("frequency_penalty", 0.25, "frequency_penalty"),
        ("max_new_tokens", 77, "max_tokens"),
    ],
)
def test_generation_config_gives_sampling_defaults_unless_turned_off(tmp_path, field, value, name):
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value, "other": 3}))
    assert read_model_defaults(tmp_path, "auto") == {name: value}
    assert read_model_defaults(tmp_path, "shmllm") == {}
    assert getattr(SamplingParams(**read_model_defaults(tmp_path, "auto")), name) == value


def test_logprobs_options_reach_the_engine():
    config = make_engine_config("tiny", max_logprobs=-1, logprobs_mode="processed_logits")
    received = EngineConfig.from_json(config.to_json())
    assert (received.logprobs.max_logprobs, received.logprobs.mode) == (-1, "processed_logits")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_logprobs": -2}, "max_logprobs must be -1 or a whole number of at least 0, got -2"),
        ({"max_logprobs": 1.5}, "max_logprobs must be .* got 1.5"),
        ({"logprobs_mode": "raw"}, "logprobs_mode 'raw' is not one of raw_logprobs, processed_"),
    ],
)
def test_invalid_logprobs_options_are_errors(options, words):
    with pytest.raises(EngineStartError, match=words):
        make_engine_config("tiny", **options)


def test_none_stands_for_the_default_of_each_option():
    nothing = dict.fromkeys(each.name for each in LLM_OPTIONS if each.name != "model")
    assert read_llm_options("LLM", "tiny", nothing) == read_llm_options("LLM", "tiny", {})
    assert read_llm_options("LLM", "tiny", {"seed": 3}) != read_llm_options("LLM", "tiny", {})


def test_one_engine_is_no_pool():
    with pytest.raises(EngineStartError, match="start each named engine by itself"):
        make_engine_config("tiny", data_parallel_size=2)


def test_hf_overrides_may_be_a_function_of_the_configuration():
    def shorten(config):
        config.max_position_embeddings //= 2
        config.update({"pad_token_id": 7})
        return config

    before = make_engine_config("tiny")
    found = make_engine_config("tiny", hf_overrides=shorten)
    (directory,) = {before.load.directory, found.load.directory}
    longest = json.loads((Path(directory) / "config.json").read_text())["max_position_embeddings"]
    assert found.load.hf_overrides == {
        "max_position_embeddings": longest // 2,
        "pad_token_id": 7,
    }
    with LLM(hf_overrides=shorten, multiprocess=False, kv_cache_memory_bytes=2**26) as llm:
        assert llm.facts.max_model_len == longest // 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda config: config.nothing, "function hf_overrides failed: AttributeError: .*nothing"),
        (lambda config: 7, "hf_overrides returned int: it must return the configuration"),
        (lambda config: {"num_hidden_layers": 1}, "hf_overrides returned dict: it must return"),
        (lambda config: config.update({"x": {1, 2}}), "hf_overrides"),
    ],
)
def test_a_function_that_fails_is_an_error_that_says_so(function, message):
    with pytest.raises(EngineStartError, match=message):
        make_engine_config("tiny", hf_overrides=function)


def test_overrides_that_are_no_mapping_are_refused_before_a_model_is_looked_for():
    with pytest.raises(EngineStartError, match="hf_overrides must be a mapping, got 7"):
        make_engine_config("no/such-model", hf_overrides=7)
