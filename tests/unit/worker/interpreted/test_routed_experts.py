"""The experts that an engine on the fake GPU reports are those that transformers chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reference_models import make_model
from support.router_hooks import chosen_experts
from support.variants import slow

from shmllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "enable_return_routed_experts": True, "dtype": "float32", "multiprocess": False,
    "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**22, "max_model_len": 64,
    "max_num_batched_tokens": 16, "max_num_seqs": 2,
}  # fmt: skip
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2]}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}


@pytest.mark.usefixtures("on_fake_gpu")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3_moe", {"compilation_config": GRAPHS}),
        slow("qwen3_moe", {"enforce_eager": True}),
        slow("qwen3_moe", {"speculative_config": DRAFTS, "enforce_eager": True}),
        slow("deepseek_v3", {"compilation_config": GRAPHS}),
    ],
)
def test_experts_equal_those_of_transformers(
    kind: str,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """With a prompt of two chunks, and one that the prefix cache has a block of."""
    model = make_model(kind, tmp_path, num_hidden_layers=2)
    prompts = [list(range(1, 21)), [*range(1, 17), 3, 4, 3, 4, 3]]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(str(tmp_path), **OPTIONS, **options) as llm:
        for prompt in prompts:
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            experts = output.outputs[0].routed_experts
            tokens = [*prompt, *output.outputs[0].token_ids[:-1]]
            assert np.array_equal(np.sort(experts, -1), chosen_experts(model, tokens, 2, 4))
        assert output.num_cached_tokens == 16
