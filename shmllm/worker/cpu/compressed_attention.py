"""A compressed attention on a CPU: its kernels, and what they read of the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shmllm.models.compressed_attention import CompressedAttention, EntryWeights
from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.config import ModelConfig
from shmllm.models.layers import Linear
from shmllm.worker.arrays import LongArray
from shmllm.worker.cpu.attention import listed_requests
from shmllm.worker.cpu.buffers import CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache, LayerCache, latent_layout
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.latent_attention import record_heads
from shmllm.worker.cpu.products import Products, kind_of
from shmllm_kernels.cpu import Kernel, KernelProgram, compression, indexer, word_of_float
from shmllm_kernels.cpu.compression import COMPRESS, NORMALISE_HEADS, STORE_ROWS
from shmllm_kernels.cpu.latent_attention import (
    ATTEND_LATENTS,
    MERGE_LATENTS,
    scratch_bytes,
    size_words,
    split_states_bytes,
)
from shmllm_kernels.cpu.latent_layout import padded
from shmllm_kernels.cpu.latents import ROTATE, ROTATE_BACK, STORE_LATENTS
from shmllm_kernels.cpu.listed_keys import LIST_KEYS

Words = NDArray[np.int64]


class CompressedAttentionOps:
    """Records compressed attention in a kernel program.

    Args:
        program: the program to record in.
        products: records matrix products there.
        config: the model's configuration.
        buffers: the buffers for the results.
        inputs: the inputs that the kernels read.
        cache: the KV cache.
        requests: the step's requests by group and division, see `attention.request_words`.
    """

    def __init__(
        self,
        program: KernelProgram,
        products: Products,
        config: ModelConfig,
        buffers: CpuBuffers,
        inputs: CpuInputs,
        cache: CpuKVCache,
        requests: Mapping[tuple[int, Division], LongArray],
    ) -> None:
        self._program = program
        self._products = products
        self._buffers = buffers
        self._inputs = inputs
        self._cache = cache
        self._requests = requests
        self._num_tokens = inputs.address_of("num_tokens")
        every = [
            (mixer, index)
            for index, layer in enumerate(config.layers)
            for mixer in layer.mixers
            if isinstance(mixer, CompressedAttentionSpec)
        ]
        size = max((self._scratch_bytes(*each) for each in every), default=0)
        self._scratch = torch.empty((program.num_threads, size), dtype=torch.uint8)
        states = (split_states_bytes(spec.num_heads, spec.head_dim) for spec, _ in every)
        self._split_states = torch.empty(max(states, default=0), dtype=torch.uint8)

    def _scratch_bytes(self, spec: CompressedAttentionSpec, layer: int) -> int:
        """Return the size of the memory that one thread needs for any kernel of a layer."""
        rows = latent_layout(self._cache.layers[layer])
        size = scratch_bytes(rows, spec.num_heads, spec.head_dim)
        if spec.compression is None:
            return size
        entries = self._cache.entries[layer]
        size = max(size, compression.scratch_bytes(spec.head_dim))
        if spec.indexer is not None:
            most_blocks = int(self._requests[entries.group, Division.of(spec)][5])
            most = most_blocks * rows.block_size // spec.compression.rate + 1
            own = indexer.scratch_bytes(latent_layout(entries), spec.indexer.num_heads, most)
            size = max(size, own, compression.scratch_bytes(spec.indexer.head_dim))
        return size

    def _pages(self, cache: LayerCache, layer: int, offset: int = 0) -> Words:
        """Return the `compression.Pages` of what a layer stores, from an offset in its rows on."""
        shift = latent_layout(self._cache.layers[layer]).block_size.bit_length() - 1
        blocks, row_bytes = cache.blocks, latent_layout(cache).row_bytes
        return np.array([blocks.data_ptr() + offset, shift, blocks.stride(0), row_bytes])

    def _step_and_requests(self, group: int, spec: CompressedAttentionSpec) -> list[int]:
        """Return the addresses of the step's sizes and of its requests in a group of layers."""
        return [self._num_tokens, self._requests[group, Division.of(spec)].ctypes.data]

    def _slots(self, cache: LayerCache) -> int:
        return int(self._inputs.slot_mapping[cache.group].ctypes.data)

    def _record(self, label: str, kernel: Kernel, operands: list[int], *keep: object) -> None:
        self._program.record(kernel, operands, keep=[*keep], label=label)

    def store_keys(self, x: Tensor, attention: CompressedAttention) -> None:
        """Record the operation `models.ops.Ops.store_keys`."""
        spec, norm = attention.spec, attention.key_norm
        cache = self._cache.layers[attention.layer]
        address, shift, block_stride, row_bytes = self._pages(cache, attention.layer).tolist()
        keys = x[:, -spec.head_dim :]
        operands = [
            self._num_tokens, keys.data_ptr(), 4 * keys.stride(0), spec.head_dim,
            *self._rotation(spec), norm.weight.data_ptr(), word_of_float(norm.spec.eps),
            self._slots(cache), address, row_bytes, shift, block_stride, spec.head_dim,
        ]  # fmt: skip
        kernel = STORE_LATENTS[latent_layout(cache).stored, kind_of(norm.weight)]
        self._record("store_keys", kernel, operands)

    def compress(self, x: Tensor, attention: CompressedAttention) -> None:
        """Record the operation `models.ops.Ops.compress`."""
        layer, entries = attention.layer, attention.entries
        assert entries is not None, "the layer has entries"
        cache = self._cache.layers[layer]
        pages = self._pages(cache, layer, latent_layout(cache).index_offset)
        operands = [self._num_tokens, x.data_ptr(), 4 * x.stride(0), sum(attention.spec.parts)]
        operands += [self._slots(cache), pages.ctypes.data]
        self._record("store_parts", STORE_ROWS[latent_layout(cache).stored], operands, pages)
        self._compress(attention, entries, 0, 0)
        if attention.indexer is not None:
            offset = latent_layout(self._cache.entries[layer]).index_offset
            self._compress(attention, attention.indexer.entries, 2, offset)

    def _compress(
        self, attention: CompressedAttention, entries: EntryWeights, part: int, offset: int
    ) -> None:
        """Record what makes entries.

        Args:
            attention: the layer.
            entries: their weights.
            part: the index of their values in `CompressedAttentionSpec.parts`; gates are behind.
            offset: where they begin in an entry of the cache.
        """
        spec, layer, norm = attention.spec, attention.layer, entries.norm
        made, rows, target = spec.compression, self._cache.layers[layer], self._cache.entries[layer]
        assert made is not None, "the layer has entries"
        layout = latent_layout(rows)
        source = self._pages(rows, layer, layout.index_offset)
        pages = self._pages(target, layer, offset)
        first, dim = sum(spec.parts[:part]), len(norm.weight)
        sizes = [made.rate, int(made.overlaps), dim, first, first + spec.parts[part]]
        words = np.array([*sizes, spec.rope.rotary_dim // 2])
        angles = self._buffers.window_angles[spec.rope, made.rate]
        operands = [
            *self._step_and_requests(rows.group, spec), self._inputs.positions.ctypes.data,
            source.ctypes.data, words.ctypes.data,
            self._step_and_requests(target.group, spec)[1], pages.ctypes.data,
            entries.bias.data_ptr(), norm.weight.data_ptr(), word_of_float(norm.spec.eps),
            *(table.data_ptr() for table in angles), self._scratch.data_ptr(),
            self._scratch.shape[1],
        ]  # fmt: skip
        kernel = COMPRESS[layout.stored, kind_of(norm.weight)]
        self._record("compress", kernel, operands, source, pages, words)

    def list_keys(
        self,
        x: Tensor,
        latent: Tensor,
        attention: CompressedAttention,
        linear: Callable[[Tensor, Linear], Tensor],
    ) -> None:
        """Record the operation `models.ops.Ops.list_keys`, with its products."""
        spec, layer, listed = attention.spec, attention.layer, self._buffers.listed
        rows = self._cache.layers[layer]
        pages, sizes = self._pages(rows, layer), [spec.window, 0, 0, 0, 0, 0, 0]
        of_entries, index = [0, 0], [0, 0, 0, 0]
        keep: list[object] = [pages]
        if spec.compression is not None:
            entries = self._cache.entries[layer]
            target = self._pages(entries, layer)
            keep.append(target)
            of_entries = [self._step_and_requests(entries.group, spec)[1], target.ctypes.data]
            sizes[1] = spec.compression.rate
            if spec.indexer is not None:
                dim = spec.indexer.head_dim
                sizes[2:4] = spec.indexer.top_k, latent_layout(entries).index_offset
                sizes[4:] = spec.indexer.num_heads, dim, int(padded(dim))
                index = self._index_queries(x, latent, attention, linear)
        words = np.array(sizes)
        operands = [
            *self._step_and_requests(rows.group, spec), self._inputs.positions.ctypes.data,
            pages.ctypes.data, *of_entries, words.ctypes.data, *index, self._scratch.data_ptr(),
            self._scratch.shape[1], listed.data_ptr(), 8 * listed.shape[1],
        ]  # fmt: skip
        kernel = LIST_KEYS[latent_layout(rows).stored]
        self._record("list_keys", kernel, operands, words, *keep)

    def _index_queries(
        self,
        x: Tensor,
        latent: Tensor,
        attention: CompressedAttention,
        linear: Callable[[Tensor, Linear], Tensor],
    ) -> list[int]:
        """Record the products of an indexer; return queries and weights of heads with their
        strides."""
        spec, own = attention.spec, attention.indexer
        assert own is not None, "the layer has an indexer"
        assert spec.indexer is not None, "it is that one"
        weights, queries = linear(x, own.head_weights), linear(latent, own.query)
        self._rotate(queries, spec, spec.indexer.num_heads, spec.indexer.head_dim)
        every = [(each.data_ptr(), 4 * each.stride(0)) for each in (queries, weights)]
        return [word for pair in every for word in pair]

    def attend(self, query: Tensor, attention: CompressedAttention, out: Tensor) -> None:
        """Record the operation `models.ops.Ops.attend_to_lists`."""
        spec, sizes = attention.spec, (attention.spec.num_heads, attention.spec.head_dim)
        rows = [query.data_ptr(), 4 * query.stride(0)]
        operands = [self._num_tokens, *rows, *sizes, word_of_float(spec.norm_eps)]
        self._record("normalise_heads", NORMALISE_HEADS, operands)
        self._rotate(query, spec, *sizes)
        division, cache = Division.of(spec), self._cache.layers[attention.layer]
        lists = self._buffers.listed.view(torch.int32)  # a kernel reads addresses of two words
        layout, requests = latent_layout(cache), listed_requests(self._inputs, division, lists)
        words = size_words(layout, *sizes, spec.scale, cache.blocks.stride(0), "addresses")
        operands = [
            self._inputs.address_of_step(division), requests.ctypes.data, words.ctypes.data,
            *rows, *rows, 4 * spec.head_dim, *rows, cache.blocks.data_ptr(),
            self._scratch.data_ptr(), self._scratch.shape[1], self._split_states.data_ptr(),
            attention.sinks.data_ptr(),
        ]  # fmt: skip
        self._record("attend_lists", ATTEND_LATENTS[layout.stored], operands, words, requests)
        self._record("merge_lists", MERGE_LATENTS, operands)
        self._rotate(query, spec, *sizes, is_back=True)
        weight, width = attention.group_proj, spec.query_width // spec.groups
        record_heads(self._program, self._products, self._num_tokens, query, width, weight, out)

    def _rotate(
        self,
        x: Tensor,
        spec: CompressedAttentionSpec,
        num_heads: int,
        dim: int,
        is_back: bool = False,
    ) -> None:
        """Record the rotation of the last elements of heads, or what undoes it."""
        first = x.data_ptr() + 4 * (dim - spec.rope.rotary_dim)
        operands = [self._num_tokens, first, 4 * x.stride(0), num_heads, 4 * dim]
        label = "rotate_back" if is_back else "rotate"
        kernel = ROTATE_BACK if is_back else ROTATE
        self._record(label, kernel, [*operands, *self._rotation(spec)])

    def _rotation(self, spec: CompressedAttentionSpec) -> list[int]:
        """Return the number of pairs, that they are neighbours, cosines and sines."""
        tables = [table.data_ptr() for table in self._buffers.angles[spec.rope]]
        return [spec.rope.rotary_dim // 2, 1, *tables]
