"""Tests adapters in a whole engine on the fake GPU."""

from __future__ import annotations

from conformance.gpu_engine import Engine, launches_of_a_step
from conformance.gpu_lora import Adapted, LoraEngineConformance, adapted, adapted_experts
from support.fake_gpu import FakeGpu

__all__ = ["adapted", "adapted_experts"]


class TestLoraEngine(LoraEngineConformance):
    def test_a_step_of_few_tokens_is_five_launches_a_layer(
        self, adapted: Adapted, gpu_device: FakeGpu
    ) -> None:
        """What adapters add is computed within the launches of the products."""
        engine = Engine(adapted.config(3, mode="NONE"), gpu_device)
        for index in (0, 1, 2):
            adapted.add(engine, index)
        for _ in range(2):
            engine.step()
        launched = launches_of_a_step(engine, gpu_device)
        layer = ["multiply_few_rows", "attend_decodes", *["multiply_few_rows"] * 3]
        first = launched.index("_rope_tables") + 1
        assert launched[first:][: 2 * len(layer)] == 2 * layer
        engine.run()
