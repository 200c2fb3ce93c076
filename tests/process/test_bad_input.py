"""Bad input raises an error that names it, and the engine continues to serve requests."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmllm import LLM, EngineStartError, RequestError, SamplingParams
from shmllm.frontend.model_files import resolve_model

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BUNDLED = resolve_model("tiny")
CONFIG = json.loads((BUNDLED / "config.json").read_text())
LONGEST, VOCAB_SIZE = CONFIG["max_position_embeddings"], CONFIG["vocab_size"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return answer(llm)


def answer(llm: LLM) -> list[int]:
    return llm.generate("import os", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty text": ("", "the prompt is empty"),
    "empty ids": ([[]], "the prompt is empty"),
    "empty text in a dict": ({"prompt": ""}, "the prompt is empty"),
    "empty ids in a dict": ({"prompt_token_ids": []}, "the prompt is empty"),
    "id too large": ([VOCAB_SIZE], f"token id {VOCAB_SIZE}; .*0 to {VOCAB_SIZE - 1}"),
    "id far too large": ([2**70], f"token id {2**70}"),
    "id negative": ({"prompt_token_ids": [5, -1]}, "token id -1"),
    "too many ids": ([5] * LONGEST, rf"{LONGEST:,} tokens; max_model_len is {LONGEST:,}"),
    "too long a text": ("import os\n" * LONGEST, f"max_model_len is {LONGEST:,}"),
    "a number": (5, "got int"),
    "None": (None, "got NoneType"),
    "bytes": (b"import os", "got bytes"),
    "a set": ({"import os"}, "got set"),
    "a generator": ((text for text in ["x"]), "got generator"),
    "a number among texts": (["x", 5], "prompt 1 must be .* got int"),
    "a float among ids": ([5, 1.5], "prompt 0 must be .* got int"),
    "bool for an id": ([True], "got bool"),
    "a nested list": ([["x"]], "got list"),
    "a misspelt key": ({"promt": "x"}, "unknown keys .*'promt'.*known are"),
    "no key": ({}, "neither 'prompt' nor 'prompt_token_ids'"),
    "text of a wrong type": ({"prompt": 5}, "'prompt' must be a str, got int"),
    "ids of a wrong type": ({"prompt_token_ids": "abc"}, "'prompt_token_ids' must be a list"),
    "float ids": ({"prompt_token_ids": [1.5]}, "'prompt_token_ids' must be a list"),
    "salt of a wrong type": ({"prompt": "x", "cache_salt": 5}, "'cache_salt' must be a str"),
    "a lone surrogate": ("x\ud800", "lone surrogate.* at character 1"),
    "one bad of many": (["x", "y", "", "z"], "prompt 2 is empty"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_named_and_the_engine_works_on(
    name: str, llm: LLM, expected: list[int]
) -> None:
    prompts, message = BAD_PROMPTS[name]
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert isinstance(caught.value, ValueError)
    assert answer(llm) == expected


BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature negative": ({"temperature": -1}, "temperature must be .*0 to 2, got -1"),
    "temperature high": ({"temperature": 2.5}, "temperature must be .*got 2.5"),
    "temperature nan": ({"temperature": float("nan")}, "temperature must be .*got nan"),
    "temperature text": ({"temperature": "hot"}, "temperature must be a number.*'hot'"),
    "temperature bool": ({"temperature": True}, "temperature must be"),
    "top_p zero": ({"top_p": 0}, "top_p must be .*got 0"),
    "top_p high": ({"top_p": 1.1}, "top_p must be"),
    "top_k low": ({"top_k": -2}, "top_k must be .*got -2"),
    "top_k float": ({"top_k": 1.5}, "top_k must be"),
    "min_p high": ({"min_p": 1.5}, "min_p must be"),
    "seed text": ({"seed": "1"}, "seed must be"),
    "seed large": ({"seed": 2**64}, "seed must be None or a 64-bit"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens must be .*at least 1, got 0"),
    "max_tokens float": ({"max_tokens": 1.0}, "max_tokens must be"),
    "min_tokens negative": ({"min_tokens": -1}, "min_tokens must be"),
    "min above max": ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens must be .*\(8\), got 9"),
    "stop empty": ({"stop": ""}, "stop must be a non-empty string"),
    "stop number": ({"stop": 5}, "stop must be"),
    "stop list": ({"stop": ["x", 5]}, "stop must be"),
    "stop ids text": ({"stop_token_ids": ["x"]}, "stop_token_ids must be"),
    "stop ids negative": ({"stop_token_ids": [-1]}, "stop_token_ids must be"),
    "stop without text": ({"stop": ["x"], "detokenize": False}, "detokenize"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_a_bad_parameter_is_named(name: str) -> None:
    options, message = BAD_PARAMS[name]
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_a_parameter_set_later_is_checked_before_it_travels(
    name: str, llm: LLM, expected: list[int]
) -> None:
    options, message = BAD_PARAMS[name]
    params = SamplingParams(max_tokens=8)
    for field, value in options.items():
        setattr(params, field, value)
    with pytest.raises(RequestError, match=message):
        llm.generate("x", params, use_tqdm=False)
    assert answer(llm) == expected


def test_a_stop_string_set_later_is_not_taken_for_a_list_of_letters(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    params.stop = "ab"  # type: ignore[assignment]
    with pytest.raises(RequestError, match="stop must be"):
        llm.generate("x", params, use_tqdm=False)


WRONG_PARAMS: dict[str, tuple[Any, str]] = {
    "too few": ([GREEDY], "2 prompts and 1 sampling_params"),
    "too many": ([GREEDY] * 3, "2 prompts and 3 sampling_params"),
    "none at all": ([], "2 prompts and 0 sampling_params"),
    "a dict": ({"temperature": 0}, "got dict"),
    "a text": ("greedy", "got str"),
    "a wrong one": ([GREEDY, None], r"sampling_params\[1\] is a NoneType"),
    "stop id outside": (SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids|vocabulary"),
}


@pytest.mark.parametrize("name", WRONG_PARAMS)
def test_wrong_params_for_a_batch(name: str, llm: LLM, expected: list[int]) -> None:
    params, message = WRONG_PARAMS[name]
    with pytest.raises(RequestError, match=message):
        llm.generate(["x", "y"], params, use_tqdm=False)
    assert answer(llm) == expected


BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "none": ([], "messages must be a list"),
    "a text": ("hello", "must be"),
    "None": (None, "messages must be a list"),
    "no role": ([{"content": "x"}], "role"),
    "no content": ([{"role": "user"}], "content"),
    "content of a wrong type": ([{"role": "user", "content": 5}], "content"),
    "an empty conversation": ([[]], "empty|must|message"),
    "a number among messages": ([{"role": "user", "content": "x"}, 5], "int"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_messages(name: str, llm: LLM, expected: list[int]) -> None:
    messages, problem = BAD_MESSAGES[name]
    with pytest.raises(RequestError, match=problem):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer(llm) == expected


def counts(llm: LLM) -> dict[str, int]:
    """The engine's counters, except those that also change when it is asked for something."""
    found = llm.get_metrics().items()
    return {k: v for k, v in found if not k.endswith("_ns") and k != "times_parked"}


