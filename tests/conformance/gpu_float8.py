"""The tests of a whole engine with FP8 keys and values on a device: it equals a model of
transformers whose keys and values are rounded in the same way.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.gpu_drafting_models import with_model
from conformance.gpu_drafts import (
    assert_same,
    drafting_config,
    num_drafted,
    run_all,
    without_drafts,
)
from conformance.gpu_engine import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    PROMPTS,
    SCALE,
    SHAPE,
    VOCAB,
    Engine,
    check_sleep_and_new_weights,
    make_config,
    other_model,
)
from conformance.gpu_program import SHAPE as PROGRAM_SHAPE
from conformance.gpu_program import VARIANTS
from conformance.gpu_shared_kv import PROMPT, ask, sharing
from support.model_helpers import reference_model, save
from support.rounded_attention import round_keys_and_values
from support.variants import slow

from shmllm.config.engine import EngineConfig
from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.program import check_model

COUNT = 6
ROUNDING = 1e-4
"""The largest difference of two log-probabilities of the same numbers, computed in float32."""


def with_float8(config: EngineConfig, name: str = "fp8") -> EngineConfig:
    return replace(config, load=replace(config.load, kv_cache_dtype=name))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model whose keys and values are rounded, and its directory."""
    made = reference_model("llama", SCALE, **SHAPE)
    return round_keys_and_values(made), save(made, tmp_path_factory.mktemp("llama"))


@torch.inference_mode()
def logprobs_of(model: Any, tokens: list[int], count: int) -> torch.Tensor:
    """The log-probabilities of transformers for the last tokens, [count, vocab]."""
    logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -count:]
    return logits.log_softmax(-1)


def assert_logprobs(engine: Engine, number: int, model: Any, prompt: list[int]) -> None:
    """The tokens of a request and all of its log-probabilities are those of transformers."""
    found = engine.tokens[number]
    wanted = logprobs_of(model, prompt + found, len(found))
    assert found == wanted.argmax(-1).tolist()
    for (_, _, top_ids, top), row in zip(engine.logprobs[number], wanted, strict=True):
        ours = torch.empty(VOCAB)
        ours[top_ids[-VOCAB:]] = torch.tensor(top[-VOCAB:])
        torch.testing.assert_close(ours, row, atol=ROUNDING, rtol=0.0)


