"""Names that clients import and use only where they are asked to: here they refuse.

LoRA adapters, and what TRL's server mode needs.
"""

from __future__ import annotations

from typing import Any, NoReturn


class _Absent:
    """Clients import these to have them, and use them only where they are asked to."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _refuse(type(self).__name__)


class LoRARequest(_Absent):
    """Not here."""


def get_ip() -> NoReturn:
    """Not here: shmllm opens no ports."""
    _refuse("get_ip")


def trainer_init(*arguments: Any, **options: Any) -> NoReturn:
    """Not here: weights come through shared memory."""
    _refuse("trainer_init")


def packed_nccl_broadcast_producer(*arguments: Any, **options: Any) -> NoReturn:
    """Not here: weights come through shared memory."""
    _refuse("packed_nccl_broadcast_producer")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(f"vllm's {name} has no counterpart in shmllm")
