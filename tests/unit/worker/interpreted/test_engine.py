"""A whole engine on the fake GPU."""

from __future__ import annotations

from typing import Any

from conformance.gpu_engine import (
    Engine,
    EngineConformance,
    launches_of_a_step,
    make_config,
    model,
)
from support.fake_gpu import FakeGpu

__all__ = ["model"]


class TestEngine(EngineConformance):
    def test_a_decode_step_is_a_few_launches(self, model: Any, gpu_device: FakeGpu) -> None:
        """Each further launch costs time on the host and on the device in every step."""
        _, directory = model
        engine = Engine(make_config(directory), gpu_device)
        engine.add(0, [5], temperature=0.7, max_tokens=9)
        engine.add(1, [7], max_tokens=9)
        for _ in range(5):
            engine.step()
        assert launches_of_a_step(engine, gpu_device) == [
            "copy ahead",
            "_unpack_step",
            *("graph", "graph"),  # of the model and of sampling
            "copy",
        ]
        engine.add(2, [5], temperature=0.7, top_k=3)
        engine.run()
        assert {"count_by_distance", "collect_candidates"} < set(gpu_device.launched)
