"""Names of vLLM that clients import although shmllm does not support them; their use raises.

`vllm_modules.UNUSABLE` lists them with the nearest things. `ModelRegistry` takes families of
shmllm's own kind only.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shmllm.compat.vllm_modules import UNUSABLE


class _Absent:
    """A class that clients can import but not instantiate."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _refuse(type(self).__name__)


class LinearBase(_Absent):
    """Not supported: no layer of shmllm is one."""


class Fp8Config(_Absent):
    """Not supported: no engine has this configuration; see the option `quantization`."""


class LoRAModel(_Absent):
    """Not supported: the engine makes its own form of an adapter."""


class LRUCacheWorkerLoRAManager(_Absent):
    """Not supported: the engine manages its adapters."""


class ModelRegistry:
    """The architectures that shmllm has, and those of plugins."""

    @staticmethod
    def get_supported_archs() -> frozenset[str]:
        """The names of the architectures in config.json."""
        from shmllm.models.registry import known_architectures

        return known_architectures()

    @staticmethod
    def register_model(model_arch: str, model_cls: Any) -> None:
        """Registers a family of shmllm's own kind by its name, "module" or "module:object". A name
        of a class of vLLM's is an error when a model of the architecture is loaded."""
        from shmllm.models.registry import register_model

        if not isinstance(model_cls, str):
            raise NotImplementedError(
                f"shmllm cannot run {model_arch} by a class of the caller: register the name of a "
                "family, which shmllm/models/README.md describes"
            )
        register_model(model_arch, model_cls)


def get_ip() -> NoReturn:
    """Not supported: shmllm opens no ports."""
    _refuse("get_ip")


def cmd_init() -> NoReturn:
    """Not supported: shmllm has no server, so there are no commands that start one."""
    _refuse("cmd_init")


def run_headless(args: Any) -> NoReturn:
    """Not supported: shmllm has no server."""
    _refuse("run_headless")


def build_app(*arguments: Any, **options: Any) -> NoReturn:
    """Not supported: shmllm has no server."""
    _refuse("build_app")


def init_app_state(*arguments: Any, **options: Any) -> NoReturn:
    """Not supported: shmllm has no server."""
    _refuse("init_app_state")


def get_encoding() -> NoReturn:
    """Not supported: the format belongs to another package."""
    _refuse("get_encoding")


def get_adapter_absolute_path(lora_path: str) -> NoReturn:
    """Not supported: `LoRARequest` takes a directory."""
    _refuse("get_adapter_absolute_path")


def trainer_init(*arguments: Any, **options: Any) -> NoReturn:
    """Not supported: a trainer makes its whole end by the factory."""
    _refuse("trainer_init")


def packed_nccl_broadcast_producer(*arguments: Any, **options: Any) -> NoReturn:
    """Not supported: a trainer makes its whole end by the factory."""
    _refuse("packed_nccl_broadcast_producer")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"vllm's {name} has no counterpart in shmllm; the nearest thing is: {UNUSABLE[name]}"
    )
