"""`from vllm import LLM` gives shmllm's LLM, which takes vLLM's options and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import shmllm
from shmllm.compat import vllm as shim
from shmllm.errors import EngineStartError, RequestError

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

# What clients pass whether or not they want something of it.
OPTIONS = {
    "tokenizer_mode": "auto",
    "trust_remote_code": True,
    "tensor_parallel_size": 1,
    "quantization": None,
    "max_num_seqs": None,
    "revision": None,
    "gpu_memory_utilization": 0.3,
    "max_lora_rank": 16,
    "enable_lora": False,
    "distributed_executor_backend": "external_launcher",
    "dtype": "float",
    "generation_config": "vllm",
}
PROMPTS = ["import os", "def add(a, b):"]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    shim.install()
    from vllm import LLM

    llm = LLM("tiny", num_threads=1, kv_cache_memory_bytes=2**26, **OPTIONS)
    yield llm
    llm.close()
    shim.uninstall()


def texts(outputs: list[shmllm.RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_arguments_as_clients_pass_them(llm: Any) -> None:
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=8)
    expected = texts(shmllm.LLM.generate(llm, PROMPTS, params, use_tqdm=False))
    ids = [output.prompt_token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    tokens = [TokensPrompt(prompt_token_ids=item, multi_modal_data=None) for item in ids]
    for outputs in (
        llm.generate(PROMPTS, params, use_tqdm=False),
        llm.generate(prompts=PROMPTS, sampling_params=[params] * 2, lora_request=None),
        llm.generate(tokens, sampling_params=params, use_tqdm=lambda *a, **k: None),
        llm.generate(tokens, params, use_tqdm=False, priority=None),
    ):
        assert texts(outputs) == expected
        assert all(isinstance(output, shmllm.RequestOutput) for output in outputs)
    assert texts(llm.generate(PROMPTS[0], params, use_tqdm=False)) == expected[:1]
    assert texts(llm.generate(tokens[1], params, use_tqdm=False)) == expected[1:]


def test_chat_takes_its_arguments_by_position(llm: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "user", "content": "Sort a list."}]
    expected = texts(shmllm.LLM.chat(llm, messages, params, use_tqdm=False))
    assert texts(llm.chat(messages, params, False)) == expected
    outputs = llm.chat([messages] * 2, params, False, None, chat_template_content_format="auto")
    assert texts(outputs) == expected * 2


def test_unsupported_options_are_refused_before_anything_runs(llm: Any) -> None:
    from vllm import LLM

    with pytest.raises(RequestError, match="LoRA"):
        llm.generate(PROMPTS, lora_request=object())
    with pytest.raises(EngineStartError, match="tensor_parallel_size"):
        LLM("tiny", tensor_parallel_size=2)
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM("tiny", max_num_sequences=2)


def test_the_tokenizer_and_its_template(llm: Any) -> None:
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer("tiny", tokenizer_mode="auto", trust_remote_code=False)
    assert tokenizer.encode(PROMPTS[0]) == llm.get_tokenizer().encode(PROMPTS[0])
    model_config = llm.llm_engine.model_config
    template = resolve_chat_template(tokenizer, None, None, model_config=model_config)
    assert template == tokenizer.chat_template
    tokenizer.chat_template = None
    assert resolve_chat_template(tokenizer, None, None, model_config=model_config) is None


def test_metrics_are_objects_with_the_names_of_vllm(llm: Any) -> None:
    from vllm.v1.metrics.reader import Counter, Gauge

    before = {metric.name: metric for metric in llm.get_metrics()}
    llm.generate(PROMPTS, shmllm.SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    after = {metric.name: metric for metric in llm.get_metrics()}
    name = "vllm:generation_tokens"
    assert isinstance(after[name], Counter)
    assert after[name].value - before[name].value == 6
    assert isinstance(after["vllm:num_requests_running"], Gauge)
    assert not llm.is_sleeping()
    assert not llm.is_paused()
