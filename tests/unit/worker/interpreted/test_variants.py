"""An engine compiles all kernel variants before it serves requests, and before it captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conformance.gpu_engine import PROMPTS, SHAPE, VOCAB, Engine, make_config, model
from conformance.gpu_packed import compressed
from conformance.gpu_program import SHAPE as PROGRAM_SHAPE
from conformance.gpu_program import VARIANTS
from support.fake_gpu import FakeGpu
from support.kernel_variants import seen_variants
from support.model_helpers import reference_model, save
from support.variants import slow

from shmllm.config.engine import EngineConfig
from shmllm_kernels.gpu import pair_layout

__all__ = ["model"]

OPTIONS: list[dict[str, Any]] = [
    {"prompt_logprobs": 2, "temperature": 1.0, "top_p": 0.9, "seed": 5, "max_tokens": 2},
    {"logprobs": 1, "repetition_penalty": 1.7, "temperature": 0.7, "top_k": 3},
    {"bad_words": [(0, 1), (2,)], "logit_bias": {7: 30.0}, "frequency_penalty": 2.0},
    {"allowed_token_ids": [3, 50, 60], "logprobs": VOCAB, "temperature": 0.7, "min_p": 0.1},
    {"logprobs": 20, "max_tokens": 2},
]

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
    },
}
"""The second one has a shared expert."""


@pytest.mark.parametrize(
    ("mode", "num_seqs"),
    [
        ("FULL_AND_PIECEWISE", 3),
        *(
            slow(mode, num_seqs)
            for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY")
            for num_seqs in (3, 8)
        ),
    ],
)
def test_nothing_is_compiled_while_serving(
    model: Any, gpu_device: FakeGpu, mode: str, num_seqs: int
) -> None:
    check(make_config(model[1], mode=mode, num_seqs=num_seqs), gpu_device)


@pytest.mark.slow
def test_no_product_with_packed_weights_is_compiled_while_serving(
    gpu_device: FakeGpu, tmp_path: Path
) -> None:
    config = make_config(compressed(tmp_path, **SHAPE), mode="NONE", num_seqs=3, budget=20)
    check(config, gpu_device, [number % 60 for number in range(20)])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("name", MIXTURES)
def test_no_kernel_of_a_mixture_is_compiled_while_serving(
    gpu_device: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, name: str
) -> None:
    """The pairs of steps of more than four tokens have a launch of their own here."""
    monkeypatch.setattr(pair_layout, "MOST_TOKENS", 4)
    made = reference_model(name, 4.0, **SHAPE, **MIXTURES[name], num_experts_per_tok=2)
    config = make_config(save(made, tmp_path), mode=mode, num_seqs=3, budget=20)
    check(config, gpu_device, [number % 60 for number in range(20)])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_no_kernel_of_a_compressed_attention_is_compiled_while_serving(
    gpu_device: FakeGpu, tmp_path: Path, mode: str
) -> None:
    made = reference_model("deepseek_v4", 4.0, **PROGRAM_SHAPE | VARIANTS["deepseek_v4"])
    config = make_config(save(made, tmp_path), mode=mode, num_seqs=3, budget=20, num_blocks=300)
    check(config, gpu_device, [number % 60 for number in range(40)])


def check(config: EngineConfig, gpu_device: FakeGpu, *prompts: list[int]) -> None:
    with seen_variants(lambda: gpu_device.is_capturing) as seen:
        engine = Engine(config, gpu_device)
        assert seen
        assert not any(seen.values()), [variant for variant in seen if seen[variant]]
        before = set(seen)
        for number, options in enumerate(OPTIONS):
            engine.add(number, PROMPTS[number % 2], **options)
        for prompt in prompts:
            engine.add(len(OPTIONS), prompt, **OPTIONS[0])
        engine.run()
        assert not set(seen) - before
