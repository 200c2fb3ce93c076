"""`enable_return_routed_experts`: the experts of each token are those that the routers of
transformers choose, whatever an engine does to get them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reference_models import make_model
from support.router_hooks import chosen_experts
from support.variants import slow

from shmllm import (
    LLM,
    AsyncLLM,
    EngineStartError,
    PromptChunk,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from shmllm.params.sampling import RequestOutputKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [1]},  # a layer without experts between others
    "deepseek_v3": {},
    "gpt_oss": {},
    "qwen3_next": {},
    "granite_moe_hybrid": {},
    "mixtral": {},
    "glm4_moe": {},
}
LOCAL: dict[str, Any] = {
    "enable_return_routed_experts": True, "dtype": "float32", "multiprocess": False,
    "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**25, "max_model_len": 128,
    "mamba_block_size": 16,
    "num_threads": 1,
}  # fmt: skip
# fmt: off
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "short-chunks": {"max_num_batched_tokens": 24, "block_size": 8},
    "preempting": {
        "num_gpu_blocks_override": 14,
        "scheduler_reserve_full_isl": False,
        "max_num_batched_tokens": 40,
        "max_model_len": 96,
    },
    "without-a-prefix-cache": {"enable_prefix_caching": False},
    "drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    },
    "overlapped-steps": {"async_scheduling": True},
    "in-a-process": {"multiprocess": True},
    "two-ranks": {"multiprocess": True, "num_threads": 2, "tensor_parallel_size": 2},
}
# fmt: on
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Reference:
    """A model of transformers, its directory, and what its routers choose."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.directory = str(directory)
        self.model = make_model(kind, directory, **MODELS[kind])
        config = self.model.config
        self.num_layers = config.num_hidden_layers
        self.has_several_groups = kind == "gpt_oss"
        self.has_states = kind in ("qwen3_next", "granite_moe_hybrid")
        names = "num_experts_per_tok", "num_experts_per_token"
        self.top_k = next(getattr(config, each) for each in names if hasattr(config, each))
        choose = np.random.default_rng(5)
        prompts = [choose.integers(1, 4000, size).tolist() for size in (1, 17, 40, 40, 70)]
        prompts[3][:32] = prompts[2][:32]  # two blocks that the prefix cache finds
        prompts[4] = prompts[4][:10] * 7  # which drafts are found in
        self.prompts: list[list[int]] = prompts

    def experts(self, token_ids: list[int]) -> Any:
        return chosen_experts(self.model, token_ids, self.num_layers, self.top_k)

    def assert_right(self, output: RequestOutput) -> None:
        """Check the experts of the tokens of a prompt and of all its completions."""
        for completion in output.outputs:
            tokens = [*output.prompt_token_ids, *completion.token_ids[:-1]]
            experts = completion.routed_experts
            assert experts.dtype == np.uint8
            assert np.array_equal(np.sort(experts, -1), self.experts(tokens))


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


