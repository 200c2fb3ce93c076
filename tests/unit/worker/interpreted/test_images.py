"""Images in a whole engine on the fake GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

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

from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.shard import Shard
from shmllm.worker.gpu.program import check_model

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


def test_levels_of_several_gpus_are_refused(subject: Subject) -> None:
    directory = subject.directory
    whole, load = ModelConfig.from_directory(directory), LoadConfig(str(directory))
    part = replace(whole, shard=Shard(0, 2))
    if not whole.num_levels:
        check_model(part, load, "float32")
        return
    with pytest.raises(EngineStartError, match=r"images of Qwen3VL\w+ are not possible with ten"):
        check_model(part, load, "float32")
    check_model(replace(part, vision=None), load, "float32")
