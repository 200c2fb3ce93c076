"""Two ranks, each with a fake GPU in a process of its own, compute what one computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance.gpu_engine import PROMPTS, SCALE, SHAPE, Engine, expected, make_config
from support.fake_gpu import FakeGpu
from support.fake_gpu_sharing import FakeGpuSharing
from support.model_helpers import reference_model, save

from shmllm.config.engine import EngineConfig
from shmllm.config.parallel import ParallelConfig
from shmllm.parallel import rank_process
from shmllm.parallel.gpu_memory import GpuGroupMemory
from shmllm.parallel.ranks import RankProcesses
from shmllm.worker.gpu.runner import GpuRunner

TESTS = Path(__file__).resolve().parents[3]
KV_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


class RankedEngine(Engine):
    """An engine whose ranks have fake GPUs."""

    def __init__(self, config: EngineConfig, device: FakeGpu, size: int = 2) -> None:
        config = replace(config, device="cuda:0", parallel=ParallelConfig(size))
        memory = GpuGroupMemory.create(size)
        self.ranks = RankProcesses(config, memory)
        try:
            runner = GpuRunner(config, device, None, None, self.ranks, memory)
            self.use(config, runner)
        except BaseException:
            self.ranks.close()
            raise


@pytest.fixture(autouse=True)
def _fake_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "RANK_MODULE", "support.fake_gpu_rank")
    monkeypatch.setattr(GpuGroupMemory, "make_sharing", FakeGpuSharing)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    made = reference_model("llama", SCALE, **SHAPE | KV_HEADS)
    return made, save(made, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def make(gpu_device: FakeGpu) -> Iterator[Any]:
    engines = []

    def start(config: EngineConfig, **options: Any) -> RankedEngine:
        engines.append(RankedEngine(config, gpu_device, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.ranks.close()


def test_greedy_tokens_equal_those_of_transformers(llama: Any, make: Any) -> None:
    reference, directory = llama
    engine = make(make_config(directory))
    for number, prompt in enumerate(PROMPTS):
        engine.add(number, prompt)
    engine.run()
    wanted = [expected(reference, prompt, 4) for prompt in PROMPTS]
    assert [engine.tokens[number] for number in range(len(PROMPTS))] == wanted
