"""Drafted tokens in a whole engine on the fake GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.gpu_drafts import (
    MIXED,
    RIGHT,
    DraftsConformance,
    ScriptedDrafter,
    directory,
    draft_with,
    drafting_config,
)
from conformance.gpu_engine import PROMPTS, Engine, launches_of_a_step
from support.fake_gpu import FakeGpu
from support.kernel_variants import seen_variants
from support.variants import slow

__all__ = ["directory"]


class TestDrafts(DraftsConformance):
    @pytest.mark.slow
    def test_a_step_that_verifies_drafts_is_a_few_launches(
        self, directory: Path, gpu_device: FakeGpu
    ) -> None:
        engine = Engine(drafting_config(directory, "FULL_AND_PIECEWISE", sizes=(24,)), gpu_device)
        draft_with(engine, ScriptedDrafter({0: [1] * 40, 1: [2] * 40}, RIGHT))
        for number in (0, 1):
            engine.add(number, PROMPTS[1], temperature=0.7, seed=number, max_tokens=9)
        engine.step()
        assert launches_of_a_step(engine, gpu_device) == [
            "copy ahead",
            "_unpack_step",
            "aten::index_select",  # the block tables, since the steps are not alike
            *("graph", "graph"),  # of the model and of sampling
            "copy",
        ]
        assert engine.core.scheduler.stats.draft_tokens == 8

    @pytest.mark.parametrize("mode", [slow("NONE"), slow("FULL"), slow("FULL_AND_PIECEWISE")])
    def test_nothing_is_compiled_while_drafts_are_verified(
        self, directory: Path, gpu_device: FakeGpu, mode: str
    ) -> None:
        with seen_variants(lambda: gpu_device.is_capturing) as seen:
            engine = Engine(drafting_config(directory, mode), gpu_device)
            assert not any(seen.values())
            before = set(seen)
            draft_with(
                engine, ScriptedDrafter({number: [3, 50] * 20 for number in range(3)}, MIXED)
            )
            allowed = {"allowed_token_ids": [3, 50], "max_tokens": 9}
            engine.add(0, PROMPTS[0], presence_penalty=1.0, **allowed)
            engine.add(1, PROMPTS[1], temperature=1.0, top_p=0.9, logprobs=2, **allowed)
            engine.add(2, PROMPTS[2], temperature=1.0, frequency_penalty=1.0, **allowed)
            engine.run()
            assert engine.core.scheduler.stats.accepted_tokens
            assert not set(seen) - before
