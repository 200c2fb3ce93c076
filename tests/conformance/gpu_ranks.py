"""Engines whose ranks have a fake GPU each, in processes of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance.gpu_engine import Engine
from support import fake_gpu_rank
from support.fake_gpu import FakeGpu
from support.fake_gpu_sharing import FakeGpuSharing
from support.waiting import PATIENCE_S

from shmllm.config.engine import EngineConfig
from shmllm.config.parallel import ParallelConfig
from shmllm.parallel import rank_process
from shmllm.parallel.gpu_memory import GpuGroupMemory
from shmllm.worker import make_runner
from shmllm.worker.gpu import device

TESTS = Path(__file__).resolve().parents[1]
KV_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


class RankedEngine(Engine):
    """An engine whose ranks have fake GPUs."""

    def __init__(self, config: EngineConfig, size: int = 2) -> None:
        config = replace(config, parallel=ParallelConfig(size))
        self.use(config, make_runner._make_gpu_runner(config, 0, None, None))


@pytest.fixture
def compiled_kernels() -> None:
    """`no_leaks` need not compile the kernels of a CPU: no engine here uses them."""


@pytest.fixture(autouse=True)
def fake_ranks(no_leaks: None, gpu_device: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_runner, "check_gpus", lambda option, index, size: None)
    monkeypatch.setattr(device, "CudaDevice", lambda index: gpu_device)
    monkeypatch.setattr(rank_process, "RANK_MODULE", fake_gpu_rank.__name__)
    monkeypatch.setattr(GpuGroupMemory, "make_sharing", FakeGpuSharing)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


@pytest.fixture
def make() -> Iterator[Callable[..., RankedEngine]]:
    engines = []

    def start(config: EngineConfig, **options: Any) -> RankedEngine:
        engines.append(RankedEngine(config, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.runner.close()


@contextmanager
def ended_in_time(engine: Engine) -> Iterator[None]:
    """Ends the group of an engine, whose ranks may wait for each other, after PATIENCE_S."""
    deadline = threading.Timer(PATIENCE_S, engine.runner._ranks.memory.end)
    deadline.start()
    try:
        yield
    finally:
        deadline.cancel()
