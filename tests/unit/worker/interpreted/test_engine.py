"""A whole engine on the fake GPU."""

from __future__ import annotations

from typing import Any

from conformance.gpu_engine import Engine, EngineConformance, make_config, model
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
        gpu_device.may_wait = False
        gpu_device.launched.clear()
        engine.step()
        assert gpu_device.launched == [
            "copy ahead",
            "_unpack_step",
            "graph",
            "summarise_chunks",
            "choose_tokens",
            "copy",
        ]
        gpu_device.may_wait = True
        engine.add(2, [5], temperature=0.7, top_k=3)
        engine.run()
        assert {"count_by_distance", "collect_candidates"} < set(gpu_device.launched)
