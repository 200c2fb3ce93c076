"""vLLM's groups of processes beside torch's default group, by which trainers broadcast weights.

Both ends have to be these classes: a trainer and the class that extends the engine's workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shmllm.transfer.process_groups import make_gloo, make_nccl
from shmllm.transfer.rendezvous import join_store, serve_store

TIMEOUT_S = 300
"""How long processes wait for each other, in seconds."""


@dataclass(frozen=True)
class StatelessProcessGroup:
    """Processes that know each other by a store of keys, which rank 0 serves.

    Attributes:
        rank: the number of this process.
        world_size: the number of processes.
        store: a torch.distributed.TCPStore.
    """

    rank: int
    world_size: int
    store: Any

    @staticmethod
    def create(
        host: str, port: int, rank: int, world_size: int, store_timeout: int = TIMEOUT_S
    ) -> StatelessProcessGroup:
        """Join a group. Rank 0 listens on `host` only.

        Args:
            host, port: where rank 0 listens.
            rank: the number of this process.
            world_size: the number of processes.
            store_timeout: how long to wait for rank 0, in seconds.

        Raises:
            RequestError: rank 0 does not answer in time, or cannot listen there.
        """
        make_store = join_store if rank else serve_store
        return StatelessProcessGroup(rank, world_size, make_store(host, port, store_timeout))


class PyNcclCommunicator:
    """Operations on tensors of one device in all processes of a group: by NCCL on GPUs, by gloo on
    CPUs. All processes have to make one, and then call the same operations in the same order.

    Args:
        group: the processes.
        device: of the tensors: a torch.device, its name, or the number of a GPU.
        library_path: ignored, because torch loads NCCL.

    Attributes:
        rank, world_size: of this process in the group.
        device: a torch.device.

    Raises:
        RuntimeError: the processes did not connect in time.
        RequestError: this torch has no NCCL.
    """

    available, disabled = True, False

    def __init__(
        self, group: StatelessProcessGroup, device: Any, library_path: str | None = None
    ) -> None:
        import torch

        is_number = isinstance(device, int)
        self.device = torch.device(f"cuda:{device}" if is_number else device)
        self.rank, self.world_size = group.rank, group.world_size
        make = make_gloo if self.device.type == "cpu" else make_nccl
        self._group: Any = make("pynccl", group.store, self.rank, self.world_size, TIMEOUT_S)
        self.all_reduce(torch.zeros(1, device=self.device))  # NCCL connects now

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Send a tensor of the process `src`, or receive it in a tensor of the same shape and
        dtype. On a GPU the stream waits for that, not this process.

        Raises:
            RuntimeError: a process has ended, or did not call this in time.
        """
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._run(lambda: self._group.broadcast([tensor], options), stream)

    def all_reduce(self, in_tensor: Any, stream: Any = None) -> Any:
        """Return the sum of a tensor over all processes. Raises as `broadcast`."""
        total = in_tensor.clone()
        self._run(lambda: self._group.allreduce([total]), stream)
        return total

    def destroy(self) -> None:
        """Leave the group. Idempotent."""
        group, self._group = self._group, None
        if hasattr(group, "abort"):
            group.abort()

    def _run(self, begin: Any, stream: Any) -> None:
        import torch

        with torch.cuda.stream(stream):  # None, and a machine without a GPU: no other stream
            begin().wait()
