"""Connection: an engine's place in the group of a trainer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

from shmllm.transfer.group import Group, first_line
from shmllm.transfer.rendezvous import ANSWER_S, announce, is_gone, join_store
from shmllm.transfer.trainer_info import NCCLWeightTransferInitInfo

WATCH_S = 0.2
"""The time between two looks at the trainer, in seconds."""


class Connection:
    """A thread connects, because that takes as long as the trainer and all engines need; then it
    looks whether the trainer is still there, which NCCL does not notice, and gloo not always.

    Args:
        info: how to join.
        backend: "gloo" or "nccl".
        num_workers: the number of processes that the engine stands for.
        device: the torch.device of received buffers.

    Attributes:
        gone: why nothing will arrive any more; empty as long as the trainer is there.
    """

    def __init__(
        self, info: NCCLWeightTransferInitInfo, backend: str, num_workers: int, device: Any
    ) -> None:
        self._info = info
        self._joined: Future[Group] = Future()
        self._is_closed = threading.Event()
        self.gone = ""
        arguments = (backend, num_workers, device)
        threading.Thread(
            target=self._run, args=arguments, name="shmllm-transfer", daemon=True
        ).start()

    @property
    def is_joined(self) -> bool:
        """Whether the attempt to join has ended."""
        return self._joined.done()

    def group(self) -> Group:
        """The group, after `is_joined`. Raises RequestError if it was not possible to join."""
        return self._joined.result()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._is_closed.set()
        self._joined.add_done_callback(_close_group)

    def _run(self, backend: str, num_workers: int, device: Any) -> None:
        info = self._info
        try:
            store = join_store(info.master_address, info.master_port, info.timeout_s)
            deadline = time.monotonic() + info.timeout_s + ANSWER_S
            rank, size = announce(store, num_workers, deadline)
            group = Group(backend, store, rank, size, device, info)
        except BaseException as problem:
            self._joined.set_exception(problem)
            return
        self._joined.set_result(group)
        del group
        try:
            while not self._is_closed.wait(WATCH_S):
                if is_gone(store):
                    self.gone = "the trainer has ended the connection"
                    return
        except RuntimeError as problem:
            self.gone = f"the trainer is gone: {first_line(problem)}"


def _close_group(joined: Future[Group]) -> None:
    if joined.exception() is None:
        joined.result().close()