def as_tokens(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": each} for each in prompts]


QUICK = [("qwen3_moe", each) for each in ("short-chunks", "preempting", "drafts")]
EVERY = [(model, setting) for model in MODELS for setting in SETTINGS]


@pytest.mark.parametrize(
    ("reference", "setting"),
    [*QUICK, *(slow(*each) for each in EVERY if each not in QUICK)],
    indirect=["reference"],
)
def test_the_experts_are_those_of_transformers(reference: Reference, setting: str) -> None:
    options = LOCAL | SETTINGS[setting]
    if setting == "preempting" and reference.has_several_groups:
        options["num_gpu_blocks_override"] *= 2
    with LLM(reference.directory, **options) as llm:
        for _ in range(2):  # the second time with hits in the prefix cache
            outputs = llm.generate(as_tokens(reference.prompts), PARAMS, use_tqdm=False)
            for output in outputs:
                reference.assert_right(output)
        if setting == "preempting" and not reference.has_states:
            assert sum(each.metrics.num_preemptions for each in outputs if each.metrics)
        if setting == "drafts" and not reference.has_states:
            accepted = sum(
                each.metrics.num_accepted_tokens or 0 for each in outputs if each.metrics
            )
            assert accepted
        if setting not in ("without-a-prefix-cache", "preempting"):
            assert any(each.num_cached_tokens for each in outputs)


quick_model = pytest.mark.parametrize("reference", ["qwen3_moe"], indirect=True)


@quick_model
def test_completions_stop_strings_streams_sleep_and_a_later_start(reference: Reference) -> None:
    prompt = as_tokens(reference.prompts[1:2])
    options = LOCAL | {"skip_tokenizer_init": False}
    with LLM(reference.directory, **options) as llm:
        several = SamplingParams(n=3, temperature=1.0, seed=2, max_tokens=9, ignore_eos=True)
        (output,) = llm.generate(prompt, several, use_tqdm=False)
        assert len({tuple(each.token_ids) for each in output.outputs}) == 3
        reference.assert_right(output)

        (whole,) = llm.generate(prompt, PARAMS, use_tqdm=False)
        stop = SamplingParams(temperature=0, max_tokens=20, stop=[whole.outputs[0].text[8:12]])
        (output,) = llm.generate(prompt, stop, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        reference.assert_right(output)

        *before, last = llm.stream(
            prompt, SamplingParams(temperature=0, max_tokens=6, output_kind=RequestOutputKind.DELTA)
        )
        assert all(each.outputs[0].routed_experts is None for each in before)
        experts = last.outputs[0].routed_experts
        assert np.array_equal(experts, whole.outputs[0].routed_experts[: len(experts)])
        assert len(experts) == len(reference.prompts[1]) + 5

        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            if level == 2:
                llm.collective_rpc("reload_weights")
            (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
            reference.assert_right(output)

        start = len(reference.prompts[1])
        later = SamplingParams(temperature=0, max_tokens=20, routed_experts_prompt_start=start)
        (output,) = llm.generate(prompt, later, use_tqdm=False)
        of_output = whole.outputs[0].routed_experts[start:]
        assert np.array_equal(output.outputs[0].routed_experts, of_output)
        later.routed_experts_prompt_start = start + 1
        with pytest.raises(RequestError, match="fewer than routed_experts_prompt_start 18"):
            llm.generate(prompt, later, use_tqdm=False)


@quick_model
def test_an_aborted_request_has_the_experts_of_its_tokens(reference: Reference) -> None:
    async def run() -> RequestOutput:
        engine = AsyncLLM(reference.directory, **LOCAL | {"max_model_len": 512})
        try:
            params = SamplingParams(temperature=0, max_tokens=490, ignore_eos=True)
            prompt = {"prompt_token_ids": reference.prompts[1]}
            aborts = []
            async for output in engine.generate(prompt, params, "one"):
                if not aborts and len(output.outputs[0].token_ids) >= 5:
                    aborts.append(asyncio.ensure_future(engine.abort("one")))
            return output
        finally:
            engine.shutdown()

    output = asyncio.run(run())
    assert output.outputs[0].finish_reason == "abort"
    reference.assert_right(output)


@quick_model
def test_places_of_a_chunk_are_those_of_the_whole_prompt(reference: Reference) -> None:
    first, table = reference.prompts[1], [[3, 4], [5, -1]]
    whole: Any = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}

    async def chunks() -> AsyncIterator[Any]:
        yield PromptChunk({"prompt_token_ids": first})
        start = len(first) + 1
        own: Any = {"prompt_logprob_token_ids": table, "prompt_logprob_start": start}
        params = SamplingParams(**whole, **own, routed_experts_prompt_start=start)
        yield PromptChunk({"prompt_token_ids": [7, 8]}, params)

    async def run() -> list[RequestOutput]:
        async with AsyncLLM(reference.directory, **LOCAL) as engine:
            outputs = [each async for each in engine.generate(chunks(), SamplingParams(**whole))]
        return [each for each in outputs if each.outputs[0].finish_reason is not None]

    _, last = asyncio.run(run())
    prompt = last.prompt_token_ids
    assert prompt[len(first) + 2 :] == [7, 8]
    tokens = [*prompt, *last.outputs[0].token_ids[:-1]]
    wanted = reference.experts(tokens)[len(first) + 1 :]
    assert np.array_equal(np.sort(last.outputs[0].routed_experts, -1), wanted)
    assert last.prompt_token_id_logprobs.shape == (2, 2)


def test_embeddings_beside_experts(tmp_path: Path) -> None:
    """Both arrive in pieces, and an embedding's bytes are those of no number of tokens."""
    make_model("qwen3_moe", tmp_path)
    prompt = {"prompt_token_ids": list(range(1, 18))}
    with LLM(str(tmp_path), **LOCAL) as llm:
        (expected,) = llm.embed(prompt, use_tqdm=False)

    async def run() -> Any:
        async with AsyncLLM(str(tmp_path), **LOCAL) as engine:
            return [each async for each in engine.encode(prompt, pooling_task="embed")]

    (found,) = asyncio.run(run())
    assert np.array_equal(found.outputs.data, expected.outputs.embedding)


def test_more_than_256_experts_need_two_bytes(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path, num_experts=300, num_hidden_layers=2)
    prompt = list(range(1, 60))
    with LLM(str(tmp_path), **LOCAL) as llm:
        (output,) = llm.generate(as_tokens([prompt]), PARAMS, use_tqdm=False)
    experts = output.outputs[0].routed_experts
    assert experts.dtype == np.uint16
    assert experts.max() > 255
    tokens = prompt + output.outputs[0].token_ids[:-1]
    assert np.array_equal(np.sort(experts, -1), chosen_experts(model, tokens, 2, 4))


@quick_model
def test_nobody_gets_experts_without_the_option(reference: Reference) -> None:
    with LLM(reference.directory, **LOCAL | {"enable_return_routed_experts": False}) as llm:
        (output,) = llm.generate(as_tokens([[1, 2]]), PARAMS, use_tqdm=False)
    assert output.outputs[0].routed_experts is None


@quick_model
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_impl": "transformers"}, "is not possible with model_impl='transformers'"),
        ({"pipeline_parallel_size": 2}, "is not possible with pipeline_parallel_size"),
        ({"shared_kv_cache_bytes": 2**24}, "is not possible with shared_kv_cache_bytes"),
    ],
)
def test_options_that_exclude_it(
    reference: Reference, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineStartError, match=f"enable_return_routed_experts {message}"):
        LLM(reference.directory, **LOCAL | options)


def test_models_that_cannot_report_experts(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="which has no experts: leave it out"):
        LLM("tiny", **LOCAL)
    make_model("mixtral", tmp_path, sliding_window=16)
    with pytest.raises(EngineStartError, match="pass disable_hybrid_kv_cache_manager=True"):
        LLM(str(tmp_path), **LOCAL)
    with LLM(str(tmp_path), **LOCAL, disable_hybrid_kv_cache_manager=True) as llm:
        (output,) = llm.generate(as_tokens([[1] * 40]), PARAMS, use_tqdm=False)
    assert output.outputs[0].routed_experts.shape == (59, 3, 2)
