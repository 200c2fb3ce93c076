"""Embedding vectors and prompts given as embeddings equal transformers', for several settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.one_thread import one_thread
from support.reference_models import EXACT_KINDS, make_model, make_prompts, with_kinds

from shmllm import LLM, AsyncEngineArgs, AsyncLLM, PoolingParams, RequestError, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

TOLERANCE = 1e-5
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# An engine computes the same in the process of the test, where it starts sooner.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"multiprocess": False},
    "token-budget-16": {"multiprocess": False, "max_num_batched_tokens": 16},
    "no-prefix-caching": {"multiprocess": False, "enable_prefix_caching": False},
    "local": {"multiprocess": False, "max_num_seqs": 3},
}


@pytest.fixture(scope="module", params=EXACT_KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    return make_model(request.param, directory), directory


def hidden_states(model: Any, prompt: list[int]) -> torch.Tensor:
    """The hidden states after the final norm, which the LM head reads."""
    return _hidden_states(model, tuple(prompt))


@cache
@one_thread()
@torch.inference_mode()
def _hidden_states(model: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    # Llama 4's class gives a wrong name for its body.
    body = model.model if model.base_model is model else model.base_model
    states: torch.Tensor = body(torch.tensor([prompt])).last_hidden_state[0].double()
    return states


def pooled(states: torch.Tensor, params: PoolingParams) -> torch.Tensor:
    vector = states.mean(0) if params.pooling_type == "MEAN" else states[-1]
    return vector if params.use_activation is False else vector / vector.norm()


def worst(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, relative to the largest component."""
    return float((ours.double() - reference).abs().max() / reference.abs().max())


PARAMS = [
    PoolingParams(),
    PoolingParams(pooling_type="MEAN"),
    PoolingParams(use_activation=False),
    PoolingParams(pooling_type="MEAN", use_activation=False),
]


@pytest.mark.parametrize(("setting", "model"), with_kinds(SETTINGS), indirect=["model"])
def test_vectors_equal_transformers(model: tuple[Any, Path], setting: str) -> None:
    options = SETTINGS[setting]
    with LLM(str(model[1]), **options) as llm:
        check_vectors(llm, model[0], options.get("enable_prefix_caching", True))


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_an_engine_process_equals_transformers(model: tuple[Any, Path]) -> None:
    with LLM(str(model[1])) as llm:
        check_vectors(llm, model[0])
        check_embedded_prompts(llm, model[0])


def check_vectors(llm: LLM, reference: Any, caching: bool = True) -> None:
    prompts = make_prompts(reference.config.vocab_size)
    prompts.append([3 + i % 4000 for i in range(512)])  # as long as the model takes
    params = [PARAMS[i % len(PARAMS)] for i in range(len(prompts))]
    for _ in range(2):  # the second time, the last token's come from the prefix cache
        outputs = llm.encode(prompts, params, use_tqdm=False)
        for output, prompt, own in zip(outputs, prompts, params, strict=True):
            assert output.prompt_token_ids == prompt
            assert output.finished
            assert output.error is None
            wanted = pooled(hidden_states(reference, prompt), own)
            assert worst(output.outputs.data, wanted) < TOLERANCE
    hits = [output.num_cached_tokens > 0 for output in outputs]
    assert hits == [
        caching and own.pooling_type is None and len(prompt) > 16
        for own, prompt in zip(params, prompts, strict=True)
    ]


def test_vectors_and_tokens_of_one_batch_do_not_disturb_each_other(
    model: tuple[Any, Path],
) -> None:
    reference, directory = model
    prompts = make_prompts(reference.config.vocab_size, longest=100)
    with LLM(str(directory), max_num_batched_tokens=64, multiprocess=False) as llm:
        alone = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
        generated = llm.stream(prompts, GREEDY, ordered=True)
        tokens = [next(generated).outputs[0].token_ids]
        vectors = llm.encode(prompts, PoolingParams(pooling_type="MEAN"), use_tqdm=False)
        tokens += [output.outputs[0].token_ids for output in generated]
    assert tokens == alone
    for output, prompt in zip(vectors, prompts, strict=True):
        wanted = pooled(hidden_states(reference, prompt), PoolingParams(pooling_type="MEAN"))
        assert worst(output.outputs.data, wanted) < TOLERANCE


