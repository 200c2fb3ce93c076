"""Drafts and structured outputs in engines with several ranks: bits of ranks that do not draft."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.block_heads import BlockHead
from support.determinism import said
from support.draft_heads import EagleHead, FirstEagleHead
from support.further_layers import make, save_both
from support.medusa_heads import MedusaHeads
from support.model_helpers import reference_model, save
from support.reference_models import make_model
from support.variants import slow

from shmllm import LLM, EngineStartError, SamplingParams
from shmllm.params.sampling import StructuredOutputsParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "num_threads": 2,
    "multiprocess": False,
    "kv_cache_memory_bytes": 2**25,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "draft_model": {"model": "tiny"},
}
DRAFTING = {"adaptive": False, "num_speculative_tokens": 4}
SUM = r"[1-9]\d{0,2}( \+ [1-9]\d{0,2}){3,9}"
TEXTS = [
    "def f(a, b):\n    return a + b\n" * 4,
    "1 + 1 + 1 + 1 + ",
    "abc abc abc ab",
    "import os\n",
]


def params_of(number: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=[0, 0, 0.7][number % 3],
        seed=number,
        max_tokens=24,
        logprobs=2,
        prompt_logprobs=1 if number % 4 == 3 else None,
        **options,
    )


def ask(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    return [said(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def stats_of(llm: LLM) -> Any:
    return llm._client._core.scheduler.stats  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("tiny", **RANKS) as llm:
        yield llm


@pytest.mark.parametrize("drafter", ["ngram", "draft_model", slow("suffix")])
def test_drafts_leave_the_bits_of_ranks(drafter: str, plain: LLM) -> None:
    grammar = {"structured_outputs": StructuredOutputsParams(regex=SUM)}
    prompts = [TEXTS[number % len(TEXTS)] for number in range(12)]
    params = [params_of(number, **(grammar if number % 2 else {})) for number in range(12)]
    options = {"max_num_batched_tokens": 40, "speculative_config": DRAFTERS[drafter] | DRAFTING}
    with LLM("tiny", **RANKS, **options) as llm:
        assert ask(llm, prompts, params) == ask(plain, prompts, params)
        assert stats_of(llm).accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", slow("qwen3_next"), slow("deepseek_v3")])
def test_wrong_drafts_leave_states_and_caches_of_all_ranks(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path)
    prompts = [{"prompt_token_ids": [7, 8, 9 + number] * (3 + number)} for number in range(8)]
    params = [params_of(number, ignore_eos=True) for number in range(8)]
    with LLM(str(tmp_path), **RANKS) as llm:
        expected = ask(llm, prompts, params)
    config = DRAFTERS["ngram"] | DRAFTING
    with LLM(str(tmp_path), **RANKS, speculative_config=config) as llm:
        assert ask(llm, prompts, params) == expected
        assert stats_of(llm).draft_tokens > stats_of(llm).accepted_tokens


@pytest.mark.slow
def test_another_model_drafts_for_all_ranks(tmp_path: Path) -> None:
    """It has one head, which no two ranks divide. It is mostly wrong, and is read again after a
    sleep that has lost its weights."""
    make_model("llama", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    shape = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": config["vocab_size"]}
    make_model("qwen3", tmp_path / "draft", **shape)
    prompts = [{"prompt_token_ids": [7, 8, 9 + number] * (3 + number)} for number in range(8)]
    params = [params_of(number, ignore_eos=True) for number in range(8)]
    with LLM(str(tmp_path / "model"), **RANKS) as llm:
        expected = ask(llm, prompts, params)
    drafting = {"model": str(tmp_path / "draft")} | DRAFTING
    with LLM(str(tmp_path / "model"), **RANKS, speculative_config=drafting) as llm:
        assert ask(llm, prompts, params) == expected
        assert stats_of(llm).draft_tokens > stats_of(llm).accepted_tokens
        llm.sleep(2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert ask(llm, prompts, params) == expected


@pytest.mark.parametrize("family", ["deepseek_v3", slow("glm4_moe")])
def test_a_layer_behind_drafts_for_all_ranks(family: str, tmp_path: Path) -> None:
    """Its drafts are those of one process, also in chunks, and behind hits and wrong drafts."""
    save_both(*make(family, max_position_embeddings=256), tmp_path)
    prompts = [{"prompt_token_ids": [7, 8, 9 + number] * (3 + 4 * number)} for number in range(8)]
    params = [params_of(number, ignore_eos=True) for number in range(8)]
    options = {"skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(str(tmp_path), **RANKS, **options) as llm:
        expected = ask(llm, prompts, params)
    options |= {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False},
        "max_num_batched_tokens": 16,
    }
    drafted = []
    for ranks in (RANKS, RANKS | {"tensor_parallel_size": 1}):
        with LLM(str(tmp_path), **ranks, **options) as llm:
            found = [ask(llm, prompts, params) for _ in range(2)]
            if ranks is RANKS:
                assert found == [expected, expected]
            drafted.append((stats_of(llm).draft_tokens, stats_of(llm).accepted_tokens))
    assert drafted[0] == drafted[1]
    assert drafted[0][1] > 0


@pytest.mark.slow
def test_a_head_drafts_for_all_ranks(tmp_path: Path) -> None:
    """It belongs to rank 0, where the hidden states are those of one process."""
    shape = {"num_hidden_layers": 6, "max_position_embeddings": 256}
    reference = reference_model("llama", **shape, num_key_value_heads=2, num_attention_heads=6)
    model = str(save(reference, tmp_path / "model"))
    heads = [
        str(EagleHead(reference).save(tmp_path / "head")),
        str(FirstEagleHead(reference, has_head=True).save(tmp_path / "first")),
        str(BlockHead(reference, num_drafted=50, has_table=True).save(tmp_path / "block")),
        str(MedusaHeads(reference).save(tmp_path / "medusa")),
    ]
    first = str(FirstEagleHead(reference).save(tmp_path / "without a head"))
    borrows = str(EagleHead(reference, has_table=False).save(tmp_path / "without a table"))
    prompts = [{"prompt_token_ids": [7, 8, 9 + number] * (3 + 4 * number)} for number in range(8)]
    params = [params_of(number, ignore_eos=True) for number in range(8)]
    options = {"skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(model, **RANKS, **options) as llm:
        expected = ask(llm, prompts, params)
    for head in heads:
        drafting = {"speculative_config": {"model": head} | DRAFTING, "max_num_batched_tokens": 16}
        with LLM(model, **RANKS, **options, **drafting) as llm:
            assert [ask(llm, prompts, params) for _ in range(2)] == [expected, expected]
            assert stats_of(llm).draft_tokens > 100
    with pytest.raises(EngineStartError, match="no LM head of its own, and of the model's"):
        LLM(model, **RANKS, **options, speculative_config={"model": first})
    with pytest.raises(EngineStartError, match="no embeddings of its own, and of the model's"):
        LLM(model, **RANKS, **options, speculative_config={"model": borrows})
    stages = RANKS | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    with pytest.raises(EngineStartError, match="method 'eagle3' is not possible with pipeline"):
        LLM(model, **stages, **options, speculative_config={"model": heads[0]})


@pytest.mark.parametrize("temperature", [slow(0.0), 1.0])
def test_structured_outputs_match(temperature: float, plain: LLM) -> None:
    grammar = StructuredOutputsParams(regex=SUM)
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=200, structured_outputs=grammar
        )
        for seed in range(8)
    ]
    prompts = [TEXTS[seed % len(TEXTS)] for seed in range(8)]
    for output in plain.generate(prompts, params, use_tqdm=False):
        (found,) = output.outputs
        assert found.finish_reason == "stop"
        assert re.fullmatch(SUM, found.text), found.text


def test_structured_outputs_of_overlapped_steps(plain: LLM) -> None:
    grammar = {"structured_outputs": StructuredOutputsParams(regex=SUM)}
    params = [params_of(number, **grammar) for number in range(8)]
    prompts = [TEXTS[number % len(TEXTS)] for number in range(8)]
    with LLM("tiny", **RANKS, async_scheduling=True) as llm:
        assert ask(llm, prompts, params) == ask(plain, prompts, params)
