"""Names of vLLM that clients import although shmllm does not support them; their use raises.

`vllm_modules.UNUSABLE` lists them with the nearest things. `ModelRegistry` can only be read.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shmllm.compat.vllm_modules import UNUSABLE


class _Absent:
    """A class that clients can import but not instantiate."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _refuse(type(self).__name__)


class LoRARequest(_Absent):
    """Not supported: shmllm has no LoRA adapters."""


class ClassificationOutput(_Absent):
    """Not supported: shmllm has no classifiers."""


class ClassificationRequestOutput(_Absent):
    """Not supported: shmllm has no classifiers."""


class ModelRegistry:
    """The architectures that shmllm has. No others can be registered."""

    @staticmethod
    def get_supported_archs() -> frozenset[str]:
        """The names of the architectures in config.json."""
        from shmllm.models.registry import ARCHITECTURES

        return frozenset(ARCHITECTURES)

    @staticmethod
    def register_model(model_arch: str, model_cls: Any) -> NoReturn:
        """Not supported: an engine runs shmllm's own models only."""
        raise NotImplementedError(
            f"shmllm cannot run {model_arch} of the caller: write a model into shmllm/models, and "
            "add a line to its registry.py"
        )


def get_ip() -> NoReturn:
    """Not supported: shmllm opens no ports."""
    _refuse("get_ip")


def trainer_init(*arguments: Any, **options: Any) -> NoReturn:
    """Not supported: new weights come through shared memory."""
    _refuse("trainer_init")


def packed_nccl_broadcast_producer(*arguments: Any, **options: Any) -> NoReturn:
    """Not supported: new weights come through shared memory."""
    _refuse("packed_nccl_broadcast_producer")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"vllm's {name} has no counterpart in shmllm; the nearest thing is: {UNUSABLE[name]}"
    )
