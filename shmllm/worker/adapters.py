"""What the parts of a worker need of low-rank adapters, on any device."""

from __future__ import annotations

from itertools import count
from typing import Protocol

from shmllm.models.fields import Fields
from shmllm.worker.arrays import LongArray

next_number = count().__next__
"""Returns the number of a new adapter."""


class Adapter(Protocol):
    """An adapter in the form in which a device computes with it.

    Attributes:
        number: identifies it among all that this process has made.
        digest, num_bytes: as those of `models.lora.LoraWeights`.
        entries: (ranks, n) int64, where kernels find the share of each rank. One rank makes one
            row, and rank 0 has those of all.
    """

    number: int
    digest: str
    num_bytes: int
    entries: LongArray


class AdapterMaker(Protocol):
    """Brings adapters into the form in which a device computes with them."""

    def adapter_of(self, config: Fields, tensors: Fields) -> Adapter:
        """Return an adapter.

        Args:
            config: the fields of adapter_config.json.
            tensors: the tensors of adapter_model.safetensors.

        Raises:
            EngineStartError: it does not suit the model.
        """


class GroupAdapterMaker(AdapterMaker, Protocol):
    """Makes adapters of which each rank of a group has its share."""

    def drop_unused(self) -> None:
        """Let the other ranks free what this process has freed. Called between steps."""


class OwnAdapters:
    """The adapters of a process that is no rank of a group.

    Args:
        own: makes them.
    """

    def __init__(self, own: AdapterMaker) -> None:
        self.adapter_of = own.adapter_of

    def drop_unused(self) -> None:
        """Do nothing: there are no others."""
