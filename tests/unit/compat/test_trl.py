"""`install` replaces names in TRL and `uninstall` restores them. TRL itself is a fake."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import shmllm
from shmllm.compat import trl, trl_adapters

MODULE = "trl.generation.vllm_generation"


class FakeGeneration:
    """As much of TRL's `VLLMGeneration` as `sync_weights` uses."""

    mode = "colocate"
    enable_sleep_mode = True

    def __init__(self, is_fsdp: bool = False, **model: Any) -> None:
        self.calls: list[Any] = []
        self.llm = FakeLLM(self.calls)
        self.model = SimpleNamespace(**model)
        self._dist = SimpleNamespace(is_fsdp=is_fsdp, gather_params=lambda _: nullcontext())
        self._llm_weights_sleeping = True

    def sync_weights(self) -> None:
        self.calls.append("all weights")


class FakeLLM:
    has_base = False

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def wake_up(self, tags: list[str]) -> None:
        self._calls.append(tags)

    def update_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        self._calls.append(dict(weights))

    def send_adapter(self, tensors: dict[str, Any], config: dict[str, Any]) -> None:
        self._calls.append((tensors, config))


@pytest.fixture
def peft_model(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The attributes of a peft model that `sync_weights` uses."""
    parameters = {"q.base_layer.weight": 1, "q.lora_A.default.weight": 2, "norm.weight": 3}
    named = [(f"base_model.model.{k}", SimpleNamespace(data=v)) for k, v in parameters.items()]
    config = SimpleNamespace(to_dict=lambda: {"r": 4, "target_modules": {"q"}})
    monkeypatch.setattr(trl_adapters, "_tensors_of", lambda _: {"a": 2})
    return {
        "prefix": "lora_",
        "active_adapter": "default",
        "peft_config": {"default": config},
        "named_parameters": lambda: iter(named),
    }


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A fake of TRL's module without vLLM: it has one of the five names, and another name."""
    module = ModuleType(MODULE)
    module.__dict__.update(is_vllm_available=lambda: False, VLLMGeneration=FakeGeneration)
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


@pytest.mark.parametrize(("gpu", "device"), [(0, {}), (2, {"device": "cuda:2"})])
def test_an_engine_runs_on_the_gpu_of_its_process(
    gpu: int, device: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl, "_current_gpu", lambda: gpu)
    passed: list[dict[str, object]] = []
    monkeypatch.setattr(shmllm.LLM, "__init__", lambda self, **options: passed.append(options))
    trl.LLM("tiny")
    trl.LLM("tiny", device="cpu")
    assert passed == [{"model": "tiny"} | device, {"model": "tiny", "device": "cpu"}]


def test_options_of_install_replace_those_of_trl(
    generation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[dict[str, object]] = []
    monkeypatch.setattr(shmllm.LLM, "__init__", lambda self, **options: passed.append(options))
    before = dict(vars(generation))
    trl.install(seed=7, num_threads=1)
    generation.LLM(model="tiny", seed=0, max_num_seqs=2)
    trl.install()
    generation.LLM(model="tiny", seed=0)
    trl.uninstall()
    assert passed == [
        {"model": "tiny", "seed": 7, "max_num_seqs": 2, "num_threads": 1},
        {"model": "tiny", "seed": 0},
    ]
    assert vars(generation) == before


def test_processes_of_a_tensor_parallel_group_share_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[dict[str, object]] = []

    def init(self: Any, **options: object) -> None:
        passed.append(options)
        self.facts, self.model_defaults, self._client = None, {}, SimpleNamespace(pid=1)

    monkeypatch.setattr(shmllm.LLM, "__init__", init)
    group = SimpleNamespace(leads=True, share=lambda data: data)
    monkeypatch.setattr(trl, "TorchGroup", lambda size: group)
    options: dict[str, Any] = {"tensor_parallel_size": 2}
    shared = trl.LLM("tiny", **options, distributed_executor_backend="external_launcher")
    assert isinstance(shared, trl.SharedPolicy)
    assert passed == [{"model": "tiny", "tensor_parallel_size": 2}]
    assert isinstance(trl.LLM("tiny", **options), trl.LLM)  # processes of the engine's own


def test_adapters_are_sent_with_the_base_before_the_first(
    generation: ModuleType, peft_model: dict[str, Any]
) -> None:
    trl.install(enable_lora=True)
    made = generation.VLLMGeneration(**peft_model)
    made.sync_weights()
    made.sync_weights()
    adapter = ({"a": 2}, {"r": 4, "target_modules": ["q"]})
    base = {"q.weight": 1, "norm.weight": 3}
    assert made.calls == [["weights"], base, adapter, ["weights"], adapter]
    assert not made._llm_weights_sleeping
    trl.uninstall()
    made.sync_weights()
    assert made.calls[-1] == "all weights"


def test_adapters_are_refused_under_fsdp(
    generation: ModuleType, peft_model: dict[str, Any]
) -> None:
    trl.install(enable_lora=True)
    with pytest.raises(shmllm.RequestError, match="under FSDP adapters are merged"):
        generation.VLLMGeneration(is_fsdp=True, **peft_model).sync_weights()


def test_models_without_an_adapter_are_sent_by_trl(generation: ModuleType) -> None:
    trl.install(enable_lora=True)
    made = generation.VLLMGeneration()
    made.sync_weights()
    assert made.calls == ["all weights"]
