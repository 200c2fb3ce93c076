"""Lets TRL's trainers generate with shmllm: call `install()` before you make a trainer.

This module replaces the five names that TRL's colocate mode takes from vLLM, and changes nothing
else in TRL, unless adapters are sent (`trl_adapters`). It creates no module named vllm, because
TRL would then also assume vLLM's server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Self

from shmllm.compat import vllm_engine
from shmllm.compat.external_launcher import BACKEND, SharedLLM, TorchGroup, group_size
from shmllm.compat.trl_adapters import sends_adapters
from shmllm.outputs.request import RequestOutput
from shmllm.outputs.sleep_report import SleepReport
from shmllm.params.lora import LoRARequest
from shmllm.params.sampling import SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsParams

# TRL passes this value by default. It has no effect without a GPU; it is removed so that the user
# gets no warning about an option that the user did not set.
_TRL_DEFAULTS_ON_A_CPU = {"gpu_memory_utilization": 0.3}

POLICY = LoRARequest("policy", 1)
"""The adapter of a policy that is sent by itself."""


class LLM(vllm_engine.LLM):
    """`shmllm.LLM` with the options that TRL passes.

    With `tensor_parallel_size` above 1 it is the `SharedLLM` of as many processes.

    Attributes:
        has_base: whether the trainer has sent the weights under its adapter.
        policy: the adapter of all requests; None until one was sent.
    """

    has_base = False
    policy: LoRARequest | None = None

    def __new__(cls, model: str, **options: Any) -> Self:
        backend = options.pop("distributed_executor_backend", None)
        size = group_size(options)
        if backend == BACKEND and size > 1:
            shared: Any = SharedPolicy(TorchGroup(size), lambda: cls(model, **options))
            return shared  # type: ignore[no-any-return]
        return super().__new__(cls)

    def __init__(self, model: str, **options: Any) -> None:
        if options.get("distributed_executor_backend") == BACKEND:
            del options["distributed_executor_backend"]
        gpu = _current_gpu()
        if gpu is None:
            defaults = _TRL_DEFAULTS_ON_A_CPU.items()
            options = dict(item for item in options.items() if item not in defaults)
        elif gpu > 0:
            options.setdefault("device", f"cuda:{gpu}")
        super().__init__(model, **options)

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, lora_request: Any = None, **options: Any
    ) -> list[RequestOutput]:
        adapter = lora_request or self.policy
        return super().generate(prompts, sampling_params, lora_request=adapter, **options)

    def send_adapter(self, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Replace the adapter of all requests that name none; as `add_lora`."""
        self.add_lora(replace(POLICY, load_inplace=True), tensors=tensors, config=config)
        self.policy = POLICY

    def sleep(self, level: int = 1, mode: Any = "abort") -> SleepReport:
        """As `shmllm.LLM.sleep`. Weights under an adapter stay: no step changes them."""
        return super().sleep(min(level, 1) if self.policy else level, mode)


class SharedPolicy(SharedLLM):
    """The LLM of several processes of a trainer."""

    has_base = False

    def send_adapter(self, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """As `LLM.send_adapter`."""
        self._call("send_adapter", tensors, config)


def _current_gpu() -> int | None:
    """The GPU of this process, as accelerate chose it; None if there is none."""
    import torch  # TRL has already imported it

    return torch.cuda.current_device() if torch.cuda.device_count() else None


def _is_vllm_available(min_version: str | None = None) -> bool:
    return True


_NAMES: dict[str, Any] = {
    "LLM": LLM,
    "RequestOutput": RequestOutput,
    "SamplingParams": SamplingParams,
    "StructuredOutputsParams": StructuredOutputsParams,
    "is_vllm_available": _is_vllm_available,
}
_ABSENT = object()
_replaced: list[tuple[Any, str, Any]] = []
"""Owner, name, and previous value of what `install` has replaced."""


def install(**options: Any) -> None:
    """Makes `vllm_mode="colocate"` of GRPOTrainer and similar trainers run on shmllm.

    Args:
        options: of the engines, such as `num_threads`; they replace those that TRL passes. With
            `enable_lora=True` the engine gets a peft model's adapter in place of merged weights.

    Raises:
        ModuleNotFoundError: TRL is not installed, or is older than 1.16 and has no
            `trl.generation`.
    """
    uninstall()
    module = import_module("trl.generation.vllm_generation")
    for name, ours in _NAMES.items():
        _replace(module, name, ours)
    if options:
        _replace(module, "LLM", lambda **given: LLM(**(given | options)))
    if options.get("enable_lora"):
        generation = module.VLLMGeneration
        _replace(generation, "sync_weights", sends_adapters(generation.sync_weights))


def uninstall() -> None:
    """Undoes `install`. Trainers that were made after `install` keep their engine."""
    while _replaced:
        owner, name, value = _replaced.pop()
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)
