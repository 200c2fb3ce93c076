"""The graphs of a part of a model on a GPU."""

from __future__ import annotations

import pytest

from shmllm.config.engine import EngineConfig, LoadConfig, SchedulerConfig
from shmllm.config.graphs import GraphConfig
from shmllm.errors import EngineStartError
from shmllm.worker.gpu.part import _make_dispatcher


@pytest.mark.parametrize(
    ("mode", "size"), [("PIECEWISE", 65), ("FULL", 65), ("FULL_DECODE_ONLY", 9)]
)
def test_sizes_that_no_step_can_have_are_refused(mode: str, size: int) -> None:
    scheduler, graphs = SchedulerConfig(8, 64), GraphConfig(mode, (size,))
    config = EngineConfig(LoadConfig("a model"), scheduler=scheduler, graphs=graphs)
    with pytest.raises(EngineStartError, match=r"max_num_seqs=8 and max_num_batched_tokens=64"):
        _make_dispatcher(config)
