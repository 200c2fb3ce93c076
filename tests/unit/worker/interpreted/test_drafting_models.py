"""Models that draft in a whole engine on the fake GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.gpu_draft_heads import (
    BlockConformance,
    EagleConformance,
    FirstEagleConformance,
    MedusaConformance,
    ParallelEagleConformance,
)
from conformance.gpu_drafting_models import (
    DraftModelConformance,
    FurtherLayerConformance,
    further,
    latent_config,
    other,
    with_further,
    with_model,
)
from conformance.gpu_drafts import PENALTIES, directory, drafting_config
from conformance.gpu_engine import PROMPTS, Engine, launches_of_a_step
from support.fake_gpu import FakeGpu
from support.kernel_variants import seen_variants
from support.variants import slow

from shmllm.config.engine import EngineConfig

__all__ = ["directory", "further", "other"]

GRAPHS = "FULL_AND_PIECEWISE"
SENT = ["copy ahead", "_unpack_step"]
TABLES = "aten::index_select"
SAMPLED = ["graph", "copy"]
CHOSEN = ["summarise_chunks", "choose_tokens", "copy"]  # of drafted tokens


def add_requests(engine: Engine) -> None:
    engine.add(0, PROMPTS[0], logprobs=2, max_tokens=7)
    engine.add(1, PROMPTS[1], temperature=1.0, top_p=0.9, top_k=30, max_tokens=7)
    engine.add(2, PROMPTS[2], temperature=1.0, seed=3, max_tokens=7, **PENALTIES)


def assert_all_compiled_before(config: EngineConfig, device: FakeGpu) -> None:
    """A start launches every variant of a kernel that requests need, and none first in a graph."""
    with seen_variants(lambda: device.is_capturing) as seen:
        engine = Engine(config, device)
        assert not any(seen.values())
        before = set(seen)
        for _ in range(2):
            add_requests(engine)
            engine.run()
        assert engine.core.scheduler.stats.draft_tokens > 20
        assert not set(seen) - before


def launches_of_the_third_step(engine: Engine, device: FakeGpu) -> list[str]:
    """Return the launches of the third step of two requests."""
    for number in (0, 1):
        engine.add(number, PROMPTS[2], temperature=0.7, seed=number, max_tokens=20)
    for _ in range(2):
        engine.step()
    return launches_of_a_step(engine, device)


class TestDraftModel(DraftModelConformance):
    @pytest.mark.slow
    def test_a_drafted_token_is_a_few_launches(self, directory: Path, gpu_device: FakeGpu) -> None:
        """The first step of the draft model, of two tokens for each request, has a graph, too."""
        config = drafting_config(directory, GRAPHS, sizes=(4, 8), num_blocks=200)
        config = with_model(config, directory, 2)
        found = launches_of_the_third_step(Engine(config, gpu_device), gpu_device)
        drafted = [*SENT, TABLES, "graph", *CHOSEN, *SENT, "graph", *CHOSEN]
        assert found == [*drafted, *SENT, TABLES, "graph", *SAMPLED]

    @pytest.mark.parametrize("mode", [slow("FULL"), slow("NONE"), slow(GRAPHS)])
    def test_nothing_is_compiled_while_it_drafts(
        self, directory: Path, other: Path, gpu_device: FakeGpu, mode: str
    ) -> None:
        config = drafting_config(directory, mode, budget=6, num_blocks=200)
        assert_all_compiled_before(with_model(config, other), gpu_device)


class CompiledBefore(FurtherLayerConformance):
    @pytest.mark.parametrize("mode", [slow("NONE"), slow(GRAPHS), slow("FULL")])
    def test_nothing_is_compiled_while_it_drafts(
        self, further: Path, gpu_device: FakeGpu, mode: str
    ) -> None:
        config = latent_config(further, mode, budget=6)
        assert_all_compiled_before(self.with_drafts(config, 2), gpu_device)


class TestFurtherLayer(CompiledBefore):
    def test_a_step_is_a_few_launches(self, further: Path, gpu_device: FakeGpu) -> None:
        config = with_further(latent_config(further, GRAPHS, sizes=(4,)))
        found = launches_of_the_third_step(Engine(config, gpu_device), gpu_device)
        before = ["copy", TABLES, "aten::mm", *CHOSEN]
        step = [*SENT, TABLES, "graph", *SAMPLED]
        behind = [*SENT, "graph", "copy", TABLES, "aten::index_copy_"]
        assert found == [*before, *step, *behind]


class TestEagle(EagleConformance, CompiledBefore):
    def test_a_step_is_a_few_launches(self, further: Path, gpu_device: FakeGpu) -> None:
        config = self.with_drafts(latent_config(further, GRAPHS, sizes=(4,)))
        found = launches_of_the_third_step(Engine(config, gpu_device), gpu_device)
        of_tokens = ["aten::new_full", "aten::add", "aten::index_copy_"]
        before = ["copy", TABLES, "_rms_norm", "aten::mm", *of_tokens, *CHOSEN]
        step = [*SENT, TABLES, TABLES, "graph", *SAMPLED]
        norms = ["_rms_norm", "_rms_norm"]
        behind = [*SENT, *norms, "aten::mm", "graph", "copy", TABLES, "aten::index_copy_"]
        assert found == [*before, *step, *behind]


class TestFirstEagle(FirstEagleConformance, CompiledBefore):
    pass


class TestParallelEagle(ParallelEagleConformance, CompiledBefore):
    pass


class TestBlock(BlockConformance, CompiledBefore):
    pass


class TestMedusa(MedusaConformance, CompiledBefore):
    pass
