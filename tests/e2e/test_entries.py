"""DeepSeek V4 in an engine: entries of several tokens lie in the KV cache, so that neither chunks,
cached prefixes, preemption nor drafts change a bit. test_hybrid_cache.py has more of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference_models import ReferenceModel, make_model, make_prompts

from shmllm import LLM, EngineStartError, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

BASE: dict[str, Any] = {"dtype": "float32", "multiprocess": False, "max_model_len": 200}
SHORT: dict[str, Any] = {
    **{"max_num_batched_tokens": 13, "num_gpu_blocks_override": 48},
    "scheduler_reserve_full_isl": False,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}
"""Windows end in other steps than they begin in, and two requests are too many for the cache."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    directory: Path = tmp_path_factory.mktemp("deepseek_v4")
    made = make_model("deepseek_v4", directory, vocab_size=512)
    return ReferenceModel(made, directory, make_prompts(512, longest=90)[:10])


def ask(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    return [
        (each.token_ids, [d[t].logprob for d, t in zip(each.logprobs, each.token_ids, strict=True)])
        for each in found
    ]


def test_short_chunks_hits_drafts_and_preemption_change_no_bit(model: ReferenceModel) -> None:
    with LLM(str(model.directory), **BASE) as llm:
        expected = ask(llm, model.prompts)
        model.assert_greedy([tokens for tokens, _ in expected])
        assert ask(llm, model.prompts) == expected
        assert llm.get_metrics()["prefix_hit_tokens"] > 0
        [refused] = llm.generate({"prompt_embeds": torch.zeros(3, 64)}, use_tqdm=False)
        assert str(refused.error).startswith("prompt_embeds are not possible for DeepseekV4")
    with LLM(str(model.directory), **BASE | SHORT) as llm:
        assert ask(llm, model.prompts) == expected
        assert llm.get_metrics()["preemptions"] > 0


def test_a_cache_of_entries_is_not_rounded_to_8_bits(model: ReferenceModel) -> None:
    message = "kv_cache_dtype='int8' is not possible for DeepseekV4.*entries of several tokens"
    with pytest.raises(EngineStartError, match=message):
        LLM(str(model.directory), kv_cache_dtype="int8", **BASE)
