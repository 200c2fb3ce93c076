"""TRL's trainers generate with shmllm: `install()` before one is made.

Owns the five names that TRL's colocate mode takes from vLLM. Nothing else of TRL changes,
and no module named vllm is made, which TRL would take for a server's too.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shmllm.compat import vllm_names
from shmllm.outputs.request import RequestOutput
from shmllm.params.sampling import SamplingParams
from shmllm.params.structured_outputs import StructuredOutputsParams

# What TRL says for all who do not say otherwise: the first means nothing here, the second
# nothing without a GPU, and nobody asked for it.
_UNASKED = {"distributed_executor_backend": "external_launcher"}
_UNASKED_ON_A_CPU = {"gpu_memory_utilization": 0.3}


class LLM(vllm_names.LLM):
    """`shmllm.LLM` with what TRL passes."""

    def __init__(self, model: str, **options: Any) -> None:
        unasked = _UNASKED | ({} if _has_gpu() else _UNASKED_ON_A_CPU)
        asked = (item for item in options.items() if item not in unasked.items())
        super().__init__(model, **dict(asked))


def _has_gpu() -> bool:
    import torch  # as TRL did

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
    """Let `vllm_mode="colocate"` of GRPOTrainer and its kin run on shmllm.

    Raises:
        ModuleNotFoundError: TRL is not installed, or has no `trl.generation` yet (below 1.16).
    """
    module = import_module("trl.generation.vllm_generation")
    for name, ours in _NAMES.items():
        if getattr(module, name, None) is not ours:
            _replaced[name] = getattr(module, name, None)
            setattr(module, name, ours)


def uninstall() -> None:
    """Undo `install`. Trainers that were made meanwhile keep their engine."""
    module = import_module("trl.generation.vllm_generation")
    for name, value in _replaced.items():
        if value is None:
            delattr(module, name)
        else:
            setattr(module, name, value)
    _replaced.clear()
