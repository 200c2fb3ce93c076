"""The graphs of a part of a model on a GPU."""

from __future__ import annotations

import pytest

from shmllm.config.engine import EngineConfig, SchedulerConfig
from shmllm.config.graphs import CudaGraphMode, GraphConfig
from shmllm.config.load import LoadConfig
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


@pytest.mark.parametrize(
    ("mode", "of_prompts"),
    [("FULL_AND_PIECEWISE", "PIECEWISE"), ("FULL_DECODE_ONLY", "NONE"), ("FULL", "FULL")],
)
def test_a_model_that_does_not_generate_has_no_graphs_of_decodes(
    mode: str, of_prompts: str
) -> None:
    config = EngineConfig(
        LoadConfig("a model"), scheduler=SchedulerConfig(8, 64), graphs=GraphConfig(mode)
    )
    dispatcher = _make_dispatcher(config, generates=False)
    assert dispatcher.mode is CudaGraphMode[of_prompts]
    assert {mode for mode, _ in dispatcher.captures()} <= {dispatcher.mode}
    assert not any(descriptor.uniform for _, descriptor in dispatcher.captures())
    assert dispatcher.dispatch(4, 4, uniform=True)[0] is dispatcher.mode
