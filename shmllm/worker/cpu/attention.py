"""The attention of heads on a CPU: its kernels, with the norms, the rotation and the cache writes
before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shmllm.models.attention import AttentionHeads
from shmllm.models.config import ModelConfig
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.layers import HeadNorm, Linear
from shmllm.models.mixer_specs import Growth, QKNorm
from shmllm.worker.arrays import IntArray, LongArray
from shmllm.worker.cpu.buffers import CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache, LayerCache, head_layout
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.products import dtype_name
from shmllm.worker.cpu.relations import RelationOps
from shmllm_kernels.cpu import Kernel, KernelProgram, word_of_float
from shmllm_kernels.cpu.attention import (
    ATTEND,
    MERGE_SPLITS,
    scratch_bytes,
    split_states_bytes,
)
from shmllm_kernels.cpu.attention_pieces import request_words
from shmllm_kernels.cpu.attention_state import LOG2_E
from shmllm_kernels.cpu.block_indexer import CHOOSE_BLOCKS
from shmllm_kernels.cpu.block_indexer import scratch_bytes as index_scratch_bytes
from shmllm_kernels.cpu.cache_layout import head_words
from shmllm_kernels.cpu.heads import STORE_HEADS
from shmllm_kernels.cpu.row_factors import GATE, GROW
from shmllm_kernels.windows import window_number

_EXTENTS: dict[QKNorm | None, int] = {None: 0, "head": 0, "row": 1, "each": 2}
"""What the kernel that stores heads calls the norms of queries and keys."""


def requests_of_groups(
    inputs: CpuInputs, block_tables: IntArray
) -> dict[tuple[int, Division], LongArray]:
    """Return the step's requests by group of layers and division; see
    `attention_pieces.request_words`.

    Args:
        inputs: the inputs that the kernels read.
        block_tables: (groups, rows, blocks) int32, the block ids of each row's request.
    """
    return {
        (group, division): request_words(
            inputs.first_tokens.ctypes.data,
            inputs.counts.ctypes.data,
            inputs.context_lens.ctypes.data,
            inputs.rows.ctypes.data,
            block_table.ctypes.data,
            block_table.shape[1],
            *(words.ctypes.data for words in pieces),
        )
        for group, block_table in enumerate(block_tables)
        for division, pieces in inputs.pieces.items()
    }


def listed_requests(inputs: CpuInputs, division: Division, lists: Tensor) -> LongArray:
    """Return the words of a step's tokens as requests, whose contexts are lists.

    Args:
        inputs: the inputs that the kernels read.
        division: that of the attention.
        lists: int32 [max_tokens, entries], the entries of all lists of a token side by side.
    """
    assert division.listed is not None, "tokens attend to lists"
    entries = lists.shape[1] // division.listed.num_heads
    tiles, splits = (words.ctypes.data for words in inputs.pieces[division])
    return request_words(
        inputs.token_indices.ctypes.data,
        inputs.token_counts.ctypes.data,
        inputs.listed_lens[division].ctypes.data,
        inputs.token_indices.ctypes.data,
        lists.data_ptr(),
        lists.shape[1],
        tiles,
        splits,
        4 * entries,
    )


def record_growth(
    program: KernelProgram,
    inputs: CpuInputs,
    queries: Tensor,
    width: int,
    growth: Growth,
) -> None:
    """Record the factor of queries by their position.

    Args:
        program: the program to record in.
        inputs: the step's inputs, whose positions it reads.
        queries: [tokens, columns] float32, changed in place.
        width: how many of the columns are queries.
        growth: see `AttentionSpec`.
    """
    rows = [queries.data_ptr(), 4 * queries.shape[1], width]
    factor = [word_of_float(growth.rate), growth.length, growth.offset, word_of_float(growth.power)]
    numbers = [inputs.positions.ctypes.data, *factor]
    program.record(GROW, [inputs.address_of("num_tokens"), *rows, *numbers], label="grow")


class AttentionOps:
    """Records the attention of heads in a kernel program.

    Args:
        program: the program to record in.
        config: the model's configuration.
        buffers: the buffers for the results.
        inputs: the inputs that the kernels read.
        cache: the KV cache.
        requests: the step's requests, see `requests_of_groups`.
        relations: records biases that depend on queries and keys.
    """

    def __init__(
        self,
        program: KernelProgram,
        config: ModelConfig,
        buffers: CpuBuffers,
        inputs: CpuInputs,
        cache: CpuKVCache,
        requests: Mapping[tuple[int, Division], LongArray],
        relations: RelationOps,
    ) -> None:
        self._program = program
        self._relations = relations
        self._config = config
        self._buffers = buffers
        self._inputs = inputs
        self._cache = cache
        self._requests = requests
        self._num_tokens = inputs.address_of("num_tokens")
        self._heads: list[LongArray] = []  # the kernels read them in every step
        self._ones: Tensor | None = None
        layouts = [
            (head_layout(cache.layers[index]), layer.attention.num_heads)
            for index, layer in enumerate(config.layers)
            if layer.attention is not None
        ]
        size = max((scratch_bytes(*each) for each in layouts), default=0)
        self._scratch = torch.empty((program.num_threads, size), dtype=torch.uint8)
        states = max((split_states_bytes(*each) for each in layouts), default=0)
        self._split_states = torch.empty(states, dtype=torch.uint8)
        size = max(map(self._index_scratch_bytes, enumerate(config.layers)), default=0)
        self._index_scratch = torch.empty((program.num_threads, size), dtype=torch.uint8)

    def _index_scratch_bytes(self, place: tuple[int, LayerSpec]) -> int:
        """Return the size of one thread's scratch memory for the indexer of a layer, or 0."""
        index, layer = place
        if layer.attention is None or layer.attention.indexer is None:
            return 0
        cache, heads = self._cache.layers[index], layer.attention.num_kv_heads
        most_blocks = int(self._requests[cache.group, Division.of(layer.attention)][5])
        return index_scratch_bytes(head_layout(cache).index, heads, most_blocks)

    def store(self, qkv: Tensor, attention: AttentionHeads) -> list[int]:
        """Record the operation `models.ops.Ops.store_heads`. Return the addresses of the heads that
        it has written to the cache, or normalised and rotated in their place."""
        spec, cache = attention.spec, self._cache.layers[attention.layer]
        layout = head_layout(cache)
        heads = head_words(layout, spec.num_heads, spec.scale, cache.blocks.stride(0))
        self._heads.append(heads)
        source = [heads.ctypes.data, qkv.data_ptr(), 4 * qkv.shape[1]]
        kernel = STORE_HEADS[layout.stored, dtype_name(attention.dtype)]
        target = cache.blocks.data_ptr() if spec.source is None else 0
        norms = attention.q_norm, attention.k_norm
        storing = self._storing(attention, cache, target, norms)
        self._record("store_heads", kernel, *source, *storing)
        return source

    def choose(
        self, x: Tensor, attention: AttentionHeads, linear: Callable[[Tensor, Linear], Tensor]
    ) -> None:
        """Record the operation `models.ops.Ops.choose_blocks`, with its product."""
        spec, indexer, chosen = attention.spec, attention.indexer, self._buffers.chosen
        assert indexer is not None, "the layer has an indexer"
        assert spec.indexer is not None, "the layer has an indexer"
        assert chosen is not None, "the model has indexers"
        cache = self._cache.layers[attention.layer]
        layout, rows = head_layout(cache), linear(x, indexer.in_proj)
        heads = head_words(layout.index, spec.num_kv_heads, 1.0, cache.blocks.stride(0))
        self._heads.append(heads)
        source = [heads.ctypes.data, rows.data_ptr(), 4 * rows.shape[1]]
        first_key = cache.blocks.data_ptr() + layout.index_offset
        storing = self._storing(attention, cache, first_key, (indexer.q_norm, indexer.k_norm))
        kernel = STORE_HEADS[layout.index.stored, dtype_name(attention.dtype)]
        self._record("store_index_keys", kernel, *source, *storing)
        requests = self._requests[cache.group, Division.of(spec)]
        operands = [
            requests.ctypes.data, *source, self._inputs.positions.ctypes.data, first_key,
            chosen.data_ptr(), spec.indexer.top_k, spec.indexer.size, spec.indexer.num_local,
            self._index_scratch.data_ptr(), self._index_scratch.shape[1],
        ]  # fmt: skip
        self._record("choose_blocks", CHOOSE_BLOCKS[layout.index.stored], *operands)

    def attend(self, qkv: Tensor, attention: AttentionHeads, out: Tensor) -> None:
        """Record the operation `models.ops.Ops.attend`, which writes to ``out``."""
        spec, cache = attention.spec, self._cache.layers[attention.layer]
        blocks, source = cache.blocks, self.store(qkv, attention)
        kinds = head_layout(cache).stored, dtype_name(attention.dtype)
        if spec.growth is not None:
            record_growth(self._program, self._inputs, qkv, spec.query_width, spec.growth)
        division = Division.of(spec)
        requests = self._requests[cache.group, division]
        if spec.indexer is not None:
            assert self._buffers.chosen is not None, "the model has indexers"
            requests = listed_requests(self._inputs, division, self._buffers.chosen)
            self._heads.append(requests)
        operands = [
            self._inputs.address_of_step(division),
            requests.ctypes.data, *source, out.data_ptr(), 4 * out.shape[1], blocks.data_ptr(),
            window_number(spec.window), self._scratch.data_ptr(), self._scratch.shape[1],
            word_of_float((spec.soft_cap or 0.0) * LOG2_E), _address(attention.sinks),
            self._split_states.data_ptr(), self._inputs.address_of_ends(spec.ahead),
            *self._place_of_biases(qkv, attention),
        ]  # fmt: skip
        self._program.record(ATTEND[kinds], operands, label="attend")
        self._program.record(MERGE_SPLITS[kinds], operands, label="merge_splits")
        if spec.gated:
            gates = [qkv.data_ptr() + 4 * (spec.in_width - spec.gate_width), 4 * qkv.shape[1]]
            columns = spec.width // spec.gate_width
            self._record("gate", GATE[spec.gate], out.data_ptr(), spec.width, *gates, columns)

    def _place_of_biases(self, qkv: Tensor, attention: AttentionHeads) -> tuple[int, int, int]:
        """Return the operands of ATTEND for biases, and record those that depend on the tokens."""
        biases = attention.biases
        if attention.relations is not None:
            own = self._relations.record(qkv, attention)
            return own.data_ptr(), 4 * own.stride(1), 4 * own.stride(0)
        if biases is None:
            return 0, 0, 0
        return biases[0, biases.shape[1] // 2 :].data_ptr(), 4 * biases.stride(0), 0

    def _storing(
        self,
        attention: AttentionHeads,
        cache: LayerCache,
        target: int,
        norms: tuple[HeadNorm | None, HeadNorm | None],
    ) -> list[int]:
        """Return the operands of STORE_HEADS behind the addresses of queries, keys and values.

        Args:
            attention: the layer.
            cache: its cache.
            target: the address of the first key there, or 0.
            norms: those of queries and of keys.
        """
        spec, norm = attention.spec, self._config.norm
        angles, rotation = [0, 0], [0, 0]
        if spec.rope is not None:
            angles = [table.data_ptr() for table in self._buffers.angles[spec.rope]]
            rotation = [spec.rope.rotary_dim // 2, int(spec.rope.interleaved)]
        weights = [None if each is None else each.weight for each in norms]
        return [
            *angles, self._inputs.slot_mapping[cache.group].ctypes.data, target,
            *map(_address, weights),
            word_of_float(norm.eps), word_of_float(norm.offset), _EXTENTS[spec.qk_norm],
            *rotation, _address(self._weight_of_values(attention)), int(spec.norms_rotated),
            int(norm.kind == "layer") + int(spec.norms_have_bias),
        ]  # fmt: skip

    def _weight_of_values(self, attention: AttentionHeads) -> Tensor | None:
        """Return the weight of the values' norm, which are all 1; None: they have no norm."""
        if not attention.spec.value_norm:
            return None
        if self._ones is None:
            widest = max(each.value_head_dim for each in self._config.attentions)
            self._ones = torch.ones(widest, dtype=attention.dtype)
        return self._ones

    def _record(self, label: str, kernel: Kernel, *operands: int) -> None:
        self._program.record(kernel, [self._num_tokens, *operands], label=label)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
