"""What engines and transformers' models say of given tokens."""

from __future__ import annotations

from typing import Any

import torch
from support.one_thread import one_thread

from shmllm import RequestOutput, SamplingParams

SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0)


def scores_of(output: RequestOutput) -> list[float]:
    """The numbers of the tokens of a prompt that was generated with SCORED, but for the first one:
    log-probabilities, or logits with logprobs_mode "raw_logits"."""
    assert output.prompt_logprobs is not None
    return [
        entry[token].logprob
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry is not None
    ]


@one_thread()
@torch.inference_mode()
def choices(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """transformers' greedy choice after each token of a continuation."""
    logits = model(torch.tensor([prompt + tokens])).logits[0]
    found: list[int] = logits[len(prompt) - 1 : -1].argmax(dim=1).tolist()
    return found
