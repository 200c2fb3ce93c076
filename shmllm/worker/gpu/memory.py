"""The share of a GPU's memory that the KV cache gets.

This module owns the measurement of the memory that an engine needs besides the cache, and the
numbers in messages. It must not know what a step computes: the caller passes a step to run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from shmllm.config.engine import CacheConfig
from shmllm.worker.arena import Arena
from shmllm.worker.gpu.device import Device
from shmllm.worker.memory import MIB, CacheShape, CacheSize, fit_kv_cache

logger = logging.getLogger(__name__)

MOST_BLOCKS = 2**20
"""The largest number of blocks of a cache whose size is not configured: the host keeps an object of
0.1 KB for each block that was used, and a model that is small enough for more needs no more."""
LAUNCH_BYTES = 32 * 2**10
LAUNCHES = 12
"""About how many launches a layer has."""
MANY_LAUNCHES = 30
"""How many a layer has whose attention lists entries, with its residual streams."""
GRAPHS_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of a device's memory before the KV cache is allocated, in bytes.

    Attributes:
        total: the device's memory.
        others: the memory that was in use before the engine began, with its CUDA context.
        weights: the memory of the weights.
        steps: the most that a step takes, whatever its requests ask for, with what stays allocated
            between steps.
        graphs: the estimated memory of CUDA graphs.
        images: the estimated memory of images' embeddings and of what computes them.
        fraction: the fraction of the total that the engine may use.
    """

    total: int
    others: int
    weights: int
    steps: int
    graphs: int
    images: int
    fraction: float

    @property
    def left(self) -> int:
        """The memory left for keys and values. Memory of other processes does not count as used:
        two engines with a fraction of 0.4 each share a device."""
        allowed = min(int(self.total * self.fraction), self.total - self.others)
        return allowed - self.weights - self.steps - self.graphs - self.images

    def __str__(self) -> str:
        """Return one line with all numbers, in MiB."""
        images = f", images {_mib(self.images)} (estimated)" if self.images else ""
        return (
            f"of {_mib(self.total)} MiB on the device, gpu_memory_utilization={self.fraction:g} is "
            f"{_mib(int(self.total * self.fraction))}; others have {_mib(self.others)}, weights "
            f"{_mib(self.weights)}, steps {_mib(self.steps)}, graphs {_mib(self.graphs)} "
            f"(estimated){images}; {_mib(self.left)} MiB are left for keys and values"
        )


class DeviceMemory:
    """A device's memory. It must be made before the engine allocates memory of the device.

    Args:
        device: the device.
    """

    kind = "device memory"
    is_lazy = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free_at_first = device.free_bytes()

    def free_bytes(self) -> int:
        return self._device.free_bytes()

    def used_bytes(self) -> int:
        """Return the memory that was allocated since this object was made, in bytes. Allocations of
        other processes since then count, too."""
        return max(self._free_at_first - self._device.free_bytes(), 0)

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        return self._device.make_arena(num_bytes, purpose)

    def trim(self) -> None:
        self._device.trim()

    def size_cache(
        self,
        config: CacheConfig,
        shape: CacheShape,
        max_model_len: int,
        weight_bytes: int,
        graph_bytes: int,
        profile: Callable[[], None],
        image_bytes: int = 0,
    ) -> CacheSize:
        """Compute the size of the KV cache from the memory that the largest step leaves.

        Args:
            config: the configuration of the cache. If it says the size, the cache gets that, and
                no step is run.
            shape: the division of the cache.
            max_model_len: the configured length, in tokens.
            weight_bytes: the memory of all weights.
            graph_bytes: the estimate of `estimate_graph_bytes`.
            profile: runs a step of `max_num_batched_tokens` tokens of `max_num_seqs` requests that
                all get a token sampled, without the KV cache, which does not exist yet, and
                allocates what the parameters of requests may make a step allocate.
            image_bytes: the estimate of `items.item_bytes`.

        Raises:
            EngineStartError: see `fit_kv_cache`; the message has all the numbers.
        """
        given = config.given_bytes(shape.bytes_for)
        if given is not None:
            return fit_kv_cache(given, shape, max_model_len)
        estimated = graph_bytes, image_bytes
        use = self._measure(config.gpu_memory_utilization, weight_bytes, estimated, profile)
        logger.info("memory: %s", use)
        origin = (
            f"; {use}; raise gpu_memory_utilization, or lower max_num_batched_tokens or "
            "max_num_seqs"
        )
        size = fit_kv_cache(use.left, shape, max_model_len, origin)
        if not shape.num_buffers:
            return size
        most = max(MOST_BLOCKS, shape.blocks_for(max_model_len) + 1)
        num_blocks = min(size.num_blocks, most)
        return CacheSize.of(shape, num_blocks, size.max_model_len, size.warning)

    def _measure(
        self,
        fraction: float,
        weight_bytes: int,
        estimated: tuple[int, int],
        profile: Callable[[], None],
    ) -> DeviceUse:
        device = self._device
        device.synchronize()
        device.trim()
        device.reset_peak()
        before = self.used_bytes() - device.allocated_bytes()
        profile()
        device.synchronize()
        # On a GPU the second is larger: torch's allocator keeps freed memory.
        used = max(before + device.peak_bytes(), self.used_bytes())
        total = device.total_bytes()
        others, steps = total - self._free_at_first, max(used - weight_bytes, 0)
        return DeviceUse(total, others, weight_bytes, steps, *estimated, fraction)


def estimate_graph_bytes(num_captured: int, launches: int = LAUNCHES) -> int:
    """Estimate the memory of CUDA graphs, in bytes. The driver keeps a copy of each launch, and
    libraries allocate workspaces; the graphs allocate no tensors.

    Args:
        num_captured: the number of captured layers, each counted once for each size at which it is.
        launches: how many launches a layer has.
    """
    return GRAPHS_BYTES + num_captured * launches * LAUNCH_BYTES if num_captured else 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f}"
