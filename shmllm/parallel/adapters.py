"""The low-rank adapters of all ranks of a group: each has its share of those of rank 0."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from torch import Tensor

from shmllm.models.fields import Fields
from shmllm.parallel.staging import StagingWriter
from shmllm.worker.adapters import Adapter, AdapterMaker
from shmllm.worker.arrays import LongArray


class GroupAdapters:
    """See `worker.adapters.GroupAdapterMaker`, in rank 0. The other ranks free their shares of an
    adapter that nothing in this process refers to any more when `drop_unused` is called, or before
    the next adapter is made.

    Args:
        own: makes the adapters of this process.
        elsewhere: `Ranks.elsewhere`.
        staging: the memory for tensors.
    """

    def __init__(
        self, own: AdapterMaker, elsewhere: Callable[..., list[Any]], staging: StagingWriter
    ) -> None:
        self._own = own
        self._elsewhere = elsewhere
        self._staging = staging
        self._unused: SimpleQueue[int] = SimpleQueue()  # any allocation may put something there

    def adapter_of(self, config: Fields, tensors: Fields) -> Adapter:
        """See `AdapterMaker.adapter_of`. All ranks have the adapter, or none."""
        self.drop_unused()
        adapter = self._own.adapter_of(config, tensors)
        number = adapter.number
        weakref.finalize(adapter, self._unused.put, number).atexit = False
        with closing(self._staging.batches(tensors.values.items())) as batches:
            for batch in batches:
                self._elsewhere("take_lora", number, batch)
        others = self._elsewhere("make_lora", number, config)
        adapter.entries = np.concatenate([adapter.entries, *others])
        return adapter

    def drop_unused(self) -> None:
        """See `GroupAdapterMaker.drop_unused`."""
        numbers = []
        with suppress(Empty):
            while True:
                numbers.append(self._unused.get_nowait())
        if numbers:
            self._elsewhere("drop_loras", numbers)


class RankAdapters:
    """The shares of another rank than 0, by the numbers that the adapters have in rank 0.

    Args:
        own: makes the shares.
    """

    def __init__(self, own: AdapterMaker) -> None:
        self._own = own
        self._adapters: dict[int, Adapter] = {}
        self._tensors: dict[int, dict[str, Tensor]] = {}

    def take(self, number: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors of an adapter.

        Args:
            number: the adapter's.
            tensors: some of its tensors, under the names of adapter_model.safetensors.
        """
        taken = self._tensors.setdefault(number, {})
        taken |= {name: tensor.clone() for name, tensor in tensors}

    def make(self, number: int, config: Fields) -> LongArray:
        """Make the share of an adapter, of the tensors that were taken. Returns its `entries`.

        Args:
            number: the adapter's.
            config: the fields of adapter_config.json.
        """
        tensors = Fields(self._tensors.pop(number), config.where)
        self._adapters[number] = self._own.adapter_of(config, tensors)
        return self._adapters[number].entries

    def drop(self, numbers: Sequence[int]) -> None:
        """Free the shares of adapters, of which some may not have been made."""
        for number in numbers:
            self._adapters.pop(number, None)
            self._tensors.pop(number, None)

    def of(self, numbers: Sequence[int]) -> list[Any]:
        """Return the share of each adapter; None for -1."""
        return [None if number < 0 else self._adapters[number] for number in numbers]
