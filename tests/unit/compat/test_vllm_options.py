"""The translation of vLLM's options into those of `LLM`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import shmllm
from shmllm.compat import vllm_options
from shmllm.compat.vllm_engine_args import AsyncEngineArgs, EngineArgs
from shmllm.compat.vllm_options import translate
from shmllm.errors import EngineStartError


def test_common_options_are_unchanged() -> None:
    options = {"max_model_len": 128, "max_num_seqs": 4, "enable_prefix_caching": False}
    assert translate(options) == options


def test_options_that_are_none_are_removed() -> None:
    assert translate({"max_num_seqs": None, "quantization": None, "revision": None}) == {}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
        ({"generation_config": "vllm"}, {"generation_config": "shmllm"}),
        ({"model": Path("/a/model")}, {"model": "/a/model"}),
        ({"max_lora_rank": 16, "enable_lora": False}, {"enable_lora": False}),
    ],
)
def test_other_spellings_are_translated(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert translate(given) == ours


def test_no_option_of_llm_is_ignored() -> None:
    ours = inspect.signature(shmllm.LLM.__init__).parameters.keys()
    assert not ours & vllm_options._LORA_OPTIONS


def test_options_that_shmllm_does_not_have_are_passed_on() -> None:
    assert translate({"tensor_parallel_size": 2}) == {"tensor_parallel_size": 2}


def test_a_configuration_is_made_without_an_engine() -> None:
    """Ray makes one to find out how many requests an engine runs."""
    args = AsyncEngineArgs(
        model="tiny",
        runner="generate",
        enable_log_requests=False,
        distributed_executor_backend="uni",
        max_num_seqs=7,
        max_model_len=64,
    )
    config = args.create_engine_config()
    assert config.scheduler_config.max_num_seqs == 7
    assert config.parallel_config.pipeline_parallel_size == 1
    assert args.create_model_config().max_model_len == 64
    default = inspect.signature(shmllm.LLM).parameters["max_num_seqs"].default
    assert EngineArgs().create_engine_config().scheduler_config.max_num_seqs == default


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="max_num_seqs"):
        EngineArgs(max_num_sequences=3)


def test_an_impossible_value_ends_the_start() -> None:
    with pytest.raises(EngineStartError, match="tensor_parallel_size"):
        shmllm.LLM.from_engine_args(EngineArgs(tensor_parallel_size=2))
