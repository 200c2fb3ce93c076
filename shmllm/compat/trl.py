"""Lets TRL's trainers generate with shmllm: call `install()` before you make a trainer.

This module replaces the five names that TRL's colocate mode takes from vLLM, and changes nothing
else in TRL. It creates no module named vllm, because TRL would then also assume vLLM's server.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shmllm.compat import vllm_names
from shmllm.outputs.request import RequestOutput
from shmllm.params.sampling import SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsParams

# TRL passes these values by default. The first has no effect here, and the second has none without
# a GPU; they are removed so that the user gets no warning about options that the user did not set.
_TRL_DEFAULTS = {"distributed_executor_backend": "external_launcher"}
_TRL_DEFAULTS_ON_A_CPU = {"gpu_memory_utilization": 0.3}


class LLM(vllm_names.LLM):
    """`shmllm.LLM` with the options that TRL passes."""

    def __init__(self, model: str, **options: Any) -> None:
        defaults = _TRL_DEFAULTS | ({} if _has_gpu() else _TRL_DEFAULTS_ON_A_CPU)
        given = (item for item in options.items() if item not in defaults.items())
        super().__init__(model, **dict(given))


def _has_gpu() -> bool:
    import torch  # TRL has already imported it

    return torch.cuda.device_count() > 0


def _is_vllm_available(min_version: str | None = None) -> bool:
    return True


_NAMES: dict[str, Any] = {
    "LLM": LLM,
    "RequestOutput": RequestOutput,
    "SamplingParams": SamplingParams,
    "StructuredOutputsParams": StructuredOutputsParams,
    "is_vllm_available": _is_vllm_available,
}
_replaced: dict[str, Any] = {}


def install() -> None:
    """Makes `vllm_mode="colocate"` of GRPOTrainer and similar trainers run on shmllm.

    Raises:
        ModuleNotFoundError: TRL is not installed, or is older than 1.16 and has no
            `trl.generation`.
    """
    module = import_module("trl.generation.vllm_generation")
    for name, ours in _NAMES.items():
        if getattr(module, name, None) is not ours:
            _replaced[name] = getattr(module, name, None)
            setattr(module, name, ours)


def uninstall() -> None:
    """Undoes `install`. Trainers that were made after `install` keep their engine."""
    module = import_module("trl.generation.vllm_generation")
    for name, value in _replaced.items():
        if value is None:
            delattr(module, name)
        else:
            setattr(module, name, value)
    _replaced.clear()
