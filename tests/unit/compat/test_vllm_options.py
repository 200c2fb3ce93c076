"""The translation of vLLM's options into those of `LLM`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import shmllm
from shmllm.compat import vllm_options
from shmllm.compat.vllm_config import (
    AttentionConfig,
    CompilationConfig,
    KernelConfig,
    WeightTransferConfig,
)
from shmllm.compat.vllm_engine import LLM
from shmllm.compat.vllm_engine_args import AsyncEngineArgs, EngineArgs
from shmllm.compat.vllm_options import translate
from shmllm.config.graphs import CudaGraphMode
from shmllm.errors import EngineStartError
from shmllm.frontend.options.engine_options import make_engine_config
from shmllm.frontend.options.foreign_options import check_foreign_options


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
        ({"load_format": "hf"}, {"load_format": "auto"}),
        (
            {"attention_config": AttentionConfig(backend="X")},
            {"attention_config": {"backend": "X"}},
        ),
        ({"kernel_config": KernelConfig()}, {}),
    ],
)
def test_other_spellings_are_translated(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert translate(given) == ours


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
    assert config.scheduler_config.max_num_batched_tokens == 2048
    assert config.cache_config.enable_prefix_caching
    assert config.parallel_config.pipeline_parallel_size == 1
    assert args.create_model_config().max_model_len == 64
    default = inspect.signature(shmllm.LLM).parameters["max_num_seqs"].default
    assert EngineArgs().create_engine_config().scheduler_config.max_num_seqs == default


def test_a_configuration_has_the_number_of_processes() -> None:
    ranks = EngineArgs(tensor_parallel_size=2).create_engine_config().parallel_config
    assert (ranks.tensor_parallel_size, ranks.pipeline_parallel_size) == (2, 1)
    stages = EngineArgs(pipeline_parallel_size=3).create_engine_config().parallel_config
    assert (stages.tensor_parallel_size, stages.pipeline_parallel_size) == (1, 3)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="max_num_seqs"):
        EngineArgs(max_num_sequences=3)


def test_an_impossible_value_ends_the_start() -> None:
    with pytest.raises(EngineStartError, match="cpu_offload_gb"):
        shmllm.LLM.from_engine_args(EngineArgs(cpu_offload_gb=1))


def test_large_blocks_become_the_largest(caplog: pytest.LogCaptureFixture) -> None:
    assert translate({"block_size": 256}) == {"block_size": 128}
    assert "block_size=256 becomes 128" in caplog.text
    assert make_engine_config("tiny", block_size=vllm_options.LARGEST)
    assert translate({"block_size": 16}) == {"block_size": 16}


def test_options_that_clients_always_pass_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    given = {"fully_sharded_loras": False, "enable_chunked_prefill": None, "attention_config": None}
    assert check_foreign_options("LLM", given) == {}
    assert caplog.text == ""
    assert check_foreign_options("LLM", {"enable_chunked_prefill": False}) == {}
    assert "long prompts are always chunked" in caplog.text
    examples = {"enable_expert_parallel": True, "disable_chunked_mm_input": True}
    assert check_foreign_options("LLM", examples) == {}


def test_the_settings_of_graphs_reach_the_engine() -> None:
    mode = CompilationConfig(cudagraph_mode=CudaGraphMode.FULL_DECODE_ONLY, mode=3)
    given = translate({"compilation_config": mode})
    assert make_engine_config("tiny", **given).graphs.mode == "FULL_DECODE_ONLY"


def test_settings_have_defaults_and_can_be_compared() -> None:
    assert AttentionConfig().backend is None
    assert AttentionConfig(backend="X") == AttentionConfig(backend="X") != AttentionConfig()
    assert repr(KernelConfig(moe_backend="Y")) == "KernelConfig(moe_backend='Y')"


def test_a_weight_transfer_config_has_the_backend_of_vllm() -> None:
    given = translate({"weight_transfer_config": WeightTransferConfig()})
    assert given == {"weight_transfer_config": {"backend": "nccl"}}
    assert make_engine_config("tiny", **given).transfer.backend == "nccl"
    assert make_engine_config("tiny").transfer.backend == "shm"


@pytest.mark.parametrize("named", [LLM, LLM.__init__, EngineArgs, AsyncEngineArgs])
def test_signatures_show_all_options_of_vllm(named):
    parameters = inspect.signature(named).parameters
    assert {"model", "quantization", "enable_lora", "enable_sleep_mode"} <= set(parameters)
    assert {"limit_mm_per_prompt", "renderer_num_workers", "max_model_len"} <= set(parameters)
    assert parameters["max_num_seqs"].default == EngineArgs(model="tiny").max_num_seqs


@pytest.mark.parametrize(
    "option",
    [{"renderer_num_workers": 1}, {"stream_interval": 1}, {"model_loader_extra_config": {}}],
    ids=str,
)
def test_defaults_of_options_without_a_choice_are_accepted(option):
    assert EngineArgs(model="tiny", **option).llm_options().keys() <= {"model", *option}
