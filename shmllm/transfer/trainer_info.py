"""How a trainer asks for its end of a backend: one class for each, with the name `backend`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

TIMEOUT_S = 60.0
"""The longest time that one end waits for the other one, in seconds."""
BUFFER_BYTES = 2**30
NUM_BUFFERS = 2


@dataclass
class TrainerInitInfo:
    """
    Attributes:
        rank: the rank of this process among those of the trainer. Rank 0 sends; the others only
            iterate over their source, which may gather the tensors from all of them.
    """

    backend: ClassVar[str] = ""
    rank: int = field(default=0, kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    """Through shared memory, by an `LLM` in the trainer's process."""

    backend: ClassVar[str] = "shm"


@dataclass
class IPCTrainerInitInfo(TrainerInitInfo):
    """By CUDA IPC handles of the trainer's tensors, which lie on the engine's GPU.

    Attributes:
        packed: copy many tensors into a buffer and send its handle, instead of one for each.
        packed_buffer_size_bytes: the size of the buffer; a larger tensor has one for itself.
    """

    backend: ClassVar[str] = "ipc"
    packed: bool = False
    packed_buffer_size_bytes: int = BUFFER_BYTES


@dataclass
class NCCLTrainerInitInfo(TrainerInitInfo):
    """By NCCL's broadcast from the trainer's current GPU.

    Attributes:
        master_address: the address of the trainer's host, on which it listens.
        master_port: its port; 0 takes a free one.
        world_size: 1 and the number of all workers of all engines (`LLM.get_world_size`).
        packed: send many tensors in one broadcast.
        packed_buffer_size_bytes: the size of a buffer; a larger tensor is sent by itself.
        packed_num_buffers: how many broadcasts are under way at a time.
        timeout_s: the longest time that one end waits for the other one, in seconds.
    """

    backend: ClassVar[str] = "nccl"
    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = BUFFER_BYTES
    packed_num_buffers: int = NUM_BUFFERS
    timeout_s: float = field(default=TIMEOUT_S, kw_only=True)


@dataclass
class GlooTrainerInitInfo(NCCLTrainerInitInfo):
    """By gloo's broadcast from the trainer's CPU; see `NCCLTrainerInitInfo`."""

    backend: ClassVar[str] = "gloo"