def test_embed_and_score(model: tuple[Any, Path]) -> None:
    reference, directory = model
    pooler = {"pooling_type": "MEAN"}
    with LLM(str(directory), pooler_config=pooler, multiprocess=False) as llm:
        a, b, c = [5, 6, 7], [5, 6, 8, 9], [100] * 20
        embedded = llm.embed([a, b, c], use_tqdm=False)
        vectors = [np.array(output.outputs.embedding) for output in embedded]
        assert [output.outputs.hidden_size for output in embedded] == [64] * 3
        assert [abs(np.linalg.norm(vector) - 1) < 1e-6 for vector in vectors] == [True] * 3
        means = [hidden_states(reference, prompt).mean(0) for prompt in (a, b, c)]
        cosine = torch.nn.functional.cosine_similarity
        one_to_many = llm.score([a], [a, b, c], use_tqdm=False)
        wanted = [float(cosine(means[0], other, dim=0)) for other in means]
        assert [output.outputs.score for output in one_to_many] == pytest.approx(wanted, abs=1e-5)
        pairs = llm.score([a, b], [b, c], use_tqdm=False)
        wanted = [float(cosine(means[i], means[i + 1], dim=0)) for i in range(2)]
        assert [output.outputs.score for output in pairs] == pytest.approx(wanted, abs=1e-5)
        assert pairs[0].prompt_token_ids == a + b


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(kv_cache_memory_bytes=2**26, num_threads=1, max_model_len=64) as llm:
        yield llm


def test_coroutines_get_the_same_vectors_beside_tokens(tiny: LLM) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(5, 25)]

    async def run() -> tuple[list[Any], list[int], list[Any]]:
        options = {"kv_cache_memory_bytes": 2**26, "scheduling_policy": "priority"}
        async with AsyncLLM.from_engine_args(AsyncEngineArgs(**options)) as llm:

            async def embed(prompt: list[int]) -> Any:
                async for output in llm.encode(prompt, request_id=f"e{prompt[0]}"):
                    return output

            async def generate() -> list[int]:
                async for output in llm.generate(prompts[0], GREEDY, priority=1):
                    tokens = output.outputs[0].token_ids
                return tokens

            *vectors, tokens = await asyncio.gather(*map(embed, prompts), generate())
            return vectors, tokens, await llm.collective_rpc("check_health")

    vectors, tokens, healthy = asyncio.run(run())
    assert healthy == [None]
    wanted = tiny.encode(prompts, use_tqdm=False)
    assert tiny.generate(prompts[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == tokens
    assert [vector.request_id for vector in vectors] == [f"e{i}" for i in range(5, 25)]
    for vector, other in zip(vectors, wanted, strict=True):
        assert worst(vector.outputs.data, other.outputs.data.double()) < TOLERANCE


BAD_POOLING: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("",), {}, "empty"),
    (([1] * 65,), {}, "at most 64"),
    (([4096],), {}, "token id 4096"),
    ((["a", "b"], [PoolingParams()]), {}, "2 prompts and 1 pooling_params"),
    ((["a"], ["LAST"]), {}, r"pooling_params\[0\] is a str"),
    ((["a"], "LAST"), {}, "got str"),
    ((["a"], PoolingParams(dimensions=8)), {}, "is_matryoshka"),
    ((["a"],), {"pooling_task": "classify"}, "Classification API is not supported by this model"),
    ((["a"],), {"pooling_task": "score"}, "`score` task was removed"),
    ((["a", "b" * 99],), {"truncate_prompt_tokens": 65}, "from 1 to 64, got 65"),
]


@pytest.mark.parametrize(("args", "options", "message"), BAD_POOLING)
def test_bad_pooling_requests_are_refused_and_the_engine_lives(
    tiny: LLM, args: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        tiny.encode(*args, use_tqdm=False, **options)
    assert tiny.embed([1] * 64, use_tqdm=False)[0].outputs.hidden_size == 256


@pytest.mark.parametrize("pair", [([], ["a"]), (["a"], []), (["a", "b"], ["a"] * 3)])
def test_scores_need_one_or_as_many(tiny: LLM, pair: tuple[Any, Any]) -> None:
    with pytest.raises(RequestError, match="equal length"):
        tiny.score(*pair, use_tqdm=False)


def test_dimensions_of_a_matryoshka_model(tmp_path: Path) -> None:
    reference = make_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [8, 16]}))
    with LLM(str(tmp_path), multiprocess=False) as llm:
        (output,) = llm.encode([3, 4, 5], PoolingParams(dimensions=16), use_tqdm=False)
        states = hidden_states(reference, [3, 4, 5])[-1, :16]
        assert worst(output.outputs.data, states / states.norm()) < TOLERANCE
        with pytest.raises(RequestError, match=r"dimensions \[8, 16\], got 12"):
            llm.encode([3, 4, 5], PoolingParams(dimensions=12), use_tqdm=False)


