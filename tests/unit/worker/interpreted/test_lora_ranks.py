"""Adapters of two ranks, each with a fake GPU in a process of its own, against merged models."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conformance.gpu_lora import COUNT, EXPERTS, PROMPTS, Adapted
from conformance.gpu_ranks import (
    KV_HEADS,
    RankedEngine,
    compiled_kernels,
    ended_in_time,
    fake_ranks,
    make,
)
from safetensors.torch import load_file
from support import lora_adapters
from support.fake_gpu import FakeGpu, eager
from support.variants import slow

from shmllm.errors import RequestError
from shmllm.params.lora import LoRARequest
from shmllm.wire.rpc import RpcCall, pickle_call

__all__ = ["compiled_kernels", "fake_ranks", "make"]

ALL = range(len(PROMPTS))
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen2_moe": EXPERTS, "phi3": {}}


@pytest.fixture(autouse=True)
def _no_gpu_stands_still(gpu_device: FakeGpu) -> None:
    """Rank 0 may read an adapter during a step. It waits then until the others have launched
    theirs, which are computed as they are launched."""
    gpu_device.progress = eager


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    """Returns the adapted model of a family."""

    @cache
    def make_family(family: str) -> Adapted:
        return Adapted(tmp_path_factory.mktemp(family), family, **FAMILIES[family] | KV_HEADS)

    return make_family


@pytest.mark.parametrize(
    ("family", "mode", "max_loras", "asked"),
    [
        ("llama", "NONE", 1, (3, 1)),
        slow("llama", "NONE", 2, ALL),
        slow("llama", "FULL_AND_PIECEWISE", 2, ALL),
        slow("llama", "FULL", 1, ALL),
        slow("qwen2_moe", "NONE", 3, ALL),
        slow("qwen2_moe", "FULL_AND_PIECEWISE", 2, ALL),
        slow("phi3", "PIECEWISE", 3, ALL),
    ],
)
def test_greedy_tokens_are_those_of_the_merged_models(
    family: str,
    mode: str,
    max_loras: int,
    asked: Sequence[int],
    adapted: Callable[[str], Adapted],
    make: Any,
) -> None:
    """Steps of one token, of few and of more, in which ranks find shares at places that others had
    before."""
    model = adapted(family)
    engine = make(model.config(max_loras, mode=mode))
    for index in asked:
        model.add(engine, index)
    with ended_in_time(engine):
        engine.run()
    assert engine.tokens == {index: model.wanted[index] for index in asked}


def count_adapters(worker: object) -> int:
    """The number of adapters in the memory of a rank."""
    from shmllm.worker.gpu.lora import GpuAdapter

    gc.collect()
    return sum(isinstance(each, GpuAdapter) for each in gc.get_objects())


def counts_of(engine: RankedEngine) -> list[int]:
    data = pickle_call(RpcCall(count_adapters, (), {}))
    counts: list[int] = engine.runner.everywhere(lambda: count_adapters(None), lambda: data)
    return counts


@pytest.mark.slow
def test_all_ranks_replace_and_free_what_one_does(
    adapted: Callable[[str], Adapted], make: Any, tmp_path: Path
) -> None:
    model = copy.copy(adapted("llama"))
    model.loras = [*model.loras]
    engine = make(model.config(1, mode="NONE"))
    before = counts_of(engine)
    with ended_in_time(engine):
        model.add(engine, 0)
        engine.run()
        engine.core.settle()
        other = LoRARequest("0", 1, model.loras[1].lora_path, load_inplace=True)
        assert engine.core.adapters.add(other)
        tensors = load_file(Path(model.loras[0].lora_path) / "adapter_model.safetensors")
        bad = lora_adapters.write(tmp_path / "bad", tensors, r=5)
        with pytest.raises(RequestError, match="has shape"):
            engine.core.adapters.add(LoRARequest("bad", 9, str(bad)))
        model.loras[0] = other
        model.add(engine, 0)
        engine.run()
    replaced, wanted = engine.tokens[0][COUNT:], model.wanted[0]
    assert engine.tokens[0][:COUNT] == wanted != replaced
    assert counts_of(engine) == [count + 1 for count in before]
