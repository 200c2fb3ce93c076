"""`from vllm import LLM` gives shmllm's LLM, which takes vLLM's options and arguments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import PATIENCE_S, holds_within
from tqdm import tqdm

import shmllm
from shmllm.bench.engine_watch import EngineWatch
from shmllm.compat import vllm as shim
from shmllm.errors import EnginePausedError, EngineStartError, RequestError
from shmllm.outputs.sleep_report import SleepState

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


def test_the_watch_of_examples_samples_it(llm: Any) -> None:
    with EngineWatch(llm, period_s=0.001) as watch:
        assert holds_within(lambda: len(watch.memory) > 2, PATIENCE_S)
    assert watch.asleep == []


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
        llm.generate(tokens, sampling_params=params, use_tqdm=tqdm),
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


def test_every_method_shows_its_progress_by_a_function_of_the_caller(llm: Any) -> None:
    made: list[Any] = []

    def make_bar(**options: Any) -> Any:
        made.append(tqdm(**options, disable=True))
        return made[-1]

    messages = [{"role": "user", "content": "x"}]
    params = shmllm.SamplingParams(max_tokens=1)
    llm.generate(PROMPTS, params, use_tqdm=make_bar)
    llm.chat(messages, params, make_bar)
    llm.embed(PROMPTS, use_tqdm=make_bar)
    llm.score(*PROMPTS, use_tqdm=make_bar)
    llm.score_tokens(PROMPTS, [[5], [6]], use_tqdm=make_bar)
    llm.enqueue(PROMPTS, params, use_tqdm=False)
    llm.wait_for_completion(use_tqdm=make_bar)
    assert [bar.total for bar in made] == [2, 1, 2, 2, 2, 2]


def test_conversations_are_queued(llm: Any) -> None:
    params = shmllm.SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "user", "content": "Sort a list."}]
    options = {"add_generation_prompt": False, "mm_processor_kwargs": {}}
    expected = llm.chat(messages, params, False, **options)
    queued = llm.enqueue_chat([messages] * 2, params, False, **options)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == queued
    assert texts(outputs) == texts(expected) * 2
    assert outputs[0].prompt == expected[0].prompt
    for method in (llm.chat, llm.enqueue_chat):
        with pytest.raises(TypeError, match="bogus"):
            method(messages, params, bogus=1)
        with pytest.raises(RequestError, match="'mm_processor_kwargs' must be a dict"):
            method(messages, params, mm_processor_kwargs=[1])


def test_processor_kwargs_are_those_of_each_prompt(llm: Any) -> None:
    params = shmllm.SamplingParams(temperature=0, max_tokens=4)
    expected = texts(llm.generate(PROMPTS, params, use_tqdm=False))
    for given in ({}, {"max_pixels": 9}):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, mm_processor_kwargs=given)
        assert texts(outputs) == expected
        llm.enqueue(PROMPTS, params, mm_processor_kwargs=given)
        assert texts(llm.wait_for_completion(use_tqdm=False)) == expected
    with pytest.raises(RequestError, match="'mm_processor_kwargs' must be a dict"):
        llm.generate(PROMPTS, params, mm_processor_kwargs=[1])


def test_a_beam_search_takes_its_arguments_by_position(
    llm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    params = shmllm.BeamSearchParams(2, 4)
    (expected,) = shmllm.LLM.beam_search(llm, PROMPTS[0], params)
    (found,) = llm.beam_search(PROMPTS[0], params, None, False, 1, priority=3)
    assert [each.text for each in found.sequences] == [each.text for each in expected.sequences]
    assert "priority has no effect" in caplog.text


def test_unsupported_options_are_refused_before_anything_runs(llm: Any) -> None:
    from vllm import LLM

    with pytest.raises(RequestError, match="lora_request must be a LoRARequest"):
        llm.generate(PROMPTS, lora_request="name")
    with pytest.raises(EngineStartError, match="cpu_offload_gb"):
        LLM("tiny", cpu_offload_gb=1)
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


def test_methods_of_workers_that_are_methods_of_the_engine(llm: Any) -> None:
    (report,) = llm.collective_rpc("sleep", kwargs={"level": 1})
    assert report.asleep
    assert llm.is_sleeping()
    assert llm.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]}) == [False]
    assert llm.collective_rpc("wake_up") == [True]
    assert llm.collective_rpc("list_loras") == [set()]
    assert llm.collective_rpc("check_health") == [None]


def test_keys_and_values_are_released_apart_from_the_weights(llm: Any) -> None:
    greedy = shmllm.SamplingParams(temperature=0, max_tokens=4)
    expected = llm.generate(PROMPTS[0], greedy, use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(RequestError, match=r"needs an engine after sleep\(level=0\)"):
        llm.release_kv_cache_memory()
    llm.sleep(level=0, mode="keep")
    (request,) = llm.enqueue(PROMPTS[0], greedy)
    llm.release_kv_cache_memory()
    assert llm.wake_up(tags=["kv_cache"])
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert (output.request_id, output.outputs[0].token_ids) == (request, expected)


def test_a_release_leaves_the_mode_and_the_weights_as_they_are(llm: Any) -> None:
    llm.sleep(level=0)
    llm.release_kv_cache_memory()
    llm.release_kv_cache_memory()
    assert asleep(llm) == SleepState.SCHEDULING | SleepState.KV_CACHE
    with pytest.raises(EnginePausedError):
        llm.generate(PROMPTS[0], use_tqdm=False)
    assert llm.wake_up()
    for woken in ([], ["kv_cache"]):
        llm.sleep(level=1)
        llm.wake_up(woken)
        llm.release_kv_cache_memory()
        assert asleep(llm) == SleepState.SCHEDULING | SleepState.KV_CACHE | SleepState.WEIGHTS
        assert llm.wake_up()


def test_an_async_engine_releases_keys_and_values() -> None:
    async def main() -> None:
        shim.install()
        from vllm.v1.engine.async_llm import AsyncLLM

        options = {"num_threads": 1, "kv_cache_memory_bytes": 2**24, "multiprocess": False}
        engine = AsyncLLM("tiny", **options)
        try:
            assert not await engine.is_tracing_enabled()
            assert engine.renderer.model_config.max_model_len == engine.model_config.max_model_len
            with pytest.raises(RequestError, match="release_kv_cache_memory needs an engine"):
                await engine.release_kv_cache_memory()
            await engine.sleep(level=0)
            await engine.release_kv_cache_memory()
            await engine.release_kv_cache_memory()
            assert asleep(engine._llm) == SleepState.SCHEDULING | SleepState.KV_CACHE
            assert await engine.wake_up()
        finally:
            engine.shutdown()

    asyncio.run(main())


def asleep(llm: Any) -> SleepState:
    return SleepState(llm._stats()["asleep"])


def test_prompts_are_cut(llm: Any) -> None:
    def tokens(outputs: list[Any]) -> list[int]:
        return list(outputs[0].prompt_token_ids)

    def cut(**kwargs: Any) -> list[int]:
        return tokens(llm.generate(PROMPTS[1], tokenization_kwargs=kwargs, use_tqdm=False))

    whole = llm.get_tokenizer().encode(PROMPTS[1])
    assert tokens(llm.generate(PROMPTS[1], use_tqdm=False)) == whole
    assert cut(truncate_prompt_tokens=2) == whole[-2:]
    assert cut(truncate_prompt_tokens=2, truncation_side="right") == whole[:2]
    assert cut(truncate_prompt_tokens=-1, add_special_tokens=False) == whole
    long = {"prompt_token_ids": [5] * 3000}
    most = llm.model_config.max_model_len
    given = {"truncate_prompt_tokens": -1}
    assert len(tokens(llm.embed(long, tokenization_kwargs=given, use_tqdm=False))) == most
    outputs = llm.embed(PROMPTS[1], tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert tokens(outputs) == whole[:2]
    outputs = llm.encode(
        PROMPTS[1],
        tokenization_kwargs={"truncate_prompt_tokens": 2, "truncation_side": "left"},
        use_tqdm=False,
    )
    assert tokens(outputs) == whole[-2:]
    plain = {"add_special_tokens": False, "truncate_prompt_tokens": 3}
    assert tokens(llm.embed(PROMPTS[1], tokenization_kwargs=plain, use_tqdm=False)) == whole[:3]
    given = {"truncate_prompt_tokens": 1}
    score = llm.score(PROMPTS[1], PROMPTS[1], tokenization_kwargs=given, use_tqdm=False)[0]
    assert score.prompt_token_ids == whole[:1] * 2
    assert score.outputs.score == pytest.approx(1)
    with pytest.raises(RequestError, match="always adds the special tokens"):
        llm.score("a", "b", tokenization_kwargs={"add_special_tokens": False})
    with pytest.raises(RequestError, match=f"a whole number from 1 to {most - 1}") as caught:
        cut(truncate_prompt_tokens=most)
    assert caught.value.parameter == "truncate_prompt_tokens"
    with pytest.raises(TypeError, match="truncate_prompt_tokens"):
        cut(truncate_prompt_token=2)


def test_conversations_are_cut(llm: Any) -> None:
    def tokens(**options: Any) -> list[int]:
        messages = [{"role": "user", "content": PROMPTS[1]}]
        return list(llm.chat(messages, use_tqdm=False, **options)[0].prompt_token_ids)

    given = {"truncate_prompt_tokens": 2}
    assert tokens(tokenization_kwargs=given) == tokens()[-2:]
    assert tokens(tokenization_kwargs=given | {"truncation_side": "right"}) == tokens()[:2]
    with pytest.raises(RequestError, match="a chat template writes the special tokens"):
        tokens(tokenization_kwargs={"add_special_tokens": True})
    with pytest.raises(TypeError, match=r"LLM.chat\(\) got an unknown option 'tool'.* 'tools'"):
        tokens(tool=[])


def test_the_tasks_are_vllms(llm: Any) -> None:
    assert llm.supported_tasks == ("generate", "embed", "token_embed")
    with pytest.raises(ValueError, match="Classification API is not supported by this model"):
        llm.classify(PROMPTS)
    with pytest.raises(ValueError, match="`score` task was removed"):
        llm.encode(PROMPTS, pooling_task="score")


def test_the_renderer_has_what_programs_read(llm: Any) -> None:
    for view in (llm.renderer, llm.input_processor, llm.llm_engine.renderer):
        assert view.tokenizer.encode("a") == llm.get_tokenizer().encode("a")
        assert view.get_tokenizer().name_or_path == view.tokenizer.name_or_path
        assert view.model_config.max_model_len == llm.model_config.max_model_len
        with pytest.raises(AttributeError, match=r"no vllm\.renderers\.render_chat"):
            view.render_chat([])
    config = llm.llm_engine.scheduler_config
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 2048)
    with pytest.raises(RequestError, match=r"profiler_kwargs \['with_stack'\] are not supported"):
        llm.start_profile(profiler_kwargs={"with_stack": True})


def test_a_priority_without_effect_is_a_warning(llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    params = shmllm.SamplingParams(max_tokens=1)
    assert len(llm.generate(PROMPTS, params, priority=[0, 3], use_tqdm=False)) == 2
    assert "priority has no effect" in caplog.text
    with pytest.raises(RequestError, match="2 prompts and 1 priorities"):
        llm.generate(PROMPTS, params, priority=[3])
    caplog.clear()
    assert len(llm.chat([{"role": "user", "content": "x"}], params, priority=1)) == 1
    assert "priority has no effect" in caplog.text
    with pytest.raises(RequestError, match="has no effect"):
        shmllm.LLM.generate(llm, PROMPTS, params, priority=3)


def test_contents_have_the_format_that_the_caller_chose(llm: Any) -> None:
    template = "{{ messages[0].content }}"

    def prompt(content: Any, chosen: str) -> str:
        messages = [{"role": "user", "content": content}]
        outputs = llm.chat(
            messages,
            shmllm.SamplingParams(max_tokens=1),
            chat_template=template,
            chat_template_content_format=chosen,
        )
        return str(outputs[0].prompt)

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt(parts, "auto") == prompt(parts, "string") == "a\nb"
    assert prompt(parts, "openai") == str(parts)
    assert prompt("a", "openai") == str(parts[:1])
    with pytest.raises(RequestError, match="auto, string or openai, got 'other'"):
        prompt("a", "other")


def test_an_engine_is_stepped(llm: Any) -> None:
    from vllm import LLMEngine, SamplingParams

    engine = LLMEngine(llm)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = texts(llm.generate(PROMPTS, params, use_tqdm=False))
    for name, text in zip(("a", "b"), PROMPTS, strict=True):
        assert engine.add_request(name, text, params) == name
    engine.add_request("c", PROMPTS[0], SamplingParams(max_tokens=1000, ignore_eos=True))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", PROMPTS[0], params)
    for prompt, count in ((["x", "y"], 2), ([], 0)):
        with pytest.raises(RequestError, match=f"'d' has {count} prompts: add each by itself"):
            engine.add_request("d", prompt, params)
    assert engine.get_num_unfinished_requests() == 3
    engine.abort_request(["c", "unknown"])
    ended, lengths = {}, []
    deadline = time.monotonic() + PATIENCE_S
    while engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        for output in engine.step():
            lengths.append(len(output.outputs[0].token_ids))
            if output.finished:
                ended[output.request_id] = output.outputs[0].text
    assert ended == dict(zip(("a", "b"), expected, strict=True))
    assert max(lengths) == 8
    assert engine.step() == []
    assert engine.vllm_config.model_config.max_model_len == llm.model_config.max_model_len
    assert {metric.name for metric in engine.get_metrics()} > {"vllm:num_preemptions"}
    with pytest.raises(AttributeError):
        _ = engine.no_such_thing


def test_the_engine_of_an_llm_is_stepped(llm: Any) -> None:
    from vllm import LLMEngine, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = texts(llm.generate(PROMPTS, params, use_tqdm=False))
    assert isinstance(llm.llm_engine, LLMEngine)
    assert (llm.engine_class, llm.runner_type) == (LLMEngine, "generate")
    name = str(next(llm.request_counter))
    assert name != str(next(llm.request_counter))
    llm.llm_engine.add_request(name, PROMPTS[0], params)
    queued = llm.enqueue(PROMPTS[1], params)
    assert llm.llm_engine.get_num_unfinished_requests() == 2
    ended = {}
    deadline = time.monotonic() + PATIENCE_S
    while llm.llm_engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        ended |= {each.request_id: each for each in llm.llm_engine.step() if each.finished}
    assert texts([ended[name]]) == expected[:1]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert ([each.request_id for each in outputs], texts(outputs)) == (queued, expected[1:])
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_an_engine_takes_vllms_arguments_only(llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = llm.llm_engine
    with pytest.raises(TypeError, match="bogus"):
        engine.add_request("a", "x", shmllm.SamplingParams(), bogus=1)
    for given in ({"session_id": "s"}, {"kv_hints": object()}):
        with pytest.raises(RequestError, match="session_id and kv_hints are not supported"):
            engine.add_request("a", "x", shmllm.SamplingParams(), **given)
    assert not engine.has_unfinished_requests()
    assert engine.get_supported_tasks() == ("generate", "embed", "token_embed")
    with caplog.at_level("INFO"):
        engine.do_log_stats()
    assert "vllm:num_preemptions" in caplog.text
