"""The backend "shm": the trainer hands tensors to an `LLM`, which sends them through shared memory
or, from the engine's own GPU, through memory of that GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmllm.errors import RequestError
from shmllm.transfer.receiver import Place
from shmllm.transfer.sender import Sender as BaseSender
from shmllm.transfer.update_info import UpdateInfo


class Receiver:
    """The engine's end. It connects with nobody: the front end sends the tensors."""

    def __init__(self, place: Place) -> None:
        pass

    def open(self, init_info: Mapping[str, Any]) -> None:
        if init_info:
            raise RequestError(f"the backend 'shm' takes no init_info, got {dict(init_info)!r}")

    def read_update(self, update_info: Mapping[str, Any]) -> UpdateInfo:
        raise RequestError(
            "the backend 'shm' takes the tensors themselves: call update_weights with (name, "
            "tensor) pairs, or choose another backend by weight_transfer_config"
        )

    def receive(self, update: UpdateInfo) -> None:
        """Nothing is received here."""

    def progress(self) -> int:
        return 0

    def close(self) -> None:
        """There is nothing to close."""


class Sender(BaseSender):
    """The trainer's end. Its client must be an `LLM`, started here or attached, of an engine with
    any backend."""

    def connect(self) -> None:
        if not hasattr(self.client.target, "collective_rpc"):
            raise RequestError("the backend 'shm' needs an LLM as its client")

    def transmit(self) -> None:
        self.client.target.update_weights(self.checked_pairs())
