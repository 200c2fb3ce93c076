"""Names of vLLM that clients import although shmllm does not support them; their use raises.

They are the names for LoRA adapters and for TRL's server mode.
"""

from __future__ import annotations

from typing import Any, NoReturn


class _Absent:
    """A class that clients can import but not instantiate."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _refuse(type(self).__name__)


class LoRARequest(_Absent):
    """Not supported: shmllm has no LoRA adapters."""


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
    raise NotImplementedError(f"vllm's {name} has no counterpart in shmllm")
