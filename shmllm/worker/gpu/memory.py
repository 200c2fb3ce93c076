"""What of a GPU's memory the KV cache gets, and who has the rest.

Owns the measurement of what an engine needs besides the cache, and the numbers in messages. Must
not know what a step computes: it is given one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from shmllm.config.engine import CacheConfig
from shmllm.worker.arena import Arena
from shmllm.worker.gpu.device import Device
from shmllm.worker.memory import MIB, CacheSize, fit_kv_cache

logger = logging.getLogger(__name__)

MOST_BLOCKS = 2**20
"""Of a cache whose size nobody gave: the host has an object of 0.1 KB for each, and a model that
is small enough for more of them has no use for them."""
LAUNCH_BYTES = 32 * 2**10
GRAPHS_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Bytes of a device, before there is a KV cache.

    Attributes:
        total: that it has.
        others: that were taken before the engine began; its own context counts among them.
        weights: of the model.
        steps: the most that a step takes, and all that stays between steps.
        graphs: that graphs will take.
        part: of the total, that the engine may use.
    """

    total: int
    others: int
    weights: int
    steps: int
    graphs: int
    part: float

    @property
    def left(self) -> int:
        """For keys and values. What others have is theirs, and does not count as used: two
        engines with a part of 0.4 each share a device."""
        allowed = min(int(self.total * self.part), self.total - self.others)
        return allowed - self.weights - self.steps - self.graphs

    def __str__(self) -> str:
        """One line, in MiB."""
        return (
            f"of {_mib(self.total)} MiB on the device, gpu_memory_utilization={self.part:g} is "
            f"{_mib(int(self.total * self.part))}; others have {_mib(self.others)}, weights "
            f"{_mib(self.weights)}, steps {_mib(self.steps)}, graphs {_mib(self.graphs)} "
            f"(estimated); {_mib(self.left)} MiB are left for keys and values"
        )


class DeviceMemory:
    """A device as a `MemoryPool`. To be made before anything else takes memory of it.

    Args:
        device: whose memory it is.
    """

    kind = "device memory"
    is_lazy = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free_at_first = device.free_bytes()

    def free_bytes(self) -> int:
        return self._device.free_bytes()

    def used_bytes(self) -> int:
        """What was taken since this was made; by others too, if they did meanwhile."""
        return max(self._free_at_first - self._device.free_bytes(), 0)

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        return self._device.make_arena(num_bytes, purpose)

    def trim(self) -> None:
        self._device.trim()

    def size_cache(
        self,
        config: CacheConfig,
        bytes_per_block: int,
        max_model_len: int,
        weights: Arena,
        graph_bytes: int,
        profile: Callable[[], None],
    ) -> CacheSize:
        """Run the largest step there can be, and give what it and all else leave to the cache.

        Args:
            config: a given number of bytes is taken as it is, and nothing is run.
            bytes_per_block: in all layers.
            max_model_len: wanted; less if the cache holds less.
            weights: the model's.
            graph_bytes: that graphs will take; see `estimate_graph_bytes`.
            profile: computes a step of `max_num_batched_tokens` tokens of `max_num_seqs` requests,
                all of which get a token sampled. Its keys and values go nowhere.

        Raises:
            EngineStartError: not even one block for one sequence fits; has all the numbers.
        """
        if config.memory_bytes is not None:
            return fit_kv_cache(
                config.memory_bytes, config.block_size, bytes_per_block, max_model_len
            )
        use = self._measure(config.gpu_memory_utilization, weights, graph_bytes, profile)
        logger.info("memory: %s", use)
        origin = (
            f"; {use}; raise gpu_memory_utilization, or lower max_num_batched_tokens or "
            "max_num_seqs"
        )
        size = fit_kv_cache(use.left, config.block_size, bytes_per_block, max_model_len, origin)
        return replace(size, num_blocks=min(size.num_blocks, _most_blocks(config, max_model_len)))

    def _measure(
        self, part: float, weights: Arena, graph_bytes: int, profile: Callable[[], None]
    ) -> DeviceUse:
        device = self._device
        device.synchronize()
        device.trim()
        device.reset_peak()
        before = self.used_bytes() - device.allocated_bytes()
        profile()
        device.synchronize()
        # On a GPU the second is the larger one: torch's allocator keeps what it got.
        used = max(before + device.peak_bytes(), self.used_bytes())
        total, held = device.total_bytes(), weights.resident_bytes
        others = total - self._free_at_first
        return DeviceUse(total, others, held, max(used - held, 0), graph_bytes, part)


def estimate_graph_bytes(num_graphs: int, num_layers: int) -> int:
    """What graphs take that allocate nothing themselves: the driver's copy of each launch, about a
    dozen a layer, and the libraries' workspaces.

    Args:
        num_graphs: sizes at which all layers are captured, in one graph or in pieces.
        num_layers: of the model.
    """
    return GRAPHS_BYTES + num_graphs * num_layers * 12 * LAUNCH_BYTES if num_graphs else 0


def _most_blocks(config: CacheConfig, max_model_len: int) -> int:
    return max(MOST_BLOCKS, -(-max_model_len // config.block_size) + 1)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f}"
