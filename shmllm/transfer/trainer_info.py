"""How a trainer asks for its end of a backend, one class for each with the name `backend`, and what
it tells engines about a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from shmllm.errors import RequestError

TIMEOUT_S = 60.0
"""The longest time that one end waits for the other one, in seconds."""
BUFFER_BYTES = 2**27
"""So small that sending, receiving and staging overlap."""
NUM_BUFFERS = 2
MOST_BUFFERS = 16


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


@dataclass(kw_only=True)
class NCCLWeightTransferInitInfo:
    """How an engine joins a trainer's group; see `NCCLTrainerInitInfo` for the other fields.

    Attributes:
        rank_offset: the number of ranks of the trainer in the group, always 1.

    Raises:
        RequestError: a value is not valid.
    """

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    packed: bool = False
    packed_buffer_size_bytes: int = BUFFER_BYTES
    packed_num_buffers: int = NUM_BUFFERS
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        bounds = {
            "rank_offset": (1, 1),
            "world_size": (2, 2**31),
            "packed_buffer_size_bytes": (1, 2**40),
            "packed_num_buffers": (1, MOST_BUFFERS),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise RequestError(f"{name} must be from {least} to {most}, got {value!r}")
        if type(self.packed) is not bool:
            raise RequestError(f"packed must be True or False, got {self.packed!r}")
        if type(self.master_port) is not int or not 0 <= self.master_port < 2**16:
            raise RequestError(f"master_port is not a port: {self.master_port!r}")
        if not isinstance(self.master_address, str) or not self.master_address:
            raise RequestError(f"master_address is not an address: {self.master_address!r}")
        is_number = isinstance(self.timeout_s, int | float)
        if not is_number or not 0 < self.timeout_s <= 86_400:
            raise RequestError(
                f"timeout_s must be above 0 and at most 86,400, got {self.timeout_s!r}"
            )

    @property
    def bucket_bytes(self) -> int:
        """The largest bucket; 0: one for each tensor."""
        return self.packed_buffer_size_bytes if self.packed else 0

    @property
    def broadcast_s(self) -> float:
        """The longest time that a broadcast may take: it waits for those before it, too."""
        return self.timeout_s * (self.packed_num_buffers + 1)
