"""Models that draft: what they draft is what transformers predicts, and no output changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cpu_kernels import NEEDS_INT8
from support.determinism import ask, make_requests
from support.drafting import OPTIONS, drafting, record_drafts
from support.further_layers import make, reference_further_logits, save_both
from support.model_helpers import reference_model, save
from support.variants import slow

from shmllm import LLM, EngineStartError, SamplingParams

VOCAB_SIZE = 97
LONG = {"max_position_embeddings": 1024}
PROMPT = [5, 9, 11, 5, 9, 13, 40, 41, 5]


@pytest.mark.parametrize("family", ["deepseek_v3", slow("glm4_moe")])
def test_a_layer_behind_drafts_what_transformers_predicts(family: str, tmp_path: Path) -> None:
    reference, further = make(family)
    directory = str(save_both(reference, further, tmp_path))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT}
    with LLM(directory, **OPTIONS) as llm:
        expected = list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
    with LLM(directory, **drafting(method="mtp"), max_num_batched_tokens=4) as llm:
        found = record_drafts(llm)
        assert list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids) == (
            expected
        )
    tokens = PROMPT + expected
    # Logits at index i are those behind tokens i and i + 1.
    predicted = reference_further_logits(reference, further, tokens).argmax(-1).tolist()
    assert len(found) > 5
    for position, (draft,) in found:
        assert draft == predicted[position - 2], f"at {position}"


def test_outputs_do_not_change_with_a_layer_behind(tmp_path: Path) -> None:
    reference, further = make("deepseek_v3", **LONG)
    directory = str(save_both(reference, further, tmp_path))
    requests = make_requests(VOCAB_SIZE, 24, seed=3)
    with LLM(directory, **OPTIONS) as llm:
        expected = ask(llm, requests)
    for count in (1, 3):
        options = drafting(method="mtp", num_speculative_tokens=count)
        with LLM(directory, **options, max_num_batched_tokens=64) as llm:
            assert ask(llm, requests) == expected
            assert llm._client._core.scheduler.stats.draft_tokens > 100  # type: ignore[attr-defined]


def small_model(directory: Path, **options: Any) -> str:
    save(reference_model("qwen3", **LONG, **options), directory)
    return str(directory)


@pytest.mark.parametrize(("draft_layers", "num_blocks"), [(1, 260), (3, 140)])
def test_outputs_do_not_change_with_a_draft_model(
    tmp_path: Path, draft_layers: int, num_blocks: int
) -> None:
    model = small_model(tmp_path / "model", num_hidden_layers=4)
    draft = small_model(tmp_path / "draft", num_hidden_layers=draft_layers, num_key_value_heads=1)
    requests = make_requests(VOCAB_SIZE, 24, seed=4)
    with LLM(model, **OPTIONS) as llm:
        expected = ask(llm, requests)
    options = drafting(model=draft, num_speculative_tokens=3)
    with LLM(model, **options, max_num_batched_tokens=64) as llm:
        assert ask(llm, requests) == expected
        assert llm._client._core.scheduler.stats.draft_tokens > 100  # type: ignore[attr-defined]
        drafter = llm._client._core.runner._drafter  # type: ignore[attr-defined]
        workspace = drafter._steps._program.buffers
        assert workspace.workspace_bytes > 0
        llm.sleep(level=2)
        assert workspace.workspace_bytes == 0
        llm.wake_up(["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up()
        assert ask(llm, requests) == expected
    with LLM(
        model,
        **options,
        num_gpu_blocks_override=num_blocks,
        scheduler_reserve_full_isl=False,
        max_model_len=720,
    ) as llm:
        assert ask(llm, requests) == expected
        assert llm.get_metrics()["preemptions"] > 0


@NEEDS_INT8
def test_a_draft_model_that_is_not_rounded_needs_no_activations_in_integers(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", num_hidden_layers=2)
    rounded = {"quantization": "int4", "activation_dtype": "int8"}
    with LLM(model, **drafting(model=model), **rounded) as llm:
        assert llm.facts.precision.startswith("int4 with int8 activations")


def test_a_model_that_drafts_for_itself_is_always_right(tmp_path: Path) -> None:
    model = small_model(tmp_path, num_hidden_layers=2)
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1, seed=1, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=2, max_tokens=40),
    ]
    prompts = [{"prompt_token_ids": PROMPT * 4}] * 3
    with LLM(model, **drafting(model=model, num_speculative_tokens=4)) as llm:
        for _ in range(2):  # with an empty prefix cache, and with hits
            llm.generate(prompts, params, use_tqdm=False)
        stats = llm._client._core.scheduler.stats  # type: ignore[attr-defined]
        assert stats.accepted_tokens == stats.draft_tokens > 100
        assert stats.prefix_hit_tokens > 0


def test_models_that_cannot_draft_are_refused(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", num_hidden_layers=2)
    other = small_model(tmp_path / "other", num_hidden_layers=1, vocab_size=98)
    with pytest.raises(EngineStartError, match="has 98 token ids and the model 97: both must"):
        LLM(model, **drafting(model=other))
    with pytest.raises(EngineStartError, match=r"method mtp needs 1 of the layers .* has 0"):
        LLM(model, **drafting(method="mtp"))