class Float8EngineConformance:
    @pytest.mark.parametrize(
        "mode",
        [
            "FULL_AND_PIECEWISE",
            *map(slow, ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY")),
        ],
    )
    def test_tokens_and_logprobs_are_those_of_rounded_keys_and_values(
        self, model: Any, gpu_device: Device, mode: str
    ) -> None:
        """Prompts in chunks, decodes beside them, and prefix hits of the second half."""
        reference, directory = model
        engine = Engine(with_float8(make_config(directory, mode=mode)), gpu_device)
        prompts = [*PROMPTS, *PROMPTS]
        for begin in (0, len(PROMPTS)):
            for number in range(begin, begin + len(PROMPTS)):
                engine.add(number, prompts[number], max_tokens=COUNT, logprobs=VOCAB)
            engine.run()
        assert engine.core.scheduler.stats.prefix_hit_tokens > 0
        for number, prompt in enumerate(prompts):
            assert_logprobs(engine, number, reference, prompt)

    def test_numbers_that_are_not_rounded_give_other_logprobs(self, model: Any) -> None:
        """What the other tests compare is not what they would find without FP8."""
        reference, _ = model
        plain = reference_model("llama", SCALE, **SHAPE)
        tokens = PROMPTS[0] + [5]
        difference = logprobs_of(reference, tokens, 4) - logprobs_of(plain, tokens, 4)
        assert difference.abs().amax(-1).min() > 30 * ROUNDING

    @pytest.mark.slow
    def test_preemption_and_aborts_change_no_request(self, model: Any, gpu_device: Device) -> None:
        reference, directory = model
        prompts = {0: [5] * 9, 1: [9, 8, 7, 6], 2: [11] * 7, 3: [5] * 9 + [4]}
        config = with_float8(make_config(directory, num_seqs=3))
        cache = replace(config.cache, memory_bytes=5 * BLOCK_BYTES // 4)
        engine = Engine(replace(config, cache=cache), gpu_device)
        for number in range(3):
            engine.add(number, prompts[number], max_tokens=8, logprobs=VOCAB)
        for _ in range(4):
            engine.step()
        engine.core.abort(0, [2])
        engine.add(3, prompts[3], max_tokens=5, logprobs=VOCAB)
        engine.run()
        assert engine.core.scheduler.stats.preemptions > 0
        for number in (0, 1, 3):
            assert_logprobs(engine, number, reference, prompts[number])

    @pytest.mark.parametrize(
        "family", ["deepseek_v3", *map(slow, ("deepseek_v2", "gemma3", "qwen3_5", "gemma4"))]
    )
    def test_other_families(self, gpu_device: Device, family: str, tmp_path: Path) -> None:
        """Latents, windows, layers beside recurrent ones, and layers that read those of others."""
        reference = reference_model(family, SCALE, **PROGRAM_SHAPE | VARIANTS[family])
        directory = save(reference, tmp_path)
        round_keys_and_values(reference)
        config = with_float8(make_config(directory))
        cache = replace(config.cache, memory_bytes=2**21, mamba_block_size=BLOCK_SIZE)
        engine = Engine(replace(config, cache=cache), gpu_device)
        for number, prompt in enumerate(PROMPTS):
            engine.add(number, prompt, logprobs=VOCAB)
        engine.run()
        for number, prompt in enumerate(PROMPTS):
            assert_logprobs(engine, number, reference, prompt)

    @pytest.mark.slow
    def test_a_module_of_transformers(self, model: Any, gpu_device: Device) -> None:
        reference, directory = model
        config = with_float8(make_config(directory))
        config = replace(config, load=replace(config.load, model_impl="transformers"))
        engine = Engine(config, gpu_device)
        engine.add(0, PROMPTS[0], max_tokens=COUNT, logprobs=VOCAB)
        engine.run()
        assert_logprobs(engine, 0, reference, PROMPTS[0])

    @pytest.mark.parametrize("name", ["fp8", slow("fp8_e4m3")])
    def test_the_same_memory_has_four_times_the_blocks_of_float32(
        self, model: Any, gpu_device: Device, name: str
    ) -> None:
        _, directory = model
        config = make_config(directory, mode="NONE")
        infos = [
            Engine(each, gpu_device).runner.info for each in (config, with_float8(config, name))
        ]
        plain, ours = infos
        assert (plain.num_blocks, ours.num_blocks) == (40, 4 * 41 - 1)
        assert ours.kv_cache_bytes == plain.kv_cache_bytes == 41 * BLOCK_BYTES
        assert ours.kv_cache_dtype == "fp8"
        assert ours.precision == "float32 with fp8 keys and values"
        assert not ours.warnings

    @pytest.mark.slow
    def test_sleep_and_new_weights(self, model: Any, gpu_device: Device) -> None:
        reference, directory = model
        engine = Engine(with_float8(make_config(directory, num_seqs=2)), gpu_device)
        other = round_keys_and_values(other_model())
        check_sleep_and_new_weights(engine, reference, other)

    @pytest.mark.slow
    def test_a_model_that_drafts_for_itself_is_always_right(
        self, model: Any, gpu_device: Device
    ) -> None:
        """Its keys and values lie in the same cache, and are rounded, too."""
        _, directory = model
        config = drafting_config(directory, "FULL_AND_PIECEWISE")
        config = with_float8(with_model(config, directory))
        drafting, alone = Engine(config, gpu_device), Engine(without_drafts(config), gpu_device)
        for engine in (drafting, alone):
            run_all(engine, ["greedy", "drawn"])
        assert_same(drafting, alone)
        drafted, accepted = num_drafted(drafting)
        assert drafted == accepted > 0

    @pytest.mark.slow
    def test_engines_share_blocks_of_the_same_dtype_alone(
        self, model: Any, engines: Callable[..., Engine]
    ) -> None:
        _, directory = model
        config = with_float8(make_config(directory, budget=32))
        alone = engines(config)
        computed, _ = ask(alone, 0, PROMPT)
        wanted, hits = ask(alone, 1, PROMPT)
        first = engines(sharing(config))
        assert ask(first, 0, PROMPT) == (computed, 0)
        plain = engines(sharing(make_config(directory, budget=32)))
        unrounded, found = ask(plain, 0, PROMPT)
        assert found == 0
        assert unrounded != computed
        same = with_float8(config, "fp8_e4m3")
        assert ask(engines(sharing(same)), 0, PROMPT) == (wanted, hits)

    def test_a_checkpoint_with_scales_of_its_own_is_warned_about(
        self, model: Any, gpu_device: Device, tmp_path: Path
    ) -> None:
        _, directory = model
        for path in directory.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        fields = json.loads((tmp_path / "config.json").read_text())
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
        method = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
        fields["quantization_config"] = method | {"kv_cache_scheme": scheme}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        config = make_config(tmp_path, mode="NONE")
        (warning,) = Engine(with_float8(config), gpu_device).runner.info.warnings
        assert warning.startswith("the checkpoint's scales of keys and values are not used")
        assert not Engine(config, gpu_device).runner.info.warnings

    def test_what_has_no_kernels_is_refused(self, model: Any) -> None:
        _, directory = model
        load = LoadConfig(str(directory), kv_cache_dtype="int8")
        with pytest.raises(EngineStartError, match=r"'int8' is for the CPU: .* or 'fp8'"):
            check_model(ModelConfig.from_directory(directory), load, "float32")
