"""EngineArgs, and vLLM's options that shmllm does not implement."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from pathlib import Path

import pytest
import torch

from shmllm import LLM, AsyncEngineArgs, EngineArgs, EngineStartError, SamplingParams
from shmllm.engine.worker import METHODS
from shmllm.frontend.options.engine_options import make_engine_config
from shmllm.frontend.options.foreign_options import FOREIGN_NAMES, TRANSLATED, check_foreign_options
from shmllm.frontend.options.foreign_tables import NO_EFFECT, ONLY_VALUES
from shmllm.frontend.options.profiler import ProfilerSettings, read_profiler_config
from shmllm.frontend.options.speculative import SHORT_NAMES

OWN = [
    name for name in inspect.signature(LLM.__init__).parameters if name not in ("self", "options")
]


def test_every_option_of_llm_is_a_field():
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    assert set(names) == {*OWN, *FOREIGN_NAMES}
    assert names[0] == "model"


def test_an_option_is_in_one_table_only():
    assert not set(ONLY_VALUES) & set(NO_EFFECT)
    assert not {*ONLY_VALUES, *NO_EFFECT} & {*OWN, *TRANSLATED}
    assert not {*TRANSLATED} & {*OWN}
    assert len(FOREIGN_NAMES) == len({*FOREIGN_NAMES} - {*OWN})


def test_llm_options_are_the_values_that_differ_from_the_defaults():
    args = EngineArgs("tiny", max_num_seqs=4, seed=0, tensor_parallel_size=1, enforce_eager=True)
    assert args.llm_options() == {"max_num_seqs": 4, "enforce_eager": True}
    assert repr(args) == "EngineArgs(max_num_seqs=4, enforce_eager=True)"
    assert EngineArgs().llm_options() == {}
    assert EngineArgs(model="x").llm_options() == {"model": "x"}


def test_none_means_the_default_if_the_option_cannot_be_none():
    args = EngineArgs(max_num_seqs=None, max_model_len=None, enable_prefix_caching=None)
    assert (args.max_num_seqs, args.max_model_len, args.enable_prefix_caching) == (256, None, True)


def test_engine_args_behave_like_a_dataclass():
    args = EngineArgs(max_num_seqs=4)
    assert dataclasses.asdict(args)["max_num_seqs"] == 4
    assert vars(args)["max_num_seqs"] == 4
    assert args == EngineArgs(max_num_seqs=4) != EngineArgs()
    args.max_num_seqs = 8
    assert args.llm_options() == {"max_num_seqs": 8}
    assert isinstance(AsyncEngineArgs(seed=1), EngineArgs)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(TypeError, match=r"EngineArgs\(\) .*'max_num_seq'.* 'max_num_seqs'"):
        EngineArgs(max_num_seq=4)
    with pytest.raises(TypeError, match=r"AsyncEngineArgs\(\) .*'max_num_seq'"):
        AsyncEngineArgs(max_num_seq=4)


def test_an_llm_makes_json_as_its_structured_outputs_config_says():
    schema = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "type": "object"}
    args = EngineArgs(
        kv_cache_memory_bytes=2**26,
        multiprocess=False,
        structured_outputs_config={
            "disable_any_whitespace": True,
            "disable_additional_properties": True,
        },
    )
    with LLM.from_engine_args(args) as llm:
        blanks = [llm.front_end.tokenizer.encode(text)[0] for text in ("\n", " ", "\n    ")]
        params = SamplingParams(
            temperature=0,
            max_tokens=40,
            structured_outputs={"json": schema},
            logit_bias=dict.fromkeys(blanks, 100.0),
        )
        output = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
        assert output.text in ('{"a":1}', '{"a":2}')


def test_from_engine_args_constructs_an_llm(caplog):
    args = EngineArgs(
        kv_cache_memory_bytes=2**26,
        multiprocess=False,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=1,
        runner="pooling",
        pooler_config={"pooling_type": "MEAN"},
    )
    with LLM.from_engine_args(args) as llm:
        assert llm.pooler_config.pooling_type == "MEAN"
        assert "gpu_memory_utilization=0.5 has no effect on a CPU: kv_cache_mem" in caplog.text
        assert llm.embed([1, 2], use_tqdm=False)[0].outputs.hidden_size == 256


@pytest.mark.parametrize("name", ONLY_VALUES)
def test_an_option_of_only_values_accepts_only_these(name, caplog):
    allowed, reason = ONLY_VALUES[name]
    for value in allowed:
        assert check_foreign_options("LLM", {name: value}) == {}
    assert caplog.text == ""
    for value in (7, "awq", [1]):
        with pytest.raises(EngineStartError, match=rf"{name} can only be .*; got") as caught:
            check_foreign_options("LLM", {name: value})
        assert reason in str(caught.value)


def test_a_value_of_vllm_s_becomes_ours():
    assert check_foreign_options("LLM", {"model_impl": "vllm"}) == {"model_impl": "shmllm"}
    for value in ("auto", "transformers", "terratorch", 1):
        assert check_foreign_options("LLM", {"model_impl": value}) == {"model_impl": value}
    with pytest.raises(EngineStartError, match="'terratorch' is not one of auto, shmllm, transf"):
        LLM("tiny", model_impl="terratorch")


def test_true_is_not_one():
    with pytest.raises(EngineStartError):
        check_foreign_options("LLM", {"decode_context_parallel_size": True})


@pytest.mark.parametrize("name", NO_EFFECT)
def test_an_option_without_effect_is_accepted_with_a_warning(name, caplog):
    default, reason = NO_EFFECT[name]
    assert check_foreign_options("LLM", {name: default}) == {}
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert check_foreign_options("LLM", {name: "something"}) == {}
    assert f"LLM: {name}='something' has no effect: {reason}" in caplog.text


def test_unknown_options_are_returned():
    given = {"gpu_memory_utilisation": 0.9, "swap_space": 4}
    assert check_foreign_options("LLM", given) == {"gpu_memory_utilisation": 0.9}
    with pytest.raises(TypeError, match="'tokeniser'; the nearest option is 'tokenizer'"):
        LLM(tokeniser="x")


def test_profiler_config_gives_the_directory_of_traces(tmp_path):
    assert read_profiler_config(None) == ProfilerSettings()
    given = {"profiler": "torch", "torch_profiler_dir": "x", "delay_iterations": 2}
    assert read_profiler_config(given) == ProfilerSettings("x", 2)
    with pytest.raises(EngineStartError, match=r"max_iterations .* got -1"):
        read_profiler_config({"max_iterations": -1})
    assert read_profiler_config({"torch_profiler_dir": tmp_path}).directory == str(tmp_path)
    for wrong in ({"torch_profiler_dir": 5}, {"max_iterations": True}):
        with pytest.raises(EngineStartError, match=f"{next(iter(wrong))} of profiler_config"):
            read_profiler_config(wrong)
    for wrong in ("x", {"profiler": "cuda"}):
        with pytest.raises(TypeError, match="torch_profiler_dir"):
            read_profiler_config(wrong)
    with pytest.raises(TypeError, match="nearest option is 'torch_profiler_dir'"):
        read_profiler_config({"torch_profile_dir": "x"})


def test_settings_of_profiles_without_effect_are_warnings(caplog):
    read_profiler_config({"torch_profiler_with_stack": False, "torch_profiler_use_gzip": True})
    (record,) = caplog.records
    assert "torch_profiler_with_stack=False, torch_profiler_use_gzip=True has" in record.message


def test_docs_vllm_md_lists_each_option():
    text = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text(encoding="utf-8")
    for name, (allowed, reason) in ONLY_VALUES.items():
        values = " or ".join(f"`{value!r}`" for value in allowed)
        assert f"| `{name}` | {values} | {reason} |\n" in text
    for name, (default, reason) in NO_EFFECT.items():
        assert f"| `{name}` | `{default!r}` | {reason} |\n" in text
    for name in (*OWN, *TRANSLATED, *SHORT_NAMES, *METHODS):
        assert f"`{name}" in text, name


@pytest.mark.parametrize(
    ("given", "meant"),
    [("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16"), ("auto", "auto")],
)
def test_a_dtype_has_several_names(given, meant):
    assert make_engine_config("tiny", dtype=given).load.dtype == meant
