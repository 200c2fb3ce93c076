"""Where the kernels of recurrent layers find a step's requests and their states."""

from __future__ import annotations

from shmllm.worker.arrays import IntArray
from shmllm.worker.cpu.cache import CpuKVCache
from shmllm.worker.cpu.inputs import CpuInputs


class States:
    """The first operands of kernels of layers with a state.

    Args:
        inputs: the inputs that the kernels read.
        cache: the KV cache, which has the states.
        block_tables: (groups, rows, blocks) int32, the block ids of each row's request.

    Attributes:
        num_tokens: the address of the number of tokens of a step.
    """

    def __init__(self, inputs: CpuInputs, cache: CpuKVCache, block_tables: IntArray) -> None:
        self.num_tokens = inputs.address_of("num_tokens")
        self._cache = cache
        requests = inputs.first_tokens, inputs.counts, inputs.context_lens, inputs.rows
        table = block_tables[cache.state_group]
        self._requests = [
            self.num_tokens, *(array.ctypes.data for array in requests), table.ctypes.data,
            table.shape[1], cache.interval,
        ]  # fmt: skip

    def operands(self, layer: int) -> list[int]:
        """Return the operands of a layer's kernels; see `shmllm_kernels.cpu.states`."""
        states = self._cache.states[layer]
        return [*self._requests, states.data_ptr(), states.shape[1]]
