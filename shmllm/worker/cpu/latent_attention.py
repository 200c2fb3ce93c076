"""A latent attention on a CPU: its kernels, and the products with a matrix for each head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig
from shmllm.models.latent_attention import LatentAttention
from shmllm.models.mixer_specs import LatentAttentionSpec
from shmllm.worker.arrays import LongArray
from shmllm.worker.cpu.attention import record_growth
from shmllm.worker.cpu.buffers import CpuBuffers
from shmllm.worker.cpu.cache import CpuKVCache, latent_layout
from shmllm.worker.cpu.inputs import CpuInputs, Division
from shmllm.worker.cpu.products import Products, kind_of
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.head_products import MULTIPLY_HEADS
from shmllm_kernels.cpu.latent_attention import (
    ATTEND_LATENTS,
    MERGE_LATENTS,
    scratch_bytes,
    size_words,
    split_states_bytes,
)
from shmllm_kernels.cpu.latents import ROTATE, STORE_LATENTS


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
        ]  # fmt: skip
        kernel = STORE_LATENTS[layout.stored, kind_of(norm.weight)]
        self._program.record(kernel, [self._num_tokens, *operands], label="store_latents")

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
        return out

    def _attend(self, latents: Tensor, ropes: list[int], attention: LatentAttention) -> None:
        """Record the attention of latent queries, which its results replace."""
        spec, cache = attention.spec, self._cache.layers[attention.layer]
        layout, blocks = latent_layout(cache), cache.blocks
        sizes = size_words(layout, spec.num_heads, spec.rank, spec.scale, blocks.stride(0))
        rows = [latents.data_ptr(), 4 * latents.shape[1]]
        operands = [
            self._num_tokens, self._requests[cache.group, Division.of(spec)].ctypes.data,
            sizes.ctypes.data, *rows, *ropes, *rows, blocks.data_ptr(), self._scratch.data_ptr(),
            self._scratch.shape[1], self._split_states.data_ptr(),
        ]  # fmt: skip
        kernel = ATTEND_LATENTS[layout.stored]
        self._program.record(kernel, operands, keep=[sizes], label="attend_latents")
        self._program.record(MERGE_LATENTS, operands, label="merge_latents")

    def _multiply(self, x: Tensor, width: int, weight: Tensor, out: Tensor) -> None:
        """Record ``out[:, head] = x[:, head] @ weight[head].T``; a head has ``width`` columns of x
        [tokens, columns], at least as many as the weight has."""
        heads, columns, k = weight.shape
        x_kind, kind, _ = self._products.kinds(weight, is_grouped=True)
        address, stride = self._products.activations(self._num_tokens, x, x_kind)
        itemsize = 4 if x_kind == "float32" else 2
        source = [address, stride, itemsize * width]
        target = [out.data_ptr(), 4 * out.shape[1], 4 * columns]
        operands = [*source, *target, weight.data_ptr(), heads, columns, k]
        kernel = MULTIPLY_HEADS[x_kind, kind]
        label = f"multiply {heads}x{columns}x{k}"
        self._program.record(kernel, [self._num_tokens, *operands], label=label)

    def _rotation(self, spec: LatentAttentionSpec) -> list[int]:
        """Return the number of pairs, whether they are neighbours, cosines and sines."""
        tables = [table.data_ptr() for table in self._buffers.angles[spec.rope]]
        return [spec.rope_dim // 2, int(spec.rope.interleaved), *tables]
