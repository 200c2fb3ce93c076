"""`install` replaces the five names in TRL and `uninstall` restores them. TRL itself is a fake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import shmllm
from shmllm.compat import trl

MODULE = "trl.generation.vllm_generation"


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A fake of TRL's module without vLLM: it has one of the five names, and another name."""
    module = ModuleType(MODULE)
    module.__dict__.update(is_vllm_available=lambda: False, VLLMGeneration=object)
    for name in ("trl", "trl.generation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    yield module
    trl.uninstall()


def test_names_are_replaced_and_restored(generation: ModuleType) -> None:
    before = dict(vars(generation))
    trl.install()
    assert generation.is_vllm_available(min_version="0.28.0")
    assert issubclass(generation.LLM, shmllm.LLM)
    assert generation.SamplingParams is shmllm.SamplingParams
    assert generation.StructuredOutputsParams is shmllm.StructuredOutputsParams
    assert generation.RequestOutput is shmllm.RequestOutput
    trl.uninstall()
    assert vars(generation) == before


def test_uninstall_restores_the_originals_after_two_installs(generation: ModuleType) -> None:
    before = dict(vars(generation))
    trl.install()
    trl.install()
    trl.uninstall()
    assert vars(generation) == before


def test_no_module_named_vllm_appears(generation: ModuleType) -> None:
    trl.install()
    assert "vllm" not in sys.modules


def test_defaults_of_trl_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The removed values are defaults of TRL's `GRPOConfig`; each would cause a warning."""
    monkeypatch.setattr(trl, "_current_gpu", lambda: None)
    passed: list[dict[str, object]] = []
    monkeypatch.setattr(shmllm.LLM, "__init__", lambda self, **options: passed.append(options))
    always = {"distributed_executor_backend": "external_launcher", "max_model_len": None}
    trl.LLM("tiny", gpu_memory_utilization=0.3, seed=0, **always)
    trl.LLM("tiny", gpu_memory_utilization=0.5, seed=0, **always)
    expected = {"model": "tiny", "seed": 0}
    assert passed == [expected, expected | {"gpu_memory_utilization": 0.5}]


def test_the_memory_fraction_is_passed_on_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "_current_gpu", lambda: 0)
    passed: list[dict[str, object]] = []
    monkeypatch.setattr(shmllm.LLM, "__init__", lambda self, **options: passed.append(options))
    trl.LLM("tiny", gpu_memory_utilization=0.3)
    assert passed == [{"model": "tiny", "gpu_memory_utilization": 0.3}]
