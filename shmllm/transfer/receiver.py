"""The engine's end of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shmllm.transfer.update_info import UpdateInfo


@dataclass(frozen=True)
class Place:
    """Where an engine receives weights.

    Attributes:
        backend: the name of the backend.
        device: the torch.device of the model.
        num_workers: the number of processes of the engine.
        put: gets each received tensor with its name, and copies it before it returns. The tensor
            may have any shape; its elements count.
    """

    backend: str
    device: Any
    num_workers: int
    put: Callable[[str, tuple[int, ...], Any], None]


class Receiver(Protocol):
    """Receives the weights of a backend. No method waits for the trainer.

    Every method raises RequestError if what it got is not valid, or the trainer is gone. The
    receiver is then closed.
    """

    def __init__(self, place: Place) -> None: ...

    def open(self, init_info: Mapping[str, Any]) -> None:
        """Begin to connect with the trainer; `progress` says when that is done."""

    def read_update(self, update_info: Mapping[str, Any]) -> UpdateInfo:
        """The update_info of this backend, checked. It changes nothing."""

    def receive(self, update: UpdateInfo) -> None:
        """Begin to receive tensors; `progress` puts them where they belong."""

    def progress(self) -> int:
        """Go on with what was begun. Returns 0 if that is done, and otherwise a number that falls
        when something has arrived."""

    def close(self) -> None:
        """Disconnect from the trainer. Idempotent."""
