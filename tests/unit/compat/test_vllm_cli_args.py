"""`EngineArgs.add_cli_args` and `from_cli_args`, with vLLM's parser and with Python's."""

from __future__ import annotations

import argparse

import pytest

from shmllm.compat.vllm_cli_args import FlexibleArgumentParser
from shmllm.compat.vllm_engine_args import AsyncEngineArgs, EngineArgs


def read(*arguments: str, cls: type[EngineArgs] = EngineArgs) -> EngineArgs:
    parser = cls.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    return cls.from_cli_args(parser.parse_args(arguments))


def test_without_arguments_all_options_have_their_defaults() -> None:
    assert read() == EngineArgs()
    assert type(read(cls=AsyncEngineArgs)) is AsyncEngineArgs
    assert read().create_engine_config().cache_config.enable_prefix_caching


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--model", "x"], "model", "x"),
        (["--max_num_seqs", "4"], "max_num_seqs", 4),
        (["--max-num-seqs=4"], "max_num_seqs", 4),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--enforce-eager"], "enforce_eager", True),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--kv-cache-memory-bytes", "64M"], "kv_cache_memory_bytes", "64M"),
        (["--max-model-len", "2k"], "max_model_len", 2000),
        (["--max-model-len", "2K"], "max_model_len", 2048),
        (["--max-model-len", "1.5k"], "max_model_len", 1500),
        (["--max-model-len", "auto"], "max_model_len", -1),
        (
            ["--compilation-config", '{"cudagraph_mode": "NONE"}'],
            "compilation_config",
            {"cudagraph_mode": "NONE"},
        ),
        (["--attention-backend", "FLASH_ATTN"], "attention_backend", "FLASH_ATTN"),
        (["--quantization", "None"], "quantization", None),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size", 2),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["-tp=2"], "tensor_parallel_size", 2),
        (["--cudagraph-capture-sizes", "1", "2", "4"], "cudagraph_capture_sizes", [1, 2, 4]),
        (["--cudagraph-capture-sizes", "[1, 2]"], "cudagraph_capture_sizes", [1, 2]),
        (["--logits-processors", "a:B", "c:D"], "logits_processors", ["a:B", "c:D"]),
        (["--served-model-name", "a", "b"], "served_model_name", ["a", "b"]),
        (["--served-model-name", "None"], "served_model_name", None),
        (["--hf-token"], "hf_token", True),
        (["--hf-token", "x"], "hf_token", "x"),
        (["-pp", "2"], "pipeline_parallel_size", 2),
        (["-dp", "2"], "data_parallel_size", 2),
        (["-pcp", "1"], "prefill_context_parallel_size", 1),
        (["-dcp", "1"], "decode_context_parallel_size", 1),
        (["-ep"], "enable_expert_parallel", True),
        (["-q", "int8"], "quantization", "int8"),
        (["-sc", '{"method": "ngram"}'], "speculative_config", {"method": "ngram"}),
        (["-cc", '{"level": 0}'], "compilation_config", {"level": 0}),
        (["-ac", '{"backend": "x"}'], "attention_config", {"backend": "x"}),
    ],
)
def test_an_argument_sets_its_option(arguments: list[str], name: str, value: object) -> None:
    args = read(*arguments)
    assert getattr(args, name) == value
    assert set(args.llm_options()) <= {name}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-num-seqs", "many"],
        ["--max-num-seqs", "1.5"],
        ["--compilation-config", "{not json"],
        ["--gpu-memory-utilization", "half"],
    ],
)
def test_a_value_of_another_type_is_an_error_of_the_parser(arguments: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError, match=arguments[0]):
        read(*arguments)


@pytest.mark.parametrize("arguments", [["--config", "x.yaml"], ["--max-num-seq", "4"]])
def test_options_cannot_be_abbreviated(arguments: list[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args, unknown = parser.parse_known_args(arguments)
    assert (EngineArgs.from_cli_args(args), unknown) == (EngineArgs(), arguments)


def test_every_option_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    out = capsys.readouterr().out
    assert "--max-num-batched-tokens" in out
    assert "--tensor-parallel-size" in out
    assert "--on-load-progress" not in out


def test_a_program_may_have_its_own_argument_for_a_chat_template() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--chat-template")
    assert parser.parse_args(["--chat-template", "a"]).chat_template == "a"
