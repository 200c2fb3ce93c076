"""Group: a trainer (rank 0) and engines that get its broadcasts, by gloo or by NCCL.

The group is an object of its own beside torch.distributed's default group, which a trainer may have
for itself.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

from shmllm.errors import RequestError
from shmllm.transfer.process_groups import make_gloo, make_nccl
from shmllm.transfer.trainer_info import NCCLWeightTransferInitInfo

POLL_S = 0.0002
CLOSE_POLL_S = 0.05


class BrokenConnectionError(RequestError):
    """The other end is gone, or did not answer in time."""


class Group:
    """
    Args:
        backend: "gloo" or "nccl".
        store: the trainer's store.
        rank, size: of this process; the trainer has rank 0.
        device: the torch.device of the broadcast tensors: the CPU for gloo, a GPU for NCCL.
        info: the deadlines, and the number of broadcasts at a time.

    Raises:
        RequestError: the backend does not exist here, or the others do not connect in time.
    """

    def __init__(
        self,
        backend: str,
        store: Any,
        rank: int,
        size: int,
        device: Any,
        info: NCCLWeightTransferInitInfo,
    ) -> None:
        distributed: Any = import_module("torch.distributed")

        self._options = distributed.BroadcastOptions()
        self._options.rootRank = 0
        self._options.timeout = timedelta(seconds=info.broadcast_s)
        self._works: list[Any] = []
        self._group: Any = None
        try:
            if backend == "gloo":
                count = info.packed_num_buffers
                self._group = make_gloo("group", store, rank, size, info.timeout_s, count)
            else:
                self._group = make_nccl("group", store, rank, size, info.broadcast_s)
            self._connect(device, info.timeout_s)
        except RuntimeError as problem:
            raise RequestError(f"{backend} cannot connect: {first_line(problem)}") from problem

    def _connect(self, device: Any, timeout_s: float) -> None:
        """One broadcast, because NCCL connects at the first one."""
        import torch

        work = self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))
        deadline = time.monotonic() + timeout_s
        while not is_done(work):
            if time.monotonic() > deadline:
                self.close()
                raise BrokenConnectionError(f"the group did not connect within {timeout_s:g} s")
            time.sleep(POLL_S)

    def broadcast(self, buffer: Any) -> Any:
        """Begin to send or to receive a buffer.

        Args:
            buffer: (bytes,) uint8; it must stay as it is until `is_done`.

        Returns:
            What `is_done` takes.
        """
        self._works = [work for work in self._works if not work.is_completed()]
        work = self._group.broadcast([buffer], self._options)
        self._works.append(work)
        return work

    def close(self) -> None:
        """Leave the group. Idempotent. gloo does not interrupt a broadcast: one that is under way
        ends when the others have left, or at its deadline, and the group with it."""
        group, self._group = self._group, None
        works, self._works = self._works, []
        if group is None:
            return
        if hasattr(group, "abort"):
            group.abort()  # NCCL ends what is under way
        if not all(work.is_completed() for work in works):
            # The destructor waits for broadcasts, and an interpreter that ends meanwhile would
            # abort the process: so this thread waits for them without calling it.
            threading.Thread(
                target=_wait_for, args=(works, group), name="shmllm-close-group", daemon=True
            ).start()


def _wait_for(works: list[Any], group: Any) -> None:
    """Keep a group until its broadcasts have ended."""
    while not all(work.is_completed() for work in works):
        time.sleep(CLOSE_POLL_S)


def is_done(work: Any) -> bool:
    """Whether a broadcast has ended.

    Raises:
        BrokenConnectionError: it failed.
    """
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError as problem:
        raise BrokenConnectionError(
            f"the connection between trainer and engines broke: {first_line(problem)}"
        ) from problem
    return True


def first_line(problem: Exception) -> str:
    """The first line of an error's message, without the place in torch's sources."""
    text = str(problem).partition("\n")[0]
    return text.partition("] ")[2] if text.startswith("[/") else text
