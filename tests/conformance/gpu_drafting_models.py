"""The tests of models that draft in a whole engine on a device: outputs are those of an engine
without drafts, a model that drafts for itself is always right, and a further layer drafts what it
drafts on a CPU.

Each folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance.gpu_drafts import (
    COUNT,
    REQUESTS,
    add,
    assert_same,
    drafting_config,
    num_drafted,
    run_all,
    without_drafts,
)
from conformance.gpu_engine import PROMPTS, SCALE, SHAPE, Engine
from conformance.gpu_program import SHAPE as PROGRAM_SHAPE
from conformance.gpu_program import VARIANTS
from support.further_layers import make, save_both
from support.model_helpers import reference_model, save
from support.variants import slow

from shmllm.config.engine import EngineConfig
from shmllm.config.speculative import SpeculativeConfig
from shmllm.core.plan import StepPlan
from shmllm.wire.messages import Method
from shmllm.worker.gpu.device import Device

FOUND_BY_SAMPLING = ["greedy", "drawn", "filtered"]
"""The requests whose tokens follow from logits, parameters and noise alone, as drafts do."""
SOME = ["greedy", "drawn with penalties", "filtered", "few tokens, repeated", "drawn by a grammar"]
ALL = list(REQUESTS)
DRAFTED = 3


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with smaller heads, which is mostly wrong."""
    shape = SHAPE | {"num_hidden_layers": 1, "hidden_size": 16, "head_dim": 8}
    return save(reference_model("qwen3", SCALE, **shape), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer behind it that predicts a further token."""
    return save_both(*make("deepseek_v3"), tmp_path_factory.mktemp("deepseek"))


def with_model(config: EngineConfig, draft: Path, count: int = DRAFTED) -> EngineConfig:
    """The configuration of an engine for which another model drafts."""
    options = {"adaptive": False, "model": draft.name, "model_directory": str(draft)}
    return replace(config, speculative=SpeculativeConfig("draft_model", count, **options))


def with_further(config: EngineConfig, count: int = 1) -> EngineConfig:
    """The configuration of an engine that drafts by the layer behind its model."""
    return replace(
        config,
        load=replace(config.load, further_layers=1),
        speculative=SpeculativeConfig("mtp", count, adaptive=False),
    )


def latent_config(directory: Path, mode: str, **options: Any) -> EngineConfig:
    """As `drafting_config`, with a cache for latents."""
    config = drafting_config(directory, mode, **options)
    return replace(config, cache=replace(config.cache, memory_bytes=2**20))


def run_again(engine: Engine, names: Sequence[str]) -> None:
    engine.tokens, engine.ends, engine.logprobs = {}, {}, {}
    run_all(engine, names)


def record_drafts(engine: Engine) -> dict[tuple[int, int], list[int]]:
    """Return a mapping that gets the drafts of an engine by the number of the request and the
    position of the first token."""
    drafter, found = engine.runner._drafter, {}
    draft = drafter.draft

    def recorded(plan: StepPlan) -> None:
        draft(plan)
        for column, tokens in plan.drafts.items():
            begin = plan.starts[column] + plan.counts[column] - len(tokens)
            found[plan.requests[column].number, begin] = list(tokens)

    drafter.draft = recorded
    return found


def num_steps(engine: Engine) -> int:
    return engine.core.scheduler.stats.steps


def sleep_and_reload(engine: Engine, level: int) -> None:
    """Let an engine sleep and wake up, with the weights that it had."""
    owners, device = engine.runner.memory, engine.runner.device
    held, free_bytes = owners.measure(), device.free_bytes()
    engine.call(Method.SLEEP, {"level": level, "mode": "abort"})
    measured = owners.measure()
    assert (measured.weights, measured.kv_cache, measured.workspaces) == (0, 0, 0)
    assert device.free_bytes() - free_bytes >= held.weights + held.kv_cache
    engine.call(Method.WAKE_UP)
    if level == 2:
        reload(engine, None)


def reload(engine: Engine, directory: Path | None) -> None:
    """Read the weights of an engine's own model again, from its directory or another one."""
    engine.core.settle()
    engine.runner.reload_weights(directory and str(directory))
    engine.core.weights.weights_changed()


class DraftModelConformance:
    @pytest.mark.parametrize(
        ("mode", "is_right", "names"),
        [
            slow("FULL_AND_PIECEWISE", True, SOME),
            slow("NONE", False, SOME),
            *(slow(mode, False, ALL) for mode in ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL")),
            *(slow(mode, True, ALL) for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")),
        ],
    )
    def test_drafts_change_no_output(
        self,
        directory: Path,
        other: Path,
        gpu_device: Device,
        mode: str,
        is_right: bool,
        names: list[str],
    ) -> None:
        config = drafting_config(directory, mode, num_blocks=200)
        plain = Engine(without_drafts(config), gpu_device)
        ours = Engine(with_model(config, directory if is_right else other), gpu_device)
        assert ours.runner.max_in_flight == 1
        for engine in (plain, ours):
            run_all(engine, names)
        assert_same(ours, plain)
        drafts, accepted = num_drafted(ours)
        assert drafts > 50
        assert accepted > 20 if is_right else accepted < drafts / 3

    @pytest.mark.parametrize(("mode", "budget"), [slow("FULL_AND_PIECEWISE", 32), slow("NONE", 6)])
    def test_a_model_that_drafts_for_itself_is_always_right(
        self, directory: Path, gpu_device: Device, mode: str, budget: int
    ) -> None:
        """With an empty prefix cache, and with hits; with a small budget prompts are computed in
        chunks, by both models."""
        config = drafting_config(directory, mode, budget=budget, num_blocks=200)
        plain = Engine(without_drafts(config), gpu_device)
        ours = Engine(with_model(config, directory), gpu_device)
        for engine in (plain, ours):
            run_all(engine, FOUND_BY_SAMPLING)
        assert_same(ours, plain)
        if budget == 32:
            assert 2 * num_steps(ours) < num_steps(plain)
        ours.add(3, PROMPTS[0], max_tokens=COUNT)
        ours.run()
        assert ours.tokens[3] == ours.tokens[0]
        drafts, accepted = num_drafted(ours)
        assert drafts == accepted > 30
        assert ours.core.scheduler.stats.prefix_hit_tokens > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("family", ["gemma3", "mamba", "qwen3_5", "deepseek_v3"])
    def test_models_with_other_caches(
        self, directory: Path, gpu_device: Device, tmp_path: Path, family: str
    ) -> None:
        """Their layers have groups beside those of the draft model."""
        target = reference_model(family, SCALE, **PROGRAM_SHAPE | VARIANTS[family])
        config = latent_config(save(target, tmp_path), "FULL_AND_PIECEWISE")
        plain = Engine(without_drafts(config), gpu_device)
        ours = Engine(with_model(config, directory), gpu_device)
        names = ["greedy", "drawn with penalties", "filtered"]
        for engine in (plain, ours):
            run_all(engine, names)
        assert num_drafted(ours)[0] > 30
        assert_same(ours, plain)

    @pytest.mark.slow
    def test_it_drafts_for_a_module_of_transformers(
        self, directory: Path, gpu_device: Device
    ) -> None:
        config = drafting_config(directory, "FULL_AND_PIECEWISE", num_blocks=200)
        config = replace(config, load=replace(config.load, model_impl="transformers"))
        plain = Engine(without_drafts(config), gpu_device)
        ours = Engine(with_model(config, directory), gpu_device)
        for engine in (plain, ours):
            run_all(engine, FOUND_BY_SAMPLING)
        assert_same(ours, plain)
        drafts, accepted = num_drafted(ours)
        assert drafts == accepted > 20

    @pytest.mark.slow
    def test_preempted_requests(self, directory: Path, gpu_device: Device) -> None:
        names = ["greedy", "drawn with penalties", "drawn", "filtered"]
        config = drafting_config(directory, "NONE", num_blocks=5)
        ours = Engine(with_model(replace_blocks(config, 6), directory), gpu_device)
        plain = Engine(without_drafts(config), gpu_device)
        for engine in (plain, ours):
            run_all(engine, names)
        assert ours.core.scheduler.stats.preemptions > 0
        assert num_drafted(ours)[1] > 5
        assert_same(ours, plain)

    @pytest.mark.slow
    def test_two_requests_with_one_prompt(self, directory: Path, gpu_device: Device) -> None:
        """As those of n = 2 do: they share blocks, which the draft model fills once, and draw
        different tokens."""
        config = drafting_config(directory, "NONE", num_blocks=200)
        engines = [
            Engine(each, gpu_device)
            for each in (without_drafts(config), with_model(config, directory))
        ]
        for engine in engines:
            for number in (0, 1):
                options = {"temperature": 1.0, "seed": number, "max_tokens": COUNT}
                engine.add(number, PROMPTS[0], **options)
                engine.step()
            engine.run()
        plain, ours = engines
        assert ours.tokens == plain.tokens
        assert ours.tokens[0] != ours.tokens[1]
        drafts, accepted = num_drafted(ours)
        assert drafts == accepted > 10
        assert ours.core.scheduler.stats.prefix_hit_tokens > 0

    @pytest.mark.parametrize("level", [slow(1), slow(2)])
    def test_its_memory_sleeps_and_its_weights_come_back(
        self, directory: Path, gpu_device: Device, level: int
    ) -> None:
        config = drafting_config(directory, "FULL_AND_PIECEWISE", num_blocks=200)
        plain = Engine(without_drafts(config), gpu_device)
        ours = Engine(with_model(config, directory), gpu_device)
        held, alone = (each.runner.memory.measure() for each in (ours, plain))
        assert held.weights == 2 * alone.weights
        assert held.workspaces > 1.5 * alone.workspaces
        for engine in (plain, ours):
            run_all(engine, FOUND_BY_SAMPLING)
        sleep_and_reload(ours, level)
        run_again(ours, FOUND_BY_SAMPLING)
        assert_same(ours, plain)
        drafts, accepted = num_drafted(ours)
        assert drafts == accepted > 40

    @pytest.mark.slow
    def test_requests_go_on_after_a_sleep(self, directory: Path, gpu_device: Device) -> None:
        config = drafting_config(directory, "NONE", num_blocks=200)
        plain = Engine(without_drafts(config), gpu_device)
        ours = Engine(with_model(config, directory), gpu_device)
        run_all(plain, FOUND_BY_SAMPLING)
        for number, name in enumerate(FOUND_BY_SAMPLING):
            add(ours, number, name)
        for _ in range(2):
            ours.step()
        ours.call(Method.SLEEP, {"level": 1, "mode": "keep"})
        ours.call(Method.WAKE_UP)
        ours.run()
        assert ours.tokens == plain.tokens
        drafts, accepted = num_drafted(ours)
        assert drafts == accepted > 20

    @pytest.mark.slow
    def test_new_weights_of_the_large_model_leave_it_alone(
        self, directory: Path, gpu_device: Device, tmp_path: Path
    ) -> None:
        changed = save(reference_model("llama", 1.1 * SCALE, **SHAPE), tmp_path)
        config = drafting_config(directory, "NONE", num_blocks=200)
        plain = Engine(without_drafts(drafting_config(changed, "NONE", num_blocks=200)), gpu_device)
        ours = Engine(with_model(config, directory), gpu_device)
        run_all(plain, FOUND_BY_SAMPLING)
        reload(ours, changed)
        run_all(ours, FOUND_BY_SAMPLING)
        assert ours.tokens == plain.tokens
        drafts, accepted = num_drafted(ours)
        assert 0 < accepted < drafts
        reload(ours, None)
        before = num_drafted(ours)
        run_again(ours, FOUND_BY_SAMPLING)
        drafts, accepted = (b - a for a, b in zip(before, num_drafted(ours), strict=True))
        assert drafts == accepted > 20


class FurtherLayerConformance:
    """Of a layer behind the model in the fixture `further`."""

    def with_drafts(self, config: EngineConfig, count: int = 1) -> EngineConfig:
        """The configuration of an engine that drafts so many tokens."""
        return with_further(config, count)

    def make_model(self, directory: Path, scale: float) -> Path:
        """A model of the same shape with larger weights."""
        return save_both(*make("deepseek_v3", scale=scale), directory)

    @pytest.mark.parametrize(
        ("mode", "count", "budget"),
        [
            slow("FULL_AND_PIECEWISE", 1, 32),
            slow("NONE", 3, 6),
            slow("FULL_AND_PIECEWISE", 3, 32),
            slow("PIECEWISE", 3, 32),
            slow("FULL", 2, 32),
        ],
    )
    def test_it_drafts_what_it_drafts_on_a_cpu(
        self, further: Path, gpu_device: Device, mode: str, count: int, budget: int
    ) -> None:
        """With an empty prefix cache, and with hits."""
        config = self.with_drafts(latent_config(further, mode, budget=budget), count)
        ours, other = (Engine(config, each) for each in (gpu_device, None))
        found = [record_drafts(engine) for engine in (ours, other)]
        for engine in (ours, other):
            for number, prompt in enumerate(PROMPTS):
                engine.add(number, prompt, max_tokens=7)
            engine.run()
            engine.add(3, PROMPTS[0], max_tokens=7)
            engine.run()
        assert ours.tokens == other.tokens
        assert found[0] == found[1]
        assert len(found[0]) > 12
        assert max(map(len, found[0].values())) == count
        assert ours.core.scheduler.stats.prefix_hit_tokens > 0

    @pytest.mark.parametrize(
        ("mode", "count", "names"),
        [
            slow("FULL_AND_PIECEWISE", 2, SOME),
            slow("FULL_AND_PIECEWISE", 3, ALL),
            slow("NONE", 1, ALL),
            slow("FULL", 3, ALL),
        ],
    )
    def test_drafts_change_no_output(
        self, further: Path, gpu_device: Device, mode: str, count: int, names: list[str]
    ) -> None:
        names = [each for each in names if "grammar" not in each]  # it has no tokenizer
        config = latent_config(further, mode)
        plain = Engine(without_drafts(config), gpu_device)
        ours = Engine(self.with_drafts(config, count), gpu_device)
        for engine in (plain, ours):
            run_all(engine, names)
        assert num_drafted(ours)[0] > 40
        assert_same(ours, plain)

    @pytest.mark.slow
    def test_steps_without_room_for_drafts(self, further: Path, gpu_device: Device) -> None:
        """The layer runs behind each step, so that steps do not overlap."""
        config = latent_config(further, "NONE", budget=1)
        plain = Engine(without_drafts(config), gpu_device)
        ours = Engine(self.with_drafts(config), gpu_device)
        assert plain.runner.max_in_flight == 2
        assert ours.runner.max_in_flight == 1
        for engine in (plain, ours):
            for number in (1, 2):
                engine.add(number, PROMPTS[number])
            engine.run()
        assert num_drafted(ours) == (0, 0)
        assert ours.tokens == plain.tokens

    @pytest.mark.slow
    def test_preempted_requests(self, further: Path, gpu_device: Device) -> None:
        names = ["greedy", "drawn with penalties", "drawn", "filtered"]
        config = latent_config(further, "NONE")
        plain = Engine(without_drafts(config), gpu_device)
        ours = Engine(self.with_drafts(replace_blocks(config, 6), 2), gpu_device)
        for engine in (plain, ours):
            run_all(engine, names)
        assert ours.core.scheduler.stats.preemptions > 0
        assert num_drafted(ours)[0] > 5
        assert_same(ours, plain)

    @pytest.mark.parametrize("level", [slow(1), slow(2)])
    def test_it_sleeps_and_is_updated_with_the_model(
        self, further: Path, gpu_device: Device, tmp_path: Path, level: int
    ) -> None:
        changed = self.make_model(tmp_path, 1.5)
        config = self.with_drafts(latent_config(further, "FULL_DECODE_ONLY"), 2)
        ours = Engine(config, gpu_device)
        first = greedy_drafts(ours)
        sleep_and_reload(ours, level)
        assert greedy_drafts(ours) == first
        reload(ours, changed)
        load = replace(config.load, directory=str(changed))
        wanted = greedy_drafts(Engine(replace(config, load=load), None))
        assert greedy_drafts(ours) == wanted != first


def greedy_drafts(engine: Engine) -> tuple[dict[int, list[int]], dict[tuple[int, int], list[int]]]:
    """Return the tokens of greedy requests, and what is drafted for them."""
    engine.tokens, found = {}, record_drafts(engine)
    for number in (1, 2):
        engine.add(number, PROMPTS[number], max_tokens=6)
    engine.run()
    del engine.runner._drafter.draft
    return engine.tokens, found


def replace_blocks(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """The configuration with a cache of so many blocks, beside the padding block."""
    return replace(config, cache=replace(config.cache, num_blocks=num_blocks + 1))
