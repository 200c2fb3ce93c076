"""What transformers' warpers keep of the logits behind an output's tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shmllm import RequestOutput, SamplingParams


@torch.no_grad()
def assert_masks(model: Any, output: RequestOutput, params: SamplingParams) -> None:
    """Check the masks of all completions of an output against what transformers' warpers keep of
    the logits of its model."""
    warpers = LogitsProcessorList(
        [
            TemperatureLogitsWarper(params.temperature),
            MinPLogitsWarper(params.min_p),
            TopKLogitsWarper(params.top_k),
            TopPLogitsWarper(params.top_p),
        ]
    )
    prompt = list(output.prompt_token_ids)
    for completion in output.outputs:
        token_ids, mask = completion.token_ids, completion.sampling_mask
        assert mask is not None
        ids = torch.tensor([prompt + token_ids])
        warped = warpers(ids, model(ids).logits[0, len(prompt) - 1 : -1])
        kept = [row.isfinite().nonzero()[:, 0].tolist() for row in warped]
        assert mask.token_ids == kept
        assert all(token in each for token, each in zip(token_ids, kept, strict=True))
