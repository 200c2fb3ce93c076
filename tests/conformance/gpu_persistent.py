"""The tests of models all of whose layers are one launch, on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conformance.gpu_engine import PROMPTS as ENGINE_PROMPTS
from conformance.gpu_engine import SHAPE as ENGINE_SHAPE
from conformance.gpu_engine import (
    Engine,
    check_sleep_and_new_weights,
    expected,
    make_config,
    other_model,
)
from conformance.gpu_program import (
    PROMPTS,
    SCALE,
    add_prompts,
    assert_equals_transformers,
    assert_replay_equals_launch,
)
from support.gpu_steps import GpuSteps
from support.model_helpers import reference_model, save
from support.variants import slow

from shmllm.config.graphs import CudaGraphMode

FULL, NONE = CudaGraphMode.FULL, CudaGraphMode.NONE
OTHERS = ("gemma2", "glm4", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
NAMES = ("gemma3", *map(slow, OTHERS))
"""With norms behind blocks and of heads; biases; layers that rotate nothing; caps; factors of sums;
windows; heads of which a part is rotated; and cache groups."""


class PersistentConformance:
    @pytest.mark.parametrize("name", NAMES)
    def test_decodes_and_drafts_equal_transformers(self, gpu_device, models, name) -> None:
        """A replay has the bits of a launch. Prompts have launches of their own."""
        reference, directory = models(name)
        sizes = {"max_drafts": 4, "max_verified": 5, "decode_kernel": "persistent"}
        steps = GpuSteps(gpu_device, directory, "FULL_DECODE_ONLY", (4, 8), **sizes)
        steps.program.capture()
        add_prompts(steps, PROMPTS)
        for work, mode in (
            ({0: 15, 1: 3, 2: 3, 3: 1}, NONE),
            ({0: 1, 1: 1, 2: 1, 3: 1}, FULL),
            ({3: 1, 1: 1}, FULL),
        ):
            step = steps.prepare(work)
            assert step.mode is mode
            for row, logits in assert_replay_equals_launch(steps, step).items():
                assert_equals_transformers(logits, reference, steps.tokens[row][:-1])
        drafts = {3: [7, 7, 90], 1: [60]}
        step = steps.prepare({1: 1, 3: 1}, drafts=drafts)
        assert step.mode is FULL
        known = {row: list(tokens) for row, tokens in steps.tokens.items()}
        logits = iter(steps.run(step)[1])
        for row in (1, 3):
            for count in range(len(drafts[row]) + 1):
                tokens = known[row] + drafts[row][:count]
                assert_equals_transformers(next(logits), reference, tokens)

    @pytest.mark.slow
    def test_an_engine_preempts_sleeps_and_gets_new_weights(
        self, gpu_device, tmp_path: Path
    ) -> None:
        reference = reference_model("llama", SCALE, **ENGINE_SHAPE)
        config = make_config(save(reference, tmp_path), mode="FULL_DECODE_ONLY", num_blocks=4)
        config = replace(config, load=replace(config.load, decode_kernel="persistent"))
        engine = Engine(config, gpu_device)
        for number, prompt in enumerate(ENGINE_PROMPTS):
            engine.add(number, prompt, max_tokens=12)
        engine.run()
        assert engine.core.scheduler.stats.preemptions > 0
        for number, prompt in enumerate(ENGINE_PROMPTS):
            assert engine.tokens[number] == expected(reference, prompt, 12)
        engine.tokens.clear()
        check_sleep_and_new_weights(engine, reference, other_model())

    @pytest.mark.slow
    def test_a_decode_has_the_same_bits_beside_others(self, gpu_device, models) -> None:
        """The padded sizes are the same."""
        steps = GpuSteps(
            gpu_device, models("llama")[1], "FULL_DECODE_ONLY", (4,), decode_kernel="persistent"
        )
        steps.program.capture()
        add_prompts(steps, {0: 42, 1: 2})
        for row, length in ((0, 41), (1, 1)):
            steps.invent_context(row, length)
        alone = steps.run(steps.prepare({0: 1}))[0].clone()
        step = steps.prepare({0: 1, 1: 1})
        assert (alone[0] == steps.run(step)[0][0]).all()
