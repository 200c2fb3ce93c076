"""The low-rank adapters of all ranks of a group: each has its share of those of rank 0."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from shmllm.models.fields import Fields
from shmllm.parallel.staging import StagingWriter
from shmllm.worker.arrays import LongArray

if TYPE_CHECKING:
    from shmllm.worker.cpu.lora import CpuAdapter, CpuLora


class GroupAdapters:
    """See `worker.ranks.StepAdapters`. The other ranks free their shares of an adapter that
    nothing in this process refers to any more, before the next step that has other requests than
    the one before, or before the next adapter is made.

    Args:
        own: the adapters of this process.
        elsewhere: `Ranks.elsewhere`.
        staging: the memory for tensors.
    """

    def __init__(
        self, own: CpuLora, elsewhere: Callable[..., list[Any]], staging: StagingWriter
    ) -> None:
        self._own = own
        self._elsewhere = elsewhere
        self._staging = staging
        self._numbers = itertools.count()
        self._unused: SimpleQueue[int] = SimpleQueue()  # any allocation may put something there

    def adapter_of(self, config: Fields, tensors: Fields) -> CpuAdapter:
        """See `AdapterMaker.adapter_of`. All ranks have the adapter, or none."""
        self._drop_unused()
        adapter, number = self._own.adapter_of(config, tensors), next(self._numbers)
        weakref.finalize(adapter, self._unused.put, number).atexit = False
        with closing(self._staging.batches(tensors.values.items())) as batches:
            for batch in batches:
                self._elsewhere("take_lora", number, batch)
        others = self._elsewhere("make_lora", number, config)
        adapter.entries = np.concatenate([adapter.entries, *others])
        return adapter

    def fill(self, adapters: Sequence[CpuAdapter | None], counts: LongArray) -> None:
        """See `CpuLora.fill`."""
        self._own.fill(adapters, counts)
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Let the others free what is not used here any more."""
        numbers = []
        with suppress(Empty):
            while True:
                numbers.append(self._unused.get_nowait())
        if numbers:
            self._elsewhere("drop_loras", numbers)