def test_nothing_of_a_batch_with_a_bad_prompt_is_queued(llm: LLM, expected: list[int]) -> None:
    llm.reset_prefix_cache()  # whose answer comes after all earlier steps were counted
    before = counts(llm)
    with pytest.raises(RequestError, match="prompt 64 is empty"):
        llm.generate([*["import os"] * 64, ""], GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    assert counts(llm) == before
    assert answer(llm) == expected
    llm.reset_prefix_cache()
    assert llm.get_metrics()["prompt_tokens"] > before["prompt_tokens"]


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_model_length", "max_model_len"),
        ("max_num_sequences", "max_num_seqs"),
        ("kv_cache_memory", "kv_cache_memory_bytes"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("enable_prefix_cache", "enable_prefix_caching"),
        ("revison", "revision"),
        ("num_thread", "num_threads"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=rf"LLM\(\) got an unknown option '{name}'.*'{nearest}'"):
        LLM(**{name: 1})


def test_an_unknown_sampling_parameter_is_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'max_token'.*'max_tokens'"):
        SamplingParams(max_token=5)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "float8"}, "dtype 'float8' is not one of auto, float32"),
    "block size": ({"block_size": 12}, r"block_size must be one of \(8, .*, 128\), got 12"),
    "sequences": ({"max_num_seqs": 0}, "max_num_seqs must be .*at least 1, got 0"),
    "budget": ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be .*got 0"),
    "length": ({"max_model_len": -2}, "max_model_len must be .*got -2"),
    "load format": ({"load_format": "gguf"}, "load_format 'gguf' is not one of"),
    "threads": ({"num_threads": 0}, "num_threads must be .*got 0"),
    "longer than the model": (
        {"max_model_len": LONGEST + 1, "multiprocess": False},
        f"{LONGEST + 1:,} exceeds the {LONGEST:,} positions",
    ),
    "model": ({"model": "no/such/place"}, "'no/such/place' not found: looked for"),
    "tokenizer": ({"tokenizer": "./no-such-place"}, "'./no-such-place' not found"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_option_is_named_with_its_range(name: str) -> None:
    options, message = BAD_OPTIONS[name]
    with pytest.raises(EngineStartError, match=message) as caught:
        LLM(**options)
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model that a test may damage."""
    return Path(shutil.copytree(BUNDLED, tmp_path / "model"))


def start_error(model: Path, **options: Any) -> str:
    with pytest.raises(EngineStartError) as caught:
        LLM(str(model), **options)
    assert caught.value.remote_traceback == ""
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_an_unknown_architecture_is_answered_with_the_nearest_that_we_have(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Qwen9ForCausalLM"]}))
    message = start_error(model, multiprocess=False)
    assert "'Qwen9ForCausalLM'" in message
    for known in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "shmllm/models/README.md"):
        assert known in message


@pytest.mark.parametrize("architectures", [[], None, "LlamaForCausalLM", [5]])
def test_no_architecture_is_an_error_that_names_the_file(model: Path, architectures: Any) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"architectures": architectures}))
    message = start_error(model, multiprocess=False)
    assert "architectures" in message
    assert "config.json" in message


@pytest.mark.parametrize("text", ["", "{", "[]", None])
def test_a_missing_or_damaged_config_is_named(model: Path, text: str | None) -> None:
    (model / "config.json").unlink()
    if text is not None:
        (model / "config.json").write_text(text)
    assert str(model / "config.json") in start_error(model, multiprocess=False)


def write_index(model: Path, shard: str) -> None:
    """Write an index that spreads the weights over the existing file and another."""
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    weights = {"model.norm.weight": "model-1.safetensors", "model.embed_tokens.weight": shard}
    index = {"metadata": {}, "weight_map": weights}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_missing_shard_is_named(model: Path) -> None:
    write_index(model, "model-2.safetensors")
    assert str(model / "model-2.safetensors") in start_error(model, multiprocess=False)


@pytest.mark.parametrize("num_bytes", [0, 7, 100, 1_000_000])
def test_a_truncated_shard_is_named(model: Path, num_bytes: int) -> None:
    write_index(model, "model-2.safetensors")
    content = (model / "model-1.safetensors").read_bytes()
    (model / "model-2.safetensors").write_bytes(content[:num_bytes])
    assert str(model / "model-2.safetensors") in start_error(model, multiprocess=False)


def test_no_weights_are_answered_with_what_was_looked_for(model: Path) -> None:
    (model / "model.safetensors").unlink()
    message = start_error(model, multiprocess=False)
    assert str(model) in message
    assert "model.safetensors.index.json" in message


def test_no_tokenizer_is_answered_with_what_was_looked_for(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    message = start_error(model)
    assert f"no tokenizer in {model}" in message
    assert "tokenizer.json" in message


def test_a_damaged_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0"')
    assert str(model / "tokenizer.json") in start_error(model, multiprocess=False)


def test_too_little_memory_for_one_sequence_has_both_numbers(llm: LLM) -> None:
    smallest = 2 * bytes_per_block(llm)
    message = start_error(BUNDLED, kv_cache_memory_bytes=1, multiprocess=False)
    assert "kv_cache_memory_bytes is 1 and" in message
    assert f"{smallest:,}" in message
    with LLM(kv_cache_memory_bytes=smallest, multiprocess=False) as smallest_llm:
        assert smallest_llm.facts.num_blocks == 1


def bytes_per_block(llm: LLM) -> int:
    return llm.facts.kv_cache_bytes // (llm.facts.num_blocks + 1)


def test_a_warning_names_the_reduced_max_model_len(
    llm: LLM, caplog: pytest.LogCaptureFixture, expected: list[int]
) -> None:
    room = 11 * bytes_per_block(llm)
    with caplog.at_level(logging.WARNING), LLM(kv_cache_memory_bytes=room) as small:
        (record,) = [r for r in caplog.records if "max_model_len" in r.getMessage()]
        assert f"max_model_len is 160 instead of {LONGEST:,}" in record.getMessage()
        assert small.facts.max_model_len == 160
        with pytest.raises(RequestError, match="160 tokens; max_model_len is 160"):
            small.generate([5] * 160, GREEDY)
        (longest,) = small.generate([5] * 159, SamplingParams(max_tokens=9), use_tqdm=False)
        assert len(longest.outputs[0].token_ids) == 1
        assert longest.outputs[0].finish_reason in ("length", "stop")
        assert answer(small) == expected
