"""The tests of the order in blocks of the KV cache: it changes no bit.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.gpu_program import MIXED, PROMPTS, add_prompts
from support.gpu_steps import GpuSteps
from support.variants import slow

from shmllm.worker.gpu import cache

DRAFTS = {"max_drafts": 3, "max_verified": 3}


class CacheOrderConformance:
    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("qwen2", {"mode": "FULL_AND_PIECEWISE", "sizes": (4,)}),
            *(slow(name, {}) for name in ("deepseek_v3", "gemma3", "gemma4", "gpt_oss")),
            slow("llama", {"dtype": torch.float16, "deterministic": True}),
            slow("llama", {"mode": "FULL_DECODE_ONLY", "decode_kernel": "persistent"}),
        ],
    )
    def test_no_bit_changes(self, gpu_device, models, monkeypatch, name, options) -> None:
        directory, found = models(name)[1], []
        for heads_first in (False, True):
            monkeypatch.setattr(cache, "has_heads_first", lambda *heads, is_so=heads_first: is_so)
            steps = GpuSteps(gpu_device, directory, **{"sizes": (2,), **options, **DRAFTS})
            for _, *parts in steps.cache.layers.values():
                self._check_order(parts, heads_first)
            steps.program.capture()
            add_prompts(steps, PROMPTS)
            found.append([steps.step(work) for work in MIXED])
            found[-1].append(self._verified(steps))
        for one, other in zip(*found, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[row], other[row]) for row in one)

    def _check_order(self, parts: list[torch.Tensor], heads_first: bool) -> None:
        for part in parts:
            _, of_tokens, of_heads, _ = part.stride()
            if part.shape[2] > 1:
                assert (of_heads > of_tokens) == heads_first

    def _verified(self, steps: GpuSteps) -> dict[Any, torch.Tensor]:
        """Return the logits of a step that verifies drafts."""
        step = steps.prepare({1: 1, 2: 1}, drafts={1: [3, 9], 2: [4]})
        return dict(enumerate(steps.run(step)[1]))
