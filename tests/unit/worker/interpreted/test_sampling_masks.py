"""The sampling masks of an engine on the fake GPU are those of transformers' warpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.reference_models import make_model
from support.sampling_masks import assert_masks
from support.variants import slow

from shmllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "return_sampling_mask": True, "logprobs_mode": "processed_logprobs", "dtype": "float32",
    "multiprocess": False, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**22,
    "max_model_len": 64, "max_num_seqs": 2, "enforce_eager": True,
}  # fmt: skip
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}


@pytest.mark.usefixtures("on_fake_gpu")
@pytest.mark.parametrize("options", [{}, slow({"speculative_config": DRAFTS})])
def test_masks_equal_those_of_transformers(
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    model = make_model("llama", tmp_path)
    params = SamplingParams(
        temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, seed=3, max_tokens=5, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": each} for each in ([5, 6, 7], [3, 4, 3, 4, 3])]
    greedy = SamplingParams(temperature=0, max_tokens=3)
    with LLM(str(tmp_path), **OPTIONS, **options) as llm:
        first, second = llm.generate(prompts, [params, greedy], use_tqdm=False)
    assert_masks(model, first, params)
    assert second.outputs[0].sampling_mask is None
