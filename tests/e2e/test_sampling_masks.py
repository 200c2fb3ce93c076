"""`return_sampling_mask`: each token was drawn among those that transformers' warpers keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.sampling_masks import assert_masks
from support.variants import slow
from transformers import AutoModelForCausalLM

import shmllm
from shmllm import LLM, RequestError, SamplingParams
from shmllm.params.sampling import RequestOutputKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

TINY = Path(shmllm.__file__).parent / "assets" / "tiny"
PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return",
    "import os\nimport sys\n",
    "class Reader:\n    def __init__(self",
]
LOCAL: dict[str, Any] = {
    "return_sampling_mask": True, "logprobs_mode": "processed_logprobs", "dtype": "float32",
    "multiprocess": False, "kv_cache_memory_bytes": 2**25, "max_model_len": 256, "num_threads": 1,
}  # fmt: skip
WARM: Any = {"temperature": 0.9, "top_k": 12, "top_p": 0.85, "min_p": 0.02}
# fmt: off
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 16, "block_size": 8},
    "preempting": {
        "num_gpu_blocks_override": 12, "scheduler_reserve_full_isl": False,
        "max_num_batched_tokens": 32, "max_model_len": 96, "block_size": 8,
    },
    "drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    },
    "overlapped-steps": {"async_scheduling": True},
    "in-a-process": {"multiprocess": True},
    "a-pool": {"multiprocess": True, "data_parallel_size": 2, "num_threads": 2},
    "prompts-and-tokens-apart": {
        "multiprocess": True, "data_parallel_size": 2, "prefill_engines": 1, "num_threads": 2,
        "shared_kv_cache_bytes": 2**24,
    },
    "two-stages": {"multiprocess": True, "pipeline_parallel_size": 2, "num_threads": 2},
}
# fmt: on


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "setting", [*list(SETTINGS)[:3], *(slow(each) for each in list(SETTINGS)[3:])]
)
def test_the_masks_are_those_of_transformers(model: Any, setting: str) -> None:
    params = SamplingParams(**WARM, seed=4, max_tokens=24, ignore_eos=True, logprobs=12)
    with LLM("tiny", **LOCAL | SETTINGS[setting]) as llm:
        for _ in range(2):  # the second time with hits in the prefix cache
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            for output in outputs:
                assert_masks(model, output, params)
        metrics = [each.metrics for each in outputs if each.metrics is not None]
        if setting == "preempting":
            assert sum(each.num_preemptions for each in metrics)
        if setting == "drafts":
            assert sum(each.num_accepted_tokens or 0 for each in metrics)
    for output in outputs:
        (completion,) = output.outputs
        for kept, entry in zip(
            completion.sampling_mask.token_ids, completion.logprobs, strict=True
        ):
            assert {token for token, each in entry.items() if each.logprob > -1e30} == set(kept)


def test_completions_stop_strings_streams_and_greedy_requests(model: Any) -> None:
    whole: Any = WARM | {"seed": 4, "max_tokens": 24, "ignore_eos": True}
    drafting, warm = SETTINGS["drafts"], SamplingParams(**whole)
    with LLM("tiny", **LOCAL, **drafting) as llm:
        (several,) = llm.generate(PROMPTS[:1], SamplingParams(n=3, **whole), use_tqdm=False)
        assert_masks(model, several, warm)
        (alone,) = llm.generate(PROMPTS[:1], SamplingParams(**whole), use_tqdm=False)
        text, mask = alone.outputs[0].text, alone.outputs[0].sampling_mask
        assert mask is not None
        stop = SamplingParams(**whole, stop=[text[6:9]])
        (stopped,) = llm.generate(PROMPTS[:1], stop, use_tqdm=False)
        assert stopped.outputs[0].finish_reason == "stop"
        assert_masks(model, stopped, warm)

        delta = SamplingParams(**whole, output_kind=RequestOutputKind.DELTA)
        parts = [each.outputs[0] for each in llm.stream(PROMPTS[:1], delta)]
        assert len(parts) > 3
        assert all(each.sampling_mask is not None for each in parts)
        joined = [kept for each in parts for kept in each.sampling_mask.token_ids]
        assert joined == mask.token_ids
        cumulative = SamplingParams(**whole, output_kind=RequestOutputKind.CUMULATIVE)
        *before, last = [each.outputs[0] for each in llm.stream(PROMPTS[:1], cumulative)]
        assert all(each.sampling_mask is None for each in before)
        assert last.sampling_mask == mask

        greedy = SamplingParams(temperature=0, max_tokens=4)
        mixed = llm.generate(PROMPTS[:2], [greedy, SamplingParams(**whole)], use_tqdm=False)
        assert mixed[0].outputs[0].sampling_mask is None
        assert_masks(model, mixed[1], warm)
        only = SamplingParams(**whole | {"max_tokens": 3}, allowed_token_ids=[10, 300, 301])
        (limited,) = llm.generate(PROMPTS[:1], only, use_tqdm=False)
        assert {token for each in limited.outputs[0].sampling_mask.token_ids for token in each} <= {
            10,
            300,
            301,
        }
        with pytest.raises(RequestError, match="needs a top_k above 0"):
            llm.generate(PROMPTS[:1], SamplingParams(temperature=1), use_tqdm=False)


def test_nobody_gets_masks_without_the_option() -> None:
    options = LOCAL | {"return_sampling_mask": False}
    with LLM("tiny", **options) as llm:
        (output,) = llm.generate(PROMPTS[:1], SamplingParams(**WARM, max_tokens=2), use_tqdm=False)
    assert output.outputs[0].sampling_mask is None