@one_thread()
@torch.inference_mode()
def reference_tokens(model: Any, embeds: torch.Tensor, max_tokens: int) -> list[int]:
    output = model.generate(
        inputs_embeds=embeds[None],
        attention_mask=torch.ones(1, len(embeds), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0].tolist()


@pytest.mark.parametrize(
    ("setting", "model"),
    with_kinds(["default", "token-budget-16", "local"]),
    indirect=["model"],
)
def test_embedded_prompts_generate_as_transformers_does(
    model: tuple[Any, Path], setting: str
) -> None:
    with LLM(str(model[1]), **SETTINGS[setting]) as llm:
        check_embedded_prompts(llm, model[0])


def check_embedded_prompts(llm: LLM, reference: Any) -> None:
    torch.manual_seed(5)
    embed = reference.get_input_embeddings()  # Gemma's multiplies by its scale
    scale = embed.weight.detach().std()
    soft = [torch.randn(n, 64) * scale for n in (1, 5, 16, 17, 60)]
    ids = [[7, 8, 9] * 12, [11] * 40]
    prompts: list[Any] = [{"prompt_embeds": each} for each in soft]
    embedded = [embed(torch.tensor(each)).detach() for each in ids]
    prompts += [{"prompt_embeds": each} for each in embedded]
    wanted = [reference_tokens(reference, each, 12) for each in (*soft, *embedded)]
    mixed = prompts + ids + [{"prompt_embeds": soft[3][None].numpy()}]
    for _ in range(2):
        outputs = llm.generate(mixed, GREEDY, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
        assert tokens[: len(wanted)] == wanted
        assert tokens[len(wanted) : -1] == wanted[-2:]
        assert tokens[-1] == wanted[3]
    # Equal embeddings share blocks, others with the same placeholders do not.
    assert [output.num_cached_tokens for output in outputs[:5]] == [0, 0, 0, 16, 48]
    (vector,) = llm.encode(prompts[-1], use_tqdm=False)
    expected = pooled(hidden_states(reference, ids[1]), PoolingParams())
    assert worst(vector.outputs.data, expected) < TOLERANCE


BAD_EMBEDS: list[tuple[Any, dict[str, Any], str]] = [
    (torch.ones(3, 5), {}, r"shape \[tokens, 256\], got torch.float32 of shape \[3, 5\]"),
    (torch.ones(256), {}, "shape"),
    (torch.ones(2, 3, 256), {}, "shape"),
    (torch.ones(0, 256), {}, "empty"),
    (torch.ones(64, 256), {}, "at most 63"),
    (torch.ones(3, 256, dtype=torch.int32), {}, "floating"),
    (torch.full((3, 256), float("nan")), {}, "not finite"),
    (torch.full((3, 256), 1e30), {}, "too large"),
    (np.full((3, 256), np.inf, np.float16), {}, "not finite"),
    (torch.ones(3, 256, device="meta"), {}, "without a value in each place"),
    (torch.ones(3, 256).to_sparse(), {}, "without a value in each place"),
    ([[0.0] * 256], {}, "torch tensor or a numpy array, got list"),
    (torch.ones(3, 256), {"prompt_logprobs": 1}, "prompt_logprobs needs token ids"),
    (torch.ones(3, 256), {"repetition_penalty": 1.1}, "repetition_penalty needs token ids"),
]


@pytest.mark.parametrize(("value", "options", "message"), BAD_EMBEDS)
def test_bad_embeddings_are_refused_and_the_engine_lives(
    tiny: LLM, value: Any, options: dict[str, Any], message: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, **options)
    with pytest.raises(RequestError, match=message):
        tiny.generate({"prompt_embeds": value}, params, use_tqdm=False)
    good = {"prompt_embeds": torch.zeros(3, 256, dtype=torch.bfloat16), "prompt": "shown"}
    output = tiny.generate(good, SamplingParams(max_tokens=1), use_tqdm=False)[0]
    assert (output.prompt, output.prompt_token_ids) == ("shown", [0, 0, 0])
    assert output.outputs[0].finish_reason == "length"


def test_a_view_of_an_array_is_what_its_copy_is(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    view = np.random.default_rng(3).normal(0, 0.1, (5, 256)).astype(np.float32)[::-1]
    prompts: list[Any] = [{"prompt_embeds": each} for each in (view, view.copy())]
    first, second = tiny.generate(prompts, params, use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_embeddings_and_tokens_together_are_refused(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="both"):
        tiny.generate({"prompt_embeds": torch.ones(1, 256), "prompt_token_ids": [1]})


def test_many_embedded_prompts_cross_with_several_completions(tiny: LLM) -> None:
    torch.manual_seed(2)
    prompts = [{"prompt_embeds": torch.randn(50, 256)} for _ in range(80)]
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=3)
    outputs = tiny.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [2] * 80
    again = tiny.generate(prompts[::-1], params, use_tqdm=False)
    assert [[c.token_ids for c in output.outputs] for output in again[::-1]] == [
        [c.token_ids for c in output.outputs] for output in outputs
    ]


def test_the_reference_is_what_the_lm_head_reads() -> None:
    """The comparison needs the states after the final norm, not those before it."""
    config = transformers.LlamaConfig(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    states = hidden_states(model, [1, 2, 3]).float()
    with torch.inference_mode():
        torch.testing.assert_close(
            model.lm_head(states), model(torch.tensor([[1, 2, 3]])).logits[0]
        )
