"""Images in a whole engine on the fake GPU."""

from __future__ import annotations

from collections import Counter

import pytest
from conformance.gpu_engine import Engine, launches_of_a_step
from conformance.gpu_images import (
    ImagesConformance,
    Subject,
    TowersConformance,
    add,
    encoded,
    make_config,
    subject,
)
from support.fake_gpu import FakeGpu

__all__ = ["encoded", "subject"]

LAUNCHES_OF_DECODES = {
    *("copy ahead", "_unpack_step", "graph", "copy"),
    *("aten::index_copy_", "aten::index_select"),  # of block tables
}


class TestTowers(TowersConformance):
    pass


class TestImages(ImagesConformance):
    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
    def test_decodes_behind_an_image_cost_no_copies(
        self, subject: Subject, gpu_device: FakeGpu, mode: str
    ) -> None:
        """Levels are added in each step: an addition for each in a step of one token."""
        engine = Engine(make_config(subject.directory, mode=mode), gpu_device)
        num_levels = engine.runner.model.config.num_levels
        add(engine, 0, subject.asked["one"], max_tokens=9)
        for _ in range(4):
            engine.step()
        launched = launches_of_a_step(engine, gpu_device)
        if mode != "NONE":
            assert set(launched) <= LAUNCHES_OF_DECODES
        elif num_levels:
            assert Counter(launched)["aten::add_"] == num_levels
        engine.run()
