"""A latent attention on a CPU: its kernels, and the products with a matrix for each head."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.layers import Linear
from shmllm.models.mixer_specs import LatentAttentionSpec
from shmllm.worker.arrays import LongArray
from shmllm.worker.cpu.attention import listed_requests, record_growth
from shmllm.worker.cpu.buffers import CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache, latent_layout
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.products import Products, kind_of
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.head_products import MULTIPLY_HEADS
from shmllm_kernels.cpu.indexer import CHOOSE_TOKENS, STORE_INDEX_KEYS, index_words
from shmllm_kernels.cpu.indexer import scratch_bytes as index_scratch_bytes
from shmllm_kernels.cpu.latent_attention import (
    ATTEND_LATENTS,
    MERGE_LATENTS,
    Entries,
    scratch_bytes,
    size_words,
    split_states_bytes,
)
from shmllm_kernels.cpu.latents import ROTATE, STORE_LATENTS
from shmllm_kernels.cpu.row_factors import GATE


def record_heads(
    program: KernelProgram,
    products: Products,
    num_tokens: int,
    x: Tensor,
    width: int,
    weight: Tensor,
    out: Tensor,
) -> None:
    """Record ``out[:, head] = x[:, head] @ weight[head].T``; a head has ``width`` columns of x
    [tokens, columns], at least as many as the weight has."""
    heads, columns, k = weight.shape
    x_kind, kind, _ = products.kinds(weight, is_grouped=True)
    address, stride = products.activations(num_tokens, x, x_kind)
    itemsize = 4 if x_kind == "float32" else 2
    source = [address, stride, itemsize * width]
    target = [out.data_ptr(), 4 * out.shape[1], 4 * columns]
    operands = [*source, *target, weight.data_ptr(), heads, columns, k]
    label = f"multiply {heads}x{columns}x{k}"
    program.record(MULTIPLY_HEADS[x_kind, kind], [num_tokens, *operands], label=label)


class LatentAttentionOps:
    """Records latent attention in a kernel program.

    Args:
        program: the program to record in.
        products: records other products there.
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
            (latent_layout(cache.layers[index]), mixer.num_heads, mixer.rank)
            for index, layer in enumerate(config.layers)
            for mixer in layer.mixers
            if isinstance(mixer, LatentAttentionSpec)
        ]
        size = max((scratch_bytes(*each) for each in every), default=0)
        self._scratch = torch.empty((program.num_threads, size), dtype=torch.uint8)
        states = max((split_states_bytes(*sizes) for _, *sizes in every), default=0)
        self._split_states = torch.empty(states, dtype=torch.uint8)
        size = max(
            (self._index_scratch_bytes(*each) for each in enumerate(config.layers)), default=0
        )
        self._index_scratch = torch.empty((program.num_threads, size), dtype=torch.uint8)

    @property
    def _chosen(self) -> Tensor:
        """The slots that an indexer chose for each token, [max_tokens, top_k] int32."""
        chosen = self._buffers.chosen
        assert chosen is not None, "the model has indexers"
        return chosen

    def _index_scratch_bytes(self, index: int, layer: LayerSpec) -> int:
        """Return the size of one thread's scratch memory for the indexer of a layer, or 0."""
        size = 0
        for mixer in layer.mixers:
            if isinstance(mixer, LatentAttentionSpec) and mixer.indexer is not None:
                cache = self._cache.layers[index]
                layout = latent_layout(cache)
                most_blocks = int(self._requests[cache.group, Division.of(mixer)][5])
                most = most_blocks * layout.block_size
                size = index_scratch_bytes(layout, mixer.indexer.num_heads, most)
        return size

    def store(self, x: Tensor, attention: LatentAttention) -> None:
        """Record the operation `models.ops.Ops.store_latents`, of latents and key parts alone."""
        spec, norm = attention.spec, attention.kv_norm
        cache = self._cache.layers[attention.layer]
        layout = latent_layout(cache)
        operands = [
            x.data_ptr(), 4 * x.stride(0), spec.rank, *self._rotation(spec),
            norm.weight.data_ptr(), word_of_float(norm.spec.eps),
            self._inputs.slot_mapping[cache.group].ctypes.data, cache.blocks.data_ptr(),
            layout.row_bytes, layout.block_size.bit_length() - 1, cache.blocks.stride(0),
            spec.key_dim,
        ]  # fmt: skip
        kernel = STORE_LATENTS[layout.stored, kind_of(norm.weight)]
        self._program.record(kernel, [self._num_tokens, *operands], label="store_latents")

    def choose(
        self,
        x: Tensor,
        latent: Tensor,
        attention: LatentAttention,
        linear: Callable[[Tensor, Linear], Tensor],
    ) -> None:
        """Record the operation `models.ops.Ops.choose_tokens`, with its products."""
        spec, indexer = attention.spec, attention.indexer
        assert indexer is not None, "the layer has an indexer"
        cache = self._cache.layers[attention.layer]
        layout, blocks, norm = latent_layout(cache), cache.blocks, indexer.key_norm
        assert norm.bias is not None, "it is a LayerNorm"
        first_key = blocks.data_ptr() + layout.index_offset
        num_pairs, _, *angles = self._rotation(spec)
        rotation = [num_pairs, int(indexer.spec.interleaved), *angles]
        keys = linear(x, indexer.key)
        operands = [
            keys.data_ptr(), 4 * keys.stride(0), layout.index_dim, *rotation,
            norm.weight.data_ptr(), norm.bias.data_ptr(), word_of_float(norm.spec.eps),
            self._inputs.slot_mapping[cache.group].ctypes.data, first_key,
            layout.row_bytes, layout.block_size.bit_length() - 1, blocks.stride(0),
        ]  # fmt: skip
        kernel = STORE_INDEX_KEYS[layout.stored, kind_of(norm.weight)]
        self._program.record(kernel, [self._num_tokens, *operands], label="store_index_keys")
        weights, queries = linear(x, indexer.head_weights), linear(latent, indexer.query)
        sizes = index_words(layout, indexer.spec.num_heads, blocks.stride(0))
        requests = self._requests[cache.group, Division.of(spec)]
        operands = [
            requests.ctypes.data, sizes.ctypes.data, queries.data_ptr(), 4 * queries.stride(0),
            weights.data_ptr(), 4 * weights.stride(0), self._inputs.positions.ctypes.data,
            first_key, self._chosen.data_ptr(), indexer.spec.top_k,
            self._index_scratch.data_ptr(), self._index_scratch.shape[1], *rotation,
        ]  # fmt: skip
        self._program.record(
            CHOOSE_TOKENS[layout.stored],
            [self._num_tokens, *operands],
            keep=[sizes],
            label="choose_tokens",
        )

    def attend(self, query: Tensor, attention: LatentAttention) -> Tensor:
        """Record the operation `models.ops.Ops.attend_to_latents`."""
        spec = attention.spec
        latents = self._buffers.latents(spec.latent_width)
        out = self._buffers.attended(spec.width)
        head_bytes = 4 * (spec.nope_dim + spec.rope_dim)
        ropes = [query.data_ptr() + 4 * spec.nope_dim, 4 * query.shape[1]]
        rotation = [*ropes, spec.num_heads, head_bytes, *self._rotation(spec)]
        if spec.growth is not None:
            record_growth(self._program, self._inputs, query, spec.query_width, spec.growth)
        self._program.record(ROTATE, [self._num_tokens, *rotation], label="rotate")
        self._multiply(query, spec.nope_dim + spec.rope_dim, attention.key_up, latents)
        self._attend(latents, [*ropes, head_bytes], attention)
        self._multiply(latents, spec.rank, attention.value_up, out)
        if spec.gates_of_elements:
            self.open_heads(out, query[:, spec.query_width :])
        return out

    def open_heads(self, x: Tensor, gates: Tensor) -> None:
        """Record the operation `models.ops.Ops.open_heads`."""
        operands = [x.data_ptr(), x.shape[1], gates.data_ptr(), 4 * gates.stride(0)]
        operands.append(x.shape[1] // gates.shape[1])
        self._program.record(GATE["sigmoid"], [self._num_tokens, *operands], label="gate")

    def _attend(self, latents: Tensor, ropes: list[int], attention: LatentAttention) -> None:
        """Record the attention of latent queries, which its results replace."""
        spec, cache = attention.spec, self._cache.layers[attention.layer]
        layout, blocks = latent_layout(cache), cache.blocks
        division = Division.of(spec)
        requests, is_chosen = self._requests[cache.group, division], spec.indexer is not None
        if is_chosen:
            requests = listed_requests(self._inputs, division, self._chosen)
        widths = spec.num_heads, spec.rank
        entries: Entries = "slots" if is_chosen else "blocks"
        sizes = size_words(layout, *widths, spec.scale, blocks.stride(0), entries)
        rows = [latents.data_ptr(), 4 * latents.shape[1]]
        operands = [
            self._inputs.address_of_step(division), requests.ctypes.data,
            sizes.ctypes.data, *rows, *ropes, *rows, blocks.data_ptr(), self._scratch.data_ptr(),
            self._scratch.shape[1], self._split_states.data_ptr(),
            0 if attention.sinks is None else attention.sinks.data_ptr(),
        ]  # fmt: skip
        kernel = ATTEND_LATENTS[layout.stored]
        self._program.record(kernel, operands, keep=[sizes, requests], label="attend_latents")
        self._program.record(MERGE_LATENTS, operands, label="merge_latents")

    def _multiply(self, x: Tensor, width: int, weight: Tensor, out: Tensor) -> None:
        record_heads(self._program, self._products, self._num_tokens, x, width, weight, out)

    def _rotation(self, spec: LatentAttentionSpec) -> list[int]:
        """Return the number of pairs, whether they are neighbours, cosines and sines."""
        tables = [table.data_ptr() for table in self._buffers.angles[spec.rope]]
        return [spec.rope_dim // 2, int(spec.rope.interleaved), *tables]
