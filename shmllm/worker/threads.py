"""How many compute threads a step is worth.

Threads sleep between two operators if they are not needed soon, so that they take no core from
others, and waking one costs some 20 us. Below a certain work per layer one thread is faster
than two, and leaves a core to the front end. Owns the estimate of that work and torch's number
of threads. Must not know what a step computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shmllm.models.config import ModelConfig

BYTES_PER_S = 25e9
"""What one core reads, roughly."""

FLOPS = 200e9
"""What one core computes, roughly."""

WORTH_SHARING_S = 200e-6
"""Work per layer from which on all threads are used. Measured with the 4 M model of
tools/make_model.py on two cores: at 4 requests one thread gives 1.7 times the tokens a second of
two, at 16 the same, at 64 two give 1.4 times those of one."""


class StepThreads:
    """
    Args:
        config: of the model.
        itemsize: bytes of a weight.
        num_threads: at most.
    """

    def __init__(self, config: ModelConfig, itemsize: int, num_threads: int) -> None:
        attention = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
        weights = config.hidden_size * (attention + 3 * config.intermediate_size)
        self._read_s = weights * itemsize / BYTES_PER_S
        self._multiply_s = 2 * weights / FLOPS
        self._attend_s = 2 * config.num_kv_heads * config.head_dim * itemsize / BYTES_PER_S
        self._most = num_threads
        torch.set_num_threads(num_threads)

    @contextmanager
    def share(self, num_tokens: int, num_context_tokens: int) -> Iterator[None]:
        """Compute a step of that many tokens, whose requests' contexts have so many."""
        products_s = max(self._read_s, num_tokens * self._multiply_s)
        seconds = products_s + num_context_tokens * self._attend_s
        if seconds >= WORTH_SHARING_S:
            yield
            return
        torch.set_num_threads(1)  # 0.1 us
        try:
            yield
        finally:  # an engine in the caller's process leaves it as it was
            torch.set_num_threads(self._most)
