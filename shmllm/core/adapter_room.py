"""Which adapters the running requests compute with: a bounded number of different ones.

This module must not know where adapters are stored, nor what they contain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from shmllm.core.request import Request

NO_ADAPTER = 0


def _is_ready(request: Request) -> str | None:
    """The default of `prepare`, for engines without adapters."""
    return None


class AdapterRoom:
    """
    Args:
        max_loras: the largest number of different adapters.

    Attributes:
        prepare: gives a waiting request its adapter; returns why that is not possible, or None.
    """

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._num_running: Counter[int] = Counter()
        self.prepare: Callable[[Request], str | None] = _is_ready

    @property
    def used(self) -> Container[int]:
        """The adapters of the running requests."""
        return self._num_running.keys()

    @property
    def allowed(self) -> Container[int] | None:
        """The adapters with which a request may be admitted now; None: any."""
        if not self._max_loras or len(self._num_running) < self._max_loras:
            return None
        return {NO_ADAPTER, *self._num_running}

    def enter(self, request: Request) -> None:
        """Count a request that is admitted."""
        if request.lora_id != NO_ADAPTER:
            self._num_running[request.lora_id] += 1

    def leave(self, request: Request) -> None:
        """Count a request that no longer runs."""
        if request.lora_id != NO_ADAPTER:
            self._num_running[request.lora_id] -= 1
            if not self._num_running[request.lora_id]:
                del self._num_running[request.lora_id]
