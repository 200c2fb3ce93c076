"""The graphs of steps of a model that drafts."""

from __future__ import annotations

from shmllm.config.engine import EngineConfig, LoadConfig, SchedulerConfig
from shmllm.config.graphs import CudaGraphMode, GraphConfig
from shmllm.worker.gpu.draft_resources import DraftDispatcher
from shmllm.worker.gpu.graph_dispatcher import BatchDescriptor

NONE, FULL = CudaGraphMode.NONE, CudaGraphMode.FULL


def make(mode: str, *sizes: int) -> DraftDispatcher:
    config = EngineConfig(
        LoadConfig("a model"), scheduler=SchedulerConfig(4, 64), graphs=GraphConfig(mode, sizes)
    )
    return DraftDispatcher(config, 4, 3)


def test_only_graphs_compute_logits_of_further_tokens() -> None:
    assert make("FULL_AND_PIECEWISE", 7).dispatch(6, 4) == (FULL, BatchDescriptor(7, 4, False, 3))
    assert make("NONE", 7).dispatch(6, 4) == (NONE, BatchDescriptor(6, 4, False))


def test_there_are_no_graphs_where_the_model_has_none_of_its_decodes() -> None:
    assert make("PIECEWISE", 2, 4).graphs.captures() == []
    assert make("FULL_AND_PIECEWISE", 2, 4).dispatch(4, 4) == (FULL, BatchDescriptor(4, 4, True))


def test_a_step_larger_than_every_graph_has_none() -> None:
    assert make("FULL", 40).dispatch(2, 2) == (NONE, BatchDescriptor(2, 2, True))
    assert make("FULL", 4, 8).dispatch(9, 2) == (NONE, BatchDescriptor(9, 2, False))
