"""The sampler, on the fake GPU."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.device_sampler import Pair, SamplerConformance, new_request
from support.fake_gpu import FakeGpu

PLAIN = ["summarise_chunks", "choose_tokens"]
LISTED = ["summarise_chunks", "count_by_distance", "collect_candidates"]


class TestSampler(SamplerConformance):
    @pytest.mark.parametrize(
        ("options", "num_narrowed"),
        [
            ({"temperature": 0.7}, None),
            ({"top_k": 3, "top_p": 0.5}, None),
            ({"temperature": 0.7, "min_p": 0.1}, 0),
            ({"temperature": 0.7, "top_k": 3}, 2),
            ({"temperature": 0.7, "top_p": 0.5, "min_p": 0.1}, 2),
            ({"temperature": 0.7, "top_p": 0.5, "top_k": 3}, 5),
        ],
    )
    def test_a_step_has_the_launches_that_its_filters_may_need(
        self, gpu_device: FakeGpu, options: dict[str, Any], num_narrowed: int | None
    ) -> None:
        """Each launch costs time, also if no row has anything to search."""
        pair = Pair(gpu_device)
        pair.add(new_request(0, **options), new_request(3))
        logits = pair.noise(2)
        gpu_device.launched.clear()
        pair.submit(logits, [3, 0]).result()
        launched = [name for name in gpu_device.launched if "::" not in name and name != "copy"]
        expected = PLAIN
        if num_narrowed is not None:
            expected = [*LISTED, *["narrow_interval"] * num_narrowed, "draw_chunks", PLAIN[1]]
        assert launched == expected
